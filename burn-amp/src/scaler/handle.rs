//! The handle of a scaler, shared by all its users.

use std::borrow::Borrow;
use std::sync::Arc;

use burn::train::Interrupter;
use burn_decorator::ranks;

use super::{
    config::{Detection, GradScalerConfig, positive},
    overflow::Overflow,
    registry,
    state::{Shared, State},
};
use crate::{AmpError, FirstNonFinite};

/// Dynamic loss scaling, as PyTorch's `torch.amp.GradScaler` does it, without a change in the training code.
///
/// A scaler is a handle: clones share one scale. [`wrap`](Self::wrap) the optimizer with it, and that is all:
/// `backward` of [`Autocast`](crate::Autocast) multiplies the loss by the scale, gradients are unscaled where they are
/// read, and the wrapped optimizer skips a step with a non-finite gradient and moves the scale. So there is no
/// `scaler.scale(loss)`, `unscale_` or `update`, and clipping and accumulation only get true gradients.
///
/// Use one scaler for one training run, with all of the run's optimizers and worker threads. As in PyTorch, the optimizers of a GAN
/// share one, and the scale is updated once an iteration: it grows when all of them have taken their steps, or one steps again, and
/// backs off at the first overflow. With two scalers on one thread call [`bind_thread`](Self::bind_thread) before each backward pass.
///
/// # Which scaler does `backward` use?
///
/// 1. That of its thread: [`new`](Self::new), [`wrap`](Self::wrap), [`bind_thread`](Self::bind_thread) and every step of a wrapped
///    optimizer bind the thread they run on.
/// 2. Otherwise, only in f16, which needs one: the scaler that stepped last on gradients on the loss's device, since the newest scaler was made;
///    else the newest scaler of the process; else none, with a warning in the log.
///
/// So ranks that are threads, and several runs in one process, each use their own. The second rule is for the threads on which Burn's Learner
/// trains with several devices: no step runs there. It finds the right scaler where runs follow each other. Where such runs are in one process
/// at the same time it may find the other run's, so call `bind_thread` in each run's `TrainStep::step`. Gradients carry their own inverse
/// scale, so they are right with any scaler.
///
/// # Reading it
///
/// Every accessor is exact: under [`Detection::Deferred`] it waits for the last step's flag to arrive from the device.
/// The metrics do not ask the device for it; they show the last flag that was read.
///
/// ```
/// use burn::{backend::Autodiff, optim::{AdamConfig, GradientsParams, Optimizer}, prelude::*};
/// use burn_amp::{GradScaler, GradScalerConfig};
///
/// type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let model = nn::LinearConfig::new(4, 2).init::<B>(&device);
///
/// let scaler = GradScaler::new(GradScalerConfig::default())?;
/// let mut optimizer = scaler.wrap(AdamConfig::new().init::<B, nn::Linear<B>>());
///
/// // The loss overflows: the step is skipped, the scale halves, and the parameters with non-finite gradients are known.
/// let loss = model.forward(Tensor::<B, 2>::ones([1, 4], &device)).sum() * f32::INFINITY;
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// let model = optimizer.step(1e-3, model, gradients);
///
/// assert_eq!(scaler.scale(), 32768.0);
/// assert_eq!(scaler.skipped_steps(), 1);
/// assert_eq!(scaler.last_overflow().unwrap().parameters, ["weight", "bias"]);
/// # Ok::<(), burn_amp::AmpError>(())
/// ```
pub struct GradScaler {
    pub(super) shared: ranks::Shared<Shared>,
}

impl Clone for GradScaler {
    /// The same scaler; in [`ranks::copy_for_rank`] one of the rank, for the thread that copies.
    fn clone(&self) -> Self {
        let scaler = Self {
            shared: self.shared.clone(),
        };
        if ranks::is_copying() {
            registry::register(scaler.shared());
            scaler.bind_thread();
        }
        scaler
    }
}

impl GradScaler {
    /// A scaler with its own state. Binds the current thread.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidScalerConfig`] for the first field that cannot work.
    pub fn new(config: impl Borrow<GradScalerConfig>) -> Result<Self, AmpError> {
        let config = config.borrow();
        config.validate()?;
        let scaler = Self {
            shared: ranks::Shared::new(Shared::new(State::new(config))),
        };
        registry::register(scaler.shared());
        scaler.bind_thread();
        Ok(scaler)
    }

