//! A learning rate that follows updates, not micro-batches.

use burn::{
    lr_scheduler::LrScheduler,
    optim::LearningRate,
    record::{PrecisionSettings, Record},
    tensor::backend::Backend,
};
use burn_decorator::ranks::SharedFn;
use serde::{Deserialize, Serialize};

use crate::CountsUpdates;

/// A scheduler that advances once per update. It may be stepped for every micro-batch, as Burn's
/// `Learner` does, but does not advance within a window or when an update was skipped (as
/// Accelerate's `AcceleratedScheduler`).
///
/// ```
/// use burn::{lr_scheduler::{LrScheduler, linear::LinearLrSchedulerConfig}, nn::Linear};
/// use burn::{backend::Autodiff, optim::{GradientsParams, SgdConfig}, prelude::*};
/// use burn_accum::AccumConfig;
/// use burn_update::Update;
///
/// type B = Autodiff<burn_flex::Flex>;
/// let mut model: Linear<B> = nn::LinearConfig::new(4, 2).init(&Default::default());
/// let mut update = Update::new(SgdConfig::new().init()).accumulate(AccumConfig::mean(2))?;
///
/// let falling = LinearLrSchedulerConfig::new(0.3, 0.1, 2).init().unwrap();
/// let mut schedule = update.per_update(falling);
/// for expected in [0.3, 0.3, 0.2, 0.2, 0.1] {
///     let lr = schedule.step();
///     assert!((lr - expected).abs() < 1e-12);
///     model = update.step(lr, model, GradientsParams::new())?;
/// }
/// # Ok::<(), burn_update::UpdateError>(())
/// ```
#[derive(Clone)]
pub struct PerUpdate<S> {
    inner: S,
    source: SharedFn<(), u64>,
    state: State,
}

/// Where the scheduler is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// Not stepped yet.
    New,
    /// Loaded from a record and not stepped since; `behind` is the number of updates that it has
    /// not followed yet.
    Loaded { lr: LearningRate, behind: u64 },
    /// `lr` holds since `updates` updates.
    Running { lr: LearningRate, updates: u64 },
}

impl<S> PerUpdate<S> {
    /// Follows the updates of an [`Update`](crate::Update), of whose
    /// [`progress`](crate::Update::progress) this is a count, or of an accumulation's
    /// `updates()`. [`Update::per_update`](crate::Update::per_update) makes it.
    pub fn new<C>(inner: S, updates: &C) -> Self
    where
        C: CountsUpdates + Clone + Send + Sync + 'static,
    {
        let updates = updates.clone();
        Self::from_fn(inner, move || updates.updates())
    }

    /// Follows any count of updates taken, for instance under a loss scaler that skips whole
    /// windows:
    ///
    /// ```
    /// # use burn::lr_scheduler::constant::ConstantLr;
    /// # use burn_amp::GradScaler;
    /// # use burn_update::PerUpdate;
    /// let scaler = GradScaler::default();
    /// let taken = {
    ///     let scaler = scaler.clone();
    ///     move || scaler.steps() - scaler.skipped_steps()
    /// };
    /// let scheduler = PerUpdate::from_fn(ConstantLr::from(1e-3), taken);
    /// # let _ = scheduler;
    /// ```
    pub fn from_fn(inner: S, updates: impl Fn() -> u64 + Clone + Send + Sync + 'static) -> Self {
        Self {
            inner,
            source: SharedFn::new(move |()| updates()),
            state: State::New,
        }
    }

    /// The scheduler that it advances.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// Gives the scheduler back.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S: LrScheduler> LrScheduler for PerUpdate<S> {
    type Record<B: Backend> = PerUpdateRecord<S::Record<B>>;

    fn step(&mut self) -> LearningRate {
        let updates = self.source.call(());
        let (mut lr, advance) = match self.state {
            State::New => (self.inner.step(), 0),
            State::Loaded { lr, behind } => (lr, behind),
            State::Running { lr, updates: seen } => (lr, updates.saturating_sub(seen)),
        };
        for _ in 0..advance {
            lr = self.inner.step();
        }
        // An update that was undone by a scaler with deferred detection is not followed twice.
        let updates = match self.state {
            State::Running { updates: seen, .. } => updates.max(seen),
            _ => updates,
        };
        self.state = State::Running { lr, updates };
        lr
    }

    fn to_record<B: Backend>(&self) -> Self::Record<B> {
        let current = match self.state {
            State::New => None,
            State::Loaded { lr, behind } => Some((lr, behind)),
            State::Running { lr, updates } => {
                Some((lr, self.source.call(()).saturating_sub(updates)))
            }
        };
        PerUpdateRecord {
            current,
            inner: self.inner.to_record::<B>(),
        }
    }

    fn load_record<B: Backend>(mut self, record: Self::Record<B>) -> Self {
        self.inner = self.inner.load_record::<B>(record.inner);
        self.state = match record.current {
            None => State::New,
            Some((lr, behind)) => State::Loaded { lr, behind },
        };
        self
    }
}

/// The record of a [`PerUpdate`]. It depends on no absolute number of updates: optimizer and
/// scheduler may be loaded in any order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PerUpdateRecord<R> {
    /// The learning rate, and the number of updates that it has not followed; `None` before the
    /// first step.
    current: Option<(LearningRate, u64)>,
    /// The wrapped scheduler's own record.
    inner: R,
}

impl<B: Backend, R: Record<B>> Record<B> for PerUpdateRecord<R> {
    type Item<S: PrecisionSettings> = PerUpdateRecord<R::Item<S>>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        PerUpdateRecord {
            current: self.current,
            inner: self.inner.into_item(),
        }
    }

    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, device: &B::Device) -> Self {
        Self {
            current: item.current,
            inner: R::from_item(item.inner, device),
        }
    }
}

impl<S: core::fmt::Debug> core::fmt::Debug for PerUpdate<S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("PerUpdate")
            .field("inner", &self.inner)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}
