//! The handle of a scaler, shared by all its users.

use std::borrow::Borrow;
use std::sync::Arc;

use burn::tensor::{Tensor, backend::AutodiffBackend};
use burn::train::Interrupter;
use burn_decorator::cell::Scope;
use burn_decorator::ranks;

use super::{
    active::{Said, saying},
    config::{GradScalerConfig, positive},
    overflow::Overflow,
    registry,
    state::{Shared, State},
};
use crate::cast::{UNDER_WAY, UnderWay};
use crate::{AmpError, FirstNonFinite};

/// Dynamic loss scaling, as PyTorch's `torch.amp.GradScaler` does it, without a change in the
/// training code.
///
/// A scaler is a handle: clones share one scale. It becomes the scale of an update
/// ([`Update::scale`](burn_update::Update::scale)), and that is all: `backward` of
/// [`Autocast`](crate::Autocast) multiplies the loss by the scale, gradients are unscaled where they
/// are read, and the update skips a step with a non-finite gradient and moves the scale. So there is
/// no `scaler.scale(loss)`, `unscale_` or `update`, and clipping and accumulation only get true
/// gradients. An update whose scale nobody reads needs no handle: it takes a [`GradScalerConfig`].
///
/// Use one scaler for one training run, with all of the run's updates and worker threads. As in
/// PyTorch, the optimizers of a GAN share one, and the scale moves once an iteration: it grows when
/// all of them have taken their steps, or one steps again, and backs off at the first overflow. Or
/// each network has its own: see [`backward`](Self::backward).
///
/// # Which losses does a scaler scale?
///
/// Those of its own model, on any thread: a parameter that one of its updates has updated took part
/// in them. A loss of another training, which may be scaled by hand, is left as it is.
///
/// Before the first step of an update its model is not known. Until then its scaler takes the losses
/// on its thread: that where it was made, where it became the scale of an update, or where a step
/// was tried. If there are none, it takes those on threads without a scaler, only in f16, which
/// needs a scale: a Learner with several devices computes its losses there.
///
/// What the program says comes first: [`scaler.backward(loss)`](Self::backward), an update's own
/// [`backward`](burn_update::Update::backward), and [`GradScaler::unscaled`](Self::unscaled). Where
/// a loss is computed from the parameters of several scalers' models and nothing is said, it is
/// taken by the last that was used on the thread, with a warning. Gradients carry their own inverse
/// scale, so they are right with any scaler that does not overflow. A scaler that is no update's
/// scale scales no loss that is not given to it, because no step would be skipped.
///
/// # Reading it
///
/// Every accessor is exact: within a window of micro-batches it waits for their flags to arrive from
/// the device. The metrics do not ask the device for them; they show the last ones that were read.
///
/// ```
/// use burn::{backend::Autodiff, optim::{AdamConfig, GradientsParams}, prelude::*};
/// use burn_amp::{GradScaler, GradScalerConfig};
/// use burn_update::Update;
///
/// type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let model = nn::LinearConfig::new(4, 2).init::<B>(&device);
///
/// let scaler = GradScaler::new(GradScalerConfig::default())?;
/// let optimizer = AdamConfig::new().init::<B, nn::Linear<B>>();
/// let mut update = Update::new(optimizer).scale(scaler.clone())?;
///
/// // The loss overflows: the step is skipped, the scale halves, and the parameters with non-finite gradients are known.
/// let loss = model.forward(Tensor::<B, 2>::ones([1, 4], &device)).sum() * f32::INFINITY;
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// let model = update.step(1e-3, model, gradients)?;
///
/// assert_eq!(scaler.scale(), 32768.0);
/// assert_eq!(scaler.skipped_steps(), 1);
/// assert_eq!(scaler.last_overflow().unwrap().parameters, ["weight", "bias"]);
/// # Ok::<(), burn_update::UpdateError>(())
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
    /// A scaler with its own state.
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

    /// A scaler that does nothing: losses are not scaled, steps are not checked, updates are as
    /// without one.
    pub fn disabled() -> Self {
        Self::new(GradScalerConfig::disabled()).expect("the default configuration is valid")
    }

    /// Stops training through `interrupter` (that of Burn's `SupervisedTraining`) where a step
    /// would return an error: see [`UpdateScale`](crate::UpdateScale).
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
    /// use burn::{backend::Autodiff, optim::{GradientsParams, SgdConfig}, prelude::*};
    /// use burn_amp::{Autocast, F16, GradScaler};
    /// use burn_update::Update;
    ///
    /// type B = Autocast<Autodiff<burn_flex::Flex>, F16>;
    /// let device = Default::default();
    /// let model = || nn::LinearConfig::new(1, 1).init::<B>(&device);
    /// let (mut generator, mut discriminator) = (model(), model());
    /// let (scaler_g, scaler_d) = (GradScaler::default(), GradScaler::default());
    /// let sgd = || SgdConfig::new().init::<B, nn::Linear<B>>();
    /// let mut update_g = Update::new(sgd()).scale(scaler_g.clone())?;
    /// let mut update_d = Update::new(sgd()).scale(scaler_d.clone())?;
    ///
    /// let noise = Tensor::<B, 2>::ones([4, 1], &device);
    /// let loss = discriminator.forward(generator.forward(noise.clone()).detach()).mean();
    /// let gradients = GradientsParams::from_grads(scaler_d.backward(loss), &discriminator);
    /// discriminator = update_d.step(1e-3, discriminator, gradients)?;
    ///
    /// let loss = discriminator.forward(generator.forward(noise)).mean().neg();
    /// let gradients = GradientsParams::from_grads(scaler_g.backward(loss), &generator);
    /// generator = update_g.step(1e-3, generator, gradients)?;
    /// # let _ = generator;
    /// # Ok::<(), burn_update::UpdateError>(())
    /// ```
    pub fn backward<B: AutodiffBackend, const D: usize>(&self, loss: Tensor<B, D>) -> B::Gradients {
        saying(Said::Scaler(self.clone()), || loss.backward())
    }

    /// Runs `backward`, in which no loss is scaled: for a loss that is scaled by hand.
    ///
    /// A training beside a scaler's is left alone without it, except on the scaler's own thread
    /// before the first step of its update.
    pub fn unscaled<R>(backward: impl FnOnce() -> R) -> R {
        saying(Said::Unscaled, backward)
    }

    /// Notes that the current thread uses this scaler.
    pub(super) fn use_on_thread(&self) {
        registry::use_on_thread(self.shared());
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
