//! How far an update is: what others may see of it.

use burn_decorator::ranks::{ForRank, Shared};
use parking_lot::Mutex;

use crate::Position;

/// How far an [`Update`](crate::Update) is: a handle that stays valid when the update moves into a
/// `Learner`. Clones, of the handle and of the update, share it.
///
/// ```
/// use burn::{backend::Autodiff, nn::LinearConfig, optim::SgdConfig, tensor::Tensor};
/// use burn_update::Update;
///
/// type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let model = LinearConfig::new(4, 2).init::<B>(&device);
/// let mut update = Update::new(SgdConfig::new().init());
/// let progress = update.progress();
///
/// let loss = model.forward(Tensor::<B, 2>::ones([8, 4], &device)).sum();
/// let gradients = update.backward(&model, loss);
/// let _updated = update.step(0.1, model, gradients)?;
/// assert_eq!(progress.updates(), 1);
/// # Ok::<(), burn_update::UpdateError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct UpdateProgress {
    seen: Shared<Seen>,
}

#[derive(Debug, Default)]
struct Seen(Mutex<State>);

#[derive(Clone, Copy, Debug, Default)]
struct State {
    updates: u64,
    /// Requests of a training loop that have reached the update.
    answers: u64,
    position: Option<Position>,
}

impl ForRank for Seen {
    fn for_rank(&self) -> Self {
        Self(Mutex::new(*self.0.lock()))
    }
}

impl UpdateProgress {
    /// Updates so far: steps of the optimizer, without those that were skipped.
    pub fn updates(&self) -> u64 {
        self.seen.0.lock().updates
    }

    /// Where a training in the Learner is in its data when it validates and records, or as the
    /// loaded record says; `None` from the next step on.
    pub fn position(&self) -> Option<Position> {
        self.seen.0.lock().position
    }

    pub(crate) fn set_updates(&self, updates: u64) {
        self.seen.0.lock().updates = updates;
    }

    pub(crate) fn set_position(&self, position: Option<Position>) {
        self.seen.0.lock().position = position;
    }

    pub(crate) fn answer(&self) {
        self.seen.0.lock().answers += 1;
    }

    pub(crate) fn answers(&self) -> u64 {
        self.seen.0.lock().answers
    }
}

/// A count of updates that a learning rate can follow: see [`PerUpdate`](crate::PerUpdate).
pub trait CountsUpdates {
    /// Updates so far.
    fn updates(&self) -> u64;
}

impl CountsUpdates for UpdateProgress {
    fn updates(&self) -> u64 {
        self.updates()
    }
}
