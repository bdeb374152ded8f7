//! How far an update is: what others may see of it.

use core::any::Any;
use core::fmt;

use burn_decorator::ranks::{ForRank, Shared};
use parking_lot::Mutex;

use crate::{LoopRequest, Position, UpdateError};

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

/// The model of an update, whose type only its Learner knows.
pub(crate) type AnyModule = Box<dyn Any + Send>;

/// The model with the averages of its weights, from the update to the training loop.
#[derive(Default)]
struct Averaged(Option<Result<AnyModule, UpdateError>>);

impl fmt::Debug for Averaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Averaged").field(&self.0.is_some()).finish()
    }
}

#[derive(Debug, Default)]
struct State {
    updates: u64,
    /// Requests of a training loop that have reached the update.
    answers: u64,
    position: Option<Position>,
    /// What a loop over ranks asks, until the update gets it.
    asked: Option<LoopRequest>,
    /// What the update says to it, until the loop gets it.
    served: Option<Result<Served, UpdateError>>,
    /// What the loop validates with, until the loop gets it.
    averaged: Averaged,
}

/// What an update tells a loop over ranks with each answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Served {
    /// Whether a forward pass gathers parameters from all ranks, so that all must make it.
    pub(crate) gathers_parameters: bool,
}

impl ForRank for Seen {
    fn for_rank(&self) -> Self {
        let state = self.0.lock();
        // A request, if there is one, is that of another rank.
        Self(Mutex::new(State {
            updates: state.updates,
            answers: state.answers,
            position: state.position,
            ..State::default()
        }))
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

    /// Leaves a request of a loop over ranks for the update.
    pub(crate) fn ask(&self, request: LoopRequest) {
        let mut state = self.seen.0.lock();
        (state.asked, state.served) = (Some(request), None);
    }

    /// Takes that request.
    pub(crate) fn take_asked(&self) -> Option<LoopRequest> {
        self.seen.0.lock().asked.take()
    }

    /// Leaves the answer to it for the loop.
    pub(crate) fn serve(&self, answer: Result<Served, UpdateError>) {
        self.seen.0.lock().served = Some(answer);
    }

    /// Takes that answer; `None` if the request has reached no update of this progress.
    pub(crate) fn take_served(&self) -> Option<Result<Served, UpdateError>> {
        let mut state = self.seen.0.lock();
        state.asked = None;
        state.served.take()
    }
}

impl UpdateProgress {
    /// Leaves the model with the averages for the loop; `None` if there are no averages.
    pub(crate) fn give_averaged(&self, model: Option<Result<AnyModule, UpdateError>>) {
        self.seen.0.lock().averaged = Averaged(model);
    }

    /// Takes that model.
    pub(crate) fn take_averaged(&self) -> Option<Result<AnyModule, UpdateError>> {
        self.seen.0.lock().averaged.0.take()
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
