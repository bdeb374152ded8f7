//! Mixed precision. Only this file and `job.rs`, which reads it from DeepSpeed's file, depend on it.

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{Interrupter, LearningComponentsTypes, SupervisedTraining};
use burn_amp::{
    AmpConfig, Autocast, Configured, GradScaler, GradScalerConfig, LossScaleMetric,
    SkippedStepsMetric,
};
use burn_checkpoint::Remat;
use burn_zero::Sharded;

use super::error::GptError;
use super::options::Amp;

/// The backend that trains on `B`, for every precision, every choice for activations and every number of ranks: one type, so the
/// training is compiled once for each backend.
pub type Training<B> = Autocast<Sharded<Autodiff<Remat<B>>>, Configured>;

impl Amp {
    /// Autocast and PyTorch's loss scaling, which only f16 needs.
    pub fn configs(self) -> (AmpConfig, GradScalerConfig) {
        match self {
            Self::Off => (AmpConfig::off(), GradScalerConfig::disabled()),
            Self::Bf16 => (AmpConfig::bf16(), GradScalerConfig::disabled()),
            Self::F16 => (AmpConfig::f16(), GradScalerConfig::default()),
        }
    }
}

/// The precision of one rank of a training run.
pub struct Precision {
    amp: Amp,
    config: GradScalerConfig,
    scaler: GradScaler,
}

impl Precision {
    /// Sets the precision of this process, after asking the device whether it can compute in it.
    ///
    /// # Errors
    ///
    /// [`GptError::Precision`].
    pub fn install<B: AutodiffBackend>(
        amp: Amp,
        config: &GradScalerConfig,
        device: &B::Device,
    ) -> Result<Self, GptError> {
        let (policy, _) = amp.configs();
        policy.check::<B>(device)?;
        policy.install()?;
        let scaler = GradScaler::new(config)?;
        Ok(Self {
            amp,
            config: config.clone(),
            scaler,
        })
    }

    /// The same precision with a new loss scale: for the rank of this thread, or for steps that are thrown away.
    pub fn renewed(&self) -> Self {
        Self {
            amp: self.amp,
            config: self.config.clone(),
            scaler: GradScaler::new(&self.config).expect("this one was made of it"),
        }
    }

    /// Makes a collapse of the loss scale interrupt the training.
    #[must_use]
    pub fn with_interrupter(mut self, interrupter: &Interrupter) -> Self {
        self.scaler = self.scaler.with_interrupter(interrupter.clone());
        self
    }

    /// What most of the arithmetic is in, as in the report: `f32`, `bf16` or `f16`.
    pub fn name(&self) -> &'static str {
        self.amp.dtype()
    }

    /// Makes an optimizer skip the steps whose gradients overflowed.
    pub fn wrap<B, M, O>(&self, optimizer: O) -> impl Optimizer<M, B> + use<B, M, O> + 'static
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B> + 'static,
    {
        self.scaler.wrap(optimizer)
    }

    /// Shows the loss scale and the skipped steps.
    pub fn watch<LC: LearningComponentsTypes>(
        &self,
        training: SupervisedTraining<LC>,
    ) -> SupervisedTraining<LC> {
        if self.amp != Amp::F16 {
            return training;
        }
        training
            .metric_train_numeric(LossScaleMetric::new(&self.scaler))
            .metric_train_numeric(SkippedStepsMetric::new(&self.scaler))
    }

    /// Updates that were skipped because a gradient was not finite.
    pub fn skipped_steps(&self) -> u64 {
        self.scaler.skipped_steps()
    }

    /// Why the training cannot go on in this precision, if so.
    pub fn error(&self) -> Option<GptError> {
        self.scaler.error().map(GptError::from)
    }
}
