//! Mixed precision: the only file of the example that knows about it.

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{Interrupter, LearningComponentsTypes, SupervisedTraining};
use burn_amp::{
    AmpConfig, Autocast, Configured, GradScaler, GradScalerConfig, LossScaleMetric,
    SkippedStepsMetric,
};

use super::error::GptError;
use super::options::Amp;

/// The backend that trains on `B`, whatever the precision: one type, so the training is compiled once for each backend.
pub type Training<B> = Autocast<Autodiff<B>, Configured>;

impl Amp {
    /// Autocast and loss scaling: only f16 is in need of the latter.
    pub fn configs(self) -> (AmpConfig, GradScalerConfig) {
        match self {
            Self::Off => (AmpConfig::off(), GradScalerConfig::disabled()),
            Self::Bf16 => (AmpConfig::bf16(), GradScalerConfig::disabled()),
            Self::F16 => (AmpConfig::f16(), GradScalerConfig::default()),
        }
    }
}

/// The precision of one training run.
pub struct Precision {
    amp: Amp,
    scaler: GradScaler,
}

impl Precision {
    /// Sets the precision of this process, after asking the device whether it can compute in it; a loss scale that
    /// collapses interrupts the training.
    ///
    /// # Errors
    ///
    /// [`GptError::Precision`].
    pub fn install<B: AutodiffBackend>(
        amp: Amp,
        device: &B::Device,
        interrupter: &Interrupter,
    ) -> Result<Self, GptError> {
        let (config, scaler) = amp.configs();
        config.check::<B>(device)?;
        config.install()?;
        let scaler = GradScaler::new(&scaler)?.with_interrupter(interrupter.clone());
        Ok(Self { amp, scaler })
    }

    /// What most of the arithmetic is in, as in the report: `f32`, `bf16` or `f16`.
    pub fn name(&self) -> &'static str {
        self.amp.precision()
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

    /// The same precision with a loss scale of its own, for steps that are thrown away.
    pub fn rehearsal(&self) -> Self {
        let (_, scaler) = self.amp.configs();
        Self {
            amp: self.amp,
            scaler: GradScaler::new(&scaler).expect("the training has one like it"),
        }
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
