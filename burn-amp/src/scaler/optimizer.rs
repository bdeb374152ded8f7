//! The wrapper: a step with a non-finite gradient anywhere changes nothing.

use std::sync::Arc;

use burn::{
    module::AutodiffModule,
    optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer},
    tensor::backend::AutodiffBackend,
};
use burn_decorator::gradient::{self, catch_overflow, non_finite_on_any_rank};
use burn_decorator::message::{self, Inside};
use burn_decorator::non_finite::{Inspection, Outcome, Probe};

use super::{
    config::Detection,
    deferred::{remember, undo},
    gradients::StepGradients,
    handle::GradScaler,
    record::ScaledRecord,
    shared_scale::{OptimizerId, Step},
};
use crate::AmpError;
use crate::policy::{Off, autocast};

/// An optimizer under a [`GradScaler`]: made by [`GradScaler::wrap`].
///
/// A step with an infinite or NaN gradient anywhere leaves the parameters, the optimizer's moments
/// and its step counts as they were, bit for bit (PyTorch's `scaler.step`). The scale is updated
/// once an iteration (`scaler.update`), which is every step unless several optimizers share the
/// scaler. Gradient clipping inside the wrapped optimizer sees true gradients only. Its arithmetic
/// runs with autocast off.
///
/// The record holds the scaler's state beside the optimizer's: see [`ScaledRecord`].
///
/// A clone has its own optimizer state and shares the scaler; a copy for another rank
/// ([`copy_for_rank`](burn_decorator::ranks::copy_for_rank)) has its own scaler.
///
/// # Panics
///
/// A step panics with the message of [`GradScaler::error`] where training cannot go on:
/// [`ScaleCollapsed`](crate::AmpError::ScaleCollapsed),
/// [`NonFiniteLoss`](crate::AmpError::NonFiniteLoss) (three steps in a row before any was taken),
/// [`HalfPrecisionParameter`](crate::AmpError::HalfPrecisionParameter). Given [an
/// interrupter](GradScaler::with_interrupter) it stops the training with the same message instead,
/// and keeps skipping overflowing steps until that takes effect. Under [`Detection::Deferred`] this
/// happens one step late; after the very last step the error is in the log and in
/// [`GradScaler::error`]. Saving a record never panics.
///
/// # Cost
///
/// To find non-finite gradients, one sum per parameter and one host read of all these sums; an
/// exact check follows only in a step that overflows. Under [`Detection::Deferred`] three small
/// kernels per parameter, because the device decides, and one that undoes. Where ranks train
/// together, one collective a step, in which they exchange which gradients are non-finite. The first step asks the wrapped
/// optimizer, by a step without gradients, what is inside of it.
pub struct ScaledOptimizer<O> {
    inner: O,
    id: OptimizerId,
    scaler: GradScaler,
    /// The outcome of a step that was taken but may have to be undone, and the optimizer before
    /// that step.
    pending: Option<(Arc<dyn Outcome>, O)>,
    /// The decorators inside the wrapped optimizer. Found once.
    inside: Option<Inside>,
}

impl GradScaler {
    /// Puts `optimizer` under this scaler's control. Binds the current thread.
    ///
    /// ```
    /// use burn::{backend::Autodiff, nn::Linear, optim::SgdConfig};
    /// use burn_amp::{GradScaler, GradScalerConfig};
    ///
    /// type B = Autodiff<burn_flex::Flex>;
    /// let scaler = GradScaler::new(GradScalerConfig::fixed(128.0))?;
    /// let optimizer = scaler.wrap(SgdConfig::new().init::<B, Linear<B>>());
    /// # let _ = optimizer;
    /// # Ok::<(), burn_amp::AmpError>(())
    /// ```
    pub fn wrap<O>(&self, optimizer: O) -> ScaledOptimizer<O> {
        self.use_on_thread();
        let id = OptimizerId::default();
        self.shared.lock().register(&id);
        ScaledOptimizer {
            inner: optimizer,
            id,
            scaler: self.clone(),
            pending: None,
            inside: None,
        }
    }
}

impl<O> ScaledOptimizer<O> {
    /// The optimizer, as of the last step. Under [`Detection::Deferred`] it waits for the step's
    /// flag.
    pub fn inner(&self) -> &O {
        match &self.pending {
            Some((outcome, older)) if !outcome.culprits().is_empty() => older,
            _ => &self.inner,
        }
    }

    /// Gives the optimizer back, as of the last step. Under [`Detection::Deferred`] it waits for
    /// the step's flag.
    pub fn into_inner(mut self) -> O {
        self.settle();
        self.inner
    }

    /// The scaler that controls it.
    pub fn scaler(&self) -> &GradScaler {
        &self.scaler
    }

    /// Undoes the last step if it overflowed.
    fn settle(&mut self) {
        if let Some((outcome, older)) = self.pending.take() {
            drop(self.scaler.shared.settled());
            if !outcome.culprits().is_empty() {
                self.inner = older;
            }
        }
    }

    fn advance<B, M>(&mut self, lr: LearningRate, module: M, mut gradients: StepGradients) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        self.settle();
        self.scaler.raise();
        self.scaler.use_on_thread();

