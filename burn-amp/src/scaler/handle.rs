//! The handle of a scaler, shared by all its users.

use std::borrow::Borrow;
use std::sync::Arc;

use burn::tensor::{Tensor, backend::AutodiffBackend};
use burn::train::Interrupter;
use burn_decorator::cell::Scope;
use burn_decorator::ranks;

use super::{
    active::{Said, saying},
    config::{Detection, GradScalerConfig, positive},
    overflow::Overflow,
    registry::{self, BoundBy},
    state::{Shared, State},
};
use crate::cast::{UNDER_WAY, UnderWay};
use crate::{AmpError, FirstNonFinite};

/// Dynamic loss scaling, as PyTorch's `torch.amp.GradScaler` does it, without a change in the
/// training code.
///
/// A scaler is a handle: clones share one scale. [`wrap`](Self::wrap) the optimizer with it, and
/// that is all: `backward` of [`Autocast`](crate::Autocast) multiplies the loss by the scale,
/// gradients are unscaled where they are read, and the wrapped optimizer skips a step with a
/// non-finite gradient and moves the scale. So there is no `scaler.scale(loss)`, `unscale_` or
/// `update`, and clipping and accumulation only get true gradients.
///
/// Use one scaler for one training run, with all of the run's optimizers and worker threads. As in
/// PyTorch, the optimizers of a GAN share one, and the scale is updated once an iteration: it grows
/// when all of them have taken their steps, or one steps again, and backs off at the first
/// overflow. Or each network has its own: see [`backward`](Self::backward).
///
/// # Which losses does a scaler scale?
///
/// Those of its own model, on any thread: a parameter that one of its optimizers has updated took
/// part in them. A loss of another training, which may be scaled by hand, is left as it is.
///
/// Before the first update of an optimizer its model is not known. Until then its scaler takes the
/// losses on its thread: that where it was made, where it [wrapped](Self::wrap) the optimizer, or
/// where a step was tried. If there are none, it takes those on threads without a scaler, only in
/// f16, which needs a scale: a Learner with several devices computes its losses there.
///
/// What the program says comes first: [`scaler.backward(loss)`](Self::backward),
/// [`GradScaler::unscaled`](Self::unscaled) and [`bind_thread`](Self::bind_thread). Where a loss is
/// computed from the parameters of several scalers' models and nothing is said, it is taken by the
/// last that was used on the thread, with a warning. Gradients carry their own inverse scale, so
/// they are right with any scaler that does not overflow. A scaler without a wrapped optimizer
/// scales no loss that is not given to it, because no step would be skipped.
///
/// # Reading it
///
/// Every accessor is exact: under [`Detection::Deferred`] it waits for the last step's flag to
/// arrive from the device. The metrics do not ask the device for it; they show the last flag that
/// was read.
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
            scaler.use_on_thread();
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
        scaler.use_on_thread();
        Ok(scaler)
    }

    /// A scaler that does nothing: losses are not scaled, steps are not checked, wrapped optimizers
    /// are as they were.
    pub fn disabled() -> Self {
        Self::new(GradScalerConfig::disabled()).expect("the default configuration is valid")
    }

    /// Chooses how wrapped optimizers learn about overflows, from their next step on. Default
    /// [`Detection::Sync`].
    #[must_use]
    pub fn with_detection(self, detection: Detection) -> Self {
        self.shared.lock().detection = detection;
        self
    }

    /// Stops training through `interrupter` (that of Burn's `SupervisedTraining`) where a step
    /// would panic: see [`ScaledOptimizer`](crate::ScaledOptimizer).
    #[must_use]
    pub fn with_interrupter(self, interrupter: Interrupter) -> Self {
        self.shared.lock().interrupter = Some(interrupter);
        self
    }

    /// The backward pass of a loss of this scaler's model, in place of `loss.backward()`: PyTorch's
    /// `scaler.scale(loss).backward()`.
    ///
    /// Only needed where several scalers live on one thread and a loss is computed from parameters
    /// of several, such as that of a GAN's generator, which runs through the discriminator; and for
    /// a model whose weights were loaded since its last step.
    ///
    /// ```
    /// use burn::{backend::Autodiff, optim::{GradientsParams, Optimizer, SgdConfig}, prelude::*};
    /// use burn_amp::{Autocast, F16, GradScaler};
    ///
    /// type B = Autocast<Autodiff<burn_flex::Flex>, F16>;
    /// let device = Default::default();
    /// let model = || nn::LinearConfig::new(1, 1).init::<B>(&device);
    /// let (mut generator, mut discriminator) = (model(), model());
    /// let (scaler_g, scaler_d) = (GradScaler::default(), GradScaler::default());
    /// let mut optimizer_g = scaler_g.wrap(SgdConfig::new().init::<B, nn::Linear<B>>());
    /// let mut optimizer_d = scaler_d.wrap(SgdConfig::new().init::<B, nn::Linear<B>>());
    ///
    /// let noise = Tensor::<B, 2>::ones([4, 1], &device);
    /// let loss = discriminator.forward(generator.forward(noise.clone()).detach()).mean();
    /// let gradients = GradientsParams::from_grads(scaler_d.backward(loss), &discriminator);
    /// discriminator = optimizer_d.step(1e-3, discriminator, gradients);
    ///
    /// let loss = discriminator.forward(generator.forward(noise)).mean().neg();
    /// let gradients = GradientsParams::from_grads(scaler_g.backward(loss), &generator);
    /// generator = optimizer_g.step(1e-3, generator, gradients);
    /// # let _ = generator;
    /// ```
    pub fn backward<B: AutodiffBackend, const D: usize>(&self, loss: Tensor<B, D>) -> B::Gradients {
        saying(Said::Scaler(self.clone()), || loss.backward())
    }

    /// Runs `backward`, in which no loss is scaled: for a loss that is scaled by hand.
    ///
    /// A training beside a scaler's is left alone without it, except on the scaler's own thread
    /// before the first step of its optimizer.
    pub fn unscaled<R>(backward: impl FnOnce() -> R) -> R {
        saying(Said::Unscaled, backward)
    }

    /// Makes this the scaler of all losses that are differentiated on the current thread, until
    /// another scaler is bound or used on it.
    pub fn bind_thread(&self) {
        registry::bind_thread(self.shared(), BoundBy::User);
    }

    /// Notes that the current thread uses this scaler.
    pub(super) fn use_on_thread(&self) {
        registry::bind_thread(self.shared(), BoundBy::Use);
    }

    /// Sets the scale of the next loss, also a fixed one, as PyTorch's `scaler.update(new_scale)`.
    /// The growth tracker stays.
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

    /// Finite updates since the scale last changed or a step last overflowed (PyTorch's
    /// `_get_growth_tracker`).
    pub fn growth_tracker(&self) -> u32 {
        self.shared.settled().scale.loss_scale.growth_tracker()
    }

    /// Optimizer steps so far, skipped ones included; of an update with an accumulation its
    /// micro-batches. A flush does not count.
    pub fn steps(&self) -> u64 {
        self.shared.settled().counters.steps
    }

    /// How many of the steps were skipped.
    pub fn skipped_steps(&self) -> u64 {
        self.shared.settled().counters.skipped
    }

    /// Whether the last step was skipped (PyTorch's `found_inf`). For schedulers and counters that
    /// should stand still then.
    pub fn skipped_last_step(&self) -> bool {
        self.shared.settled().counters.skipped_in_a_row > 0
    }

    /// The last step that was skipped, with the parameters whose gradients were non-finite.
    pub fn last_overflow(&self) -> Option<Overflow> {
        self.shared.settled().last_overflow.clone()
    }

    /// The operation that overflowed first in the first step that was skipped, if the training runs
    /// its steps in [`explain_overflow`](crate::explain_overflow).
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

    /// Runs `step`, whose updated parameters are marked as this scaler's, and returns whether there
    /// were any.
    pub(super) fn marking<R>(&self, step: impl FnOnce() -> R) -> (R, bool) {
        let begun = UnderWay {
            owner: self.shared().owner(),
            updated: false,
        };
        let _under_way = Scope::enter(&UNDER_WAY, Some(begun));
        let result = step();
        (result, UNDER_WAY.get().is_some_and(|step| step.updated))
    }

    /// Panics if there is an error and no interrupter to stop the training.
    pub(super) fn raise(&self) {
        if let Err(error) = self.check() {
            panic!("{error}");
        }
    }

    /// The error, if there is one and no interrupter to stop the training.
    pub(super) fn check(&self) -> Result<(), AmpError> {
        let state = self.shared.lock();
        match (&state.error, &state.interrupter) {
            (Some(error), None) => Err(error.clone()),
            _ => Ok(()),
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
