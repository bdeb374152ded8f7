//! Precision, and steps under a loss scale.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, LearningRate, ModuleOptimizer};
use burn::tensor::Tensor;
use burn_amp::{AmpError, Cast, GradScaler, PolicyName};

use crate::on;

/// The precision of the process: [`install`](Self::install) it before the first step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AmpConfig(burn_amp::AmpConfig);

impl AmpConfig {
    /// Matmuls and convolutions in bf16.
    pub fn bf16() -> Self {
        PolicyName::Bf16.into()
    }

    /// Matmuls and convolutions in f16: step with a [`ScaledOptimizer`].
    pub fn f16() -> Self {
        PolicyName::F16.into()
    }

    /// No casts: the backend's own arithmetic, bit for bit.
    pub fn off() -> Self {
        PolicyName::Off.into()
    }

    /// Gives an operation another class.
    pub fn with_op(self, op: impl Into<String>, cast: Cast) -> Self {
        Self(self.0.with_op(op, cast))
    }

    /// Sets the precision for every thread of the process. It counts where a tensor belongs to
    /// autodiff: optimizers keep f32, and so does a model without autodiff unless it is called in
    /// [`autocast`].
    ///
    /// # Errors
    ///
    /// If an operation is unknown or named twice.
    ///
    /// # Panics
    ///
    /// Without the decorated burn-dispatch: see [`is_on`](crate::is_on).
    pub fn install(&self) -> Result<(), AmpError> {
        on::ensure();
        self.0.install()
    }
}

impl From<PolicyName> for AmpConfig {
    fn from(policy: PolicyName) -> Self {
        Self(policy.into())
    }
}

/// Runs `f` in the precision of `P` on this thread, also what does not belong to autodiff.
///
/// # Panics
///
/// As [`AmpConfig::install`].
pub fn autocast<P: burn_amp::Policy, R>(f: impl FnOnce() -> R) -> R {
    on::ensure();
    burn_amp::autocast::<P, R>(f)
}

/// An optimizer that skips a step whose gradients are infinite or NaN, and moves the loss scale.
pub struct ScaledOptimizer {
    optimizer: ModuleOptimizer,
    scaler: GradScaler,
}

impl ScaledOptimizer {
    /// Steps `optimizer` under `scaler`, whose scale every backward pass of the thread that made it
    /// uses.
    ///
    /// # Panics
    ///
    /// As [`AmpConfig::install`].
    pub fn new(optimizer: impl Into<ModuleOptimizer>, scaler: GradScaler) -> Self {
        on::ensure();
        let optimizer = optimizer.into();
        Self { optimizer, scaler }
    }

    /// One step; the model as it was if a gradient is infinite or NaN. Reads one flag a parameter.
    pub fn step<M: Module>(&mut self, lr: LearningRate, model: M, grads: GradientsParams) -> M {
        let mut search = NonFinite {
            grads: &grads,
            found: false,
        };
        model.visit(&mut search);
        let found = search.found;
        self.scaler.update(found);
        match found {
            true => model,
            false => self.optimizer.step(lr, model, grads),
        }
    }

    /// The optimizer inside.
    pub fn into_inner(self) -> ModuleOptimizer {
        self.optimizer
    }
}

struct NonFinite<'a> {
    grads: &'a GradientsParams,
    found: bool,
}

impl ModuleVisitor for NonFinite<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.found
            && let Some(grad) = self.grads.get::<D>(param.id)
        {
            let bad = grad.clone().is_nan().bool_or(grad.is_inf()).any();
            self.found = bad.into_scalar::<bool>();
        }
    }
}