        let (module, inside) = match self.inside {
            Some(inside) => (module, inside),
            None => message::describe(|| self.inner.step(lr, module, GradientsParams::new())),
        };
        self.inside = Some(inside);
        gradients.merge::<B, M>(&module);
        // Other ranks' gradients are waited for in any case.
        let deferred = self.scaler.shared.lock().detection == Detection::Deferred && !inside.ranks;
        let probe = if deferred {
            Probe::Exact // the device decides by it
        } else {
            Probe::Sum
        };
        let inspection = Inspection::new::<B, M>(&module, &gradients, probe);
        if let Some((path, dtype)) = inspection.half_precision() {
            let error = AmpError::HalfPrecisionParameter { path, dtype };
            self.scaler.shared.lock().fail(error);
            self.scaler.raise();
            return module;
        }
        let has_gradients = !inspection.ids().is_empty();
        let (module, updated) = self.scaler.clone().marking(|| {
            if deferred && has_gradients {
                self.step_and_undo(lr, module, gradients, inspection)
            } else {
                self.step_if_finite(lr, module, gradients, inspection)
            }
        });
        // Where ranks train together, what was made may be this rank's shards, which no loss is
        // computed from.
        let updated = updated && !inside.ranks;
        self.scaler.shared.lock().stepped(&self.id, updated);
        module
    }

    /// Passes a message on to the wrapped optimizer; no step is taken.
    fn pass_on<B, M>(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let enabled = self.scaler.shared.lock().is_enabled();
        message::report(|inside| inside.loss_scaler |= enabled);
        self.settle();
        if !enabled {
            return self.inner.step(lr, module, grads);
        }
        // A window that is flushed may overflow when it is reduced.
        let flush = || catch_overflow(|| self.inner.step(lr, module, grads));
        let ((module, culprits), updated) = self.scaler.marking(flush);
        let mut state = self.scaler.shared.lock();
        state.absorb_known();
        if updated {
            state.stepped(&self.id, true);
        }
        drop(state);
        if !culprits.is_empty() {
            self.record(culprits);
        }
        module
    }

    /// A step of this optimizer that updates parameters if it is finite.
    fn update(&self) -> Step {
        Step {
            optimizer: self.id.clone(),
            is_update: true,
        }
    }

    /// Records a step; it was skipped if `culprits`, the parameters with non-finite gradients on
    /// any rank, is not empty.
    fn record(&self, culprits: Vec<String>) {
        let found_inf = !culprits.is_empty();
        self.scaler.shared.lock().record(&self.update(), culprits);
        if found_inf {
            self.scaler.raise();
        }
    }

    fn step_if_finite<B, M>(
        &mut self,
        lr: LearningRate,
        module: M,
        gradients: StepGradients,
        inspection: Inspection<B::InnerBackend>,
    ) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let (culprits, _) = inspection.culprits::<B, M>(&module, &gradients, Vec::new());
        let culprits = non_finite_on_any_rank(culprits);
        // Gradients of other ranks, or those of a window, may still overflow when they are reduced.
        let (module, culprits) = match culprits.is_empty() {
            true => catch_overflow(|| gradients.step(&mut self.inner, lr, module)),
            false => (module, culprits),
        };
        self.record(culprits);
        module
    }

    fn step_and_undo<B, M>(
        &mut self,
        lr: LearningRate,
        module: M,
        gradients: StepGradients,
        inspection: Inspection<B::InnerBackend>,
    ) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let ids = inspection.ids().clone();
        let verdict = inspection.into_verdict();
        let older = remember::<_, B, M>(&module, &ids);
        verdict.start_reading();
        let step = self.update();
        self.scaler.shared.lock().defer(step, verdict.clone());
        self.pending = Some((verdict.clone(), self.inner.clone()));

        let module = gradients.step(&mut self.inner, lr, module);
        let found_inf = verdict.non_finite().expect("there are gradients");
        undo::<_, B, M>(module, older, found_inf)
    }
}

impl<O, M, B> Optimizer<M, B> for ScaledOptimizer<O>
where
    O: Optimizer<M, B>,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    type Record = ScaledRecord<O::Record>;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        autocast::<Off, _>(|| {
            if message::received().is_some() {
                self.pass_on(lr, module, grads)
            } else if self.scaler.shared.lock().is_enabled() {
                gradient::update(|| self.advance(lr, module, StepGradients::One(grads)))
            } else {
                self.inner.step(lr, module, grads)
            }
        })
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        autocast::<Off, _>(|| {
            if self.scaler.shared.lock().is_enabled() {
                gradient::update(|| self.advance(lr, module, StepGradients::Several(grads)))
            } else {
                self.inner.step_multi(lr, module, grads)
            }
        })
    }

    fn to_record(&self) -> Self::Record {
        let inner = self.inner().to_record();
        let scaler = self.scaler.shared.settled().to_record();
        ScaledRecord { scaler, inner }
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        // State that is in no record must not come from a step that is undone.
        self.settle();
        self.scaler.shared.settled().load_record(record.scaler);
        self.inner = self.inner.load_record(record.inner);
        self
    }
}

impl<O: Clone> Clone for ScaledOptimizer<O> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner().clone(),
            id: self.id.clone(),
            scaler: self.scaler.clone(),
            pending: None,
            inside: self.inside,
        }
    }
}

impl<O: core::fmt::Debug> core::fmt::Debug for ScaledOptimizer<O> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ScaledOptimizer")
            .field("inner", &self.inner)
            .field("scaler", &self.scaler)
            .finish_non_exhaustive()
    }
}