    /// A scaler that does nothing: losses are not scaled, steps are not checked, wrapped optimizers are as they were.
    pub fn disabled() -> Self {
        Self::new(GradScalerConfig::disabled()).expect("the default configuration is valid")
    }

    /// Chooses how wrapped optimizers learn about overflows, from their next step on. Default [`Detection::Sync`].
    #[must_use]
    pub fn with_detection(self, detection: Detection) -> Self {
        self.shared.lock().detection = detection;
        self
    }

    /// Stops training through `interrupter` (that of Burn's `SupervisedTraining`) where a step would panic: see
    /// [`ScaledOptimizer`](crate::ScaledOptimizer).
    #[must_use]
    pub fn with_interrupter(self, interrupter: Interrupter) -> Self {
        self.shared.lock().interrupter = Some(interrupter);
        self
    }

    /// Makes this the scaler of all `backward` calls of the current thread.
    pub fn bind_thread(&self) {
        registry::bind_thread(self.shared());
    }

    /// Sets the scale of the next loss, also a fixed one, as PyTorch's `scaler.update(new_scale)`. The growth tracker stays.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidScalerConfig`] unless `scale` is finite and above 0.
    pub fn set_scale(&self, scale: f32) -> Result<(), AmpError> {
        if !positive(scale) {
            return Err(AmpError::InvalidScalerConfig {
                field: "scale",
                value: scale.to_string(),
                expected: "finite and above 0",
            });
        }
        self.shared.settled().scale.loss_scale.set_scale(scale);
        Ok(())
    }

    /// The scale of the next loss (PyTorch's `get_scale`); 1 if disabled.
    pub fn scale(&self) -> f32 {
        self.shared.settled().scale()
    }

    /// Finite updates since the scale last changed or a step last overflowed (PyTorch's `_get_growth_tracker`).
    pub fn growth_tracker(&self) -> u32 {
        self.shared.settled().scale.loss_scale.growth_tracker()
    }

    /// Optimizer steps so far, skipped ones included; around a `MultiSteps` its micro-batches. A message (`burn_accum::flush`) does not
    /// count.
    pub fn steps(&self) -> u64 {
        self.shared.settled().counters.steps
    }

    /// How many of the steps were skipped.
    pub fn skipped_steps(&self) -> u64 {
        self.shared.settled().counters.skipped
    }

    /// Whether the last step was skipped (PyTorch's `found_inf`). For schedulers and counters that should stand still then.
    pub fn skipped_last_step(&self) -> bool {
        self.shared.settled().counters.skipped_in_a_row > 0
    }

    /// The last step that was skipped, with the parameters whose gradients were non-finite.
    pub fn last_overflow(&self) -> Option<Overflow> {
        self.shared.settled().last_overflow.clone()
    }

    /// The operation that overflowed first in the first step that was skipped, if the training runs its steps in
    /// [`explain_overflow`](crate::explain_overflow).
    pub fn first_non_finite(&self) -> Option<FirstNonFinite> {
        self.shared.lock().first_non_finite.clone()
    }

    /// Why training was stopped, if it was.
    pub fn error(&self) -> Option<AmpError> {
        self.shared.settled().error.clone()
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        self.shared.as_arc()
    }

    /// Panics if there is an error and no interrupter to stop the training.
    pub(super) fn raise(&self) {
        let state = self.shared.lock();
        if let (Some(error), None) = (state.error.clone(), &state.interrupter) {
            drop(state);
            panic!("{error}");
        }
    }
}

/// With the default configuration.
impl Default for GradScaler {
    fn default() -> Self {
        Self::new(GradScalerConfig::default()).expect("the default configuration is valid")
    }
}

impl core::fmt::Debug for GradScaler {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let state = self.shared.lock();
        f.debug_struct("GradScaler")
            .field("scale", &state.scale)
            .field("counters", &state.counters)
            .finish_non_exhaustive()
    }
}
