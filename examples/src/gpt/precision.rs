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
use burn_checkpoint::Remat;
use burn_zero::{LossScaling, Sharded};

use super::error::GptError;
use super::options::Amp;

/// The backend that trains on `B`, whatever the precision, whatever becomes of activations and however many ranks there are:
/// one type, so the training is compiled once for each backend.
pub type Training<B> = Autocast<Sharded<Autodiff<Remat<B>>>, Configured>;

impl Amp {
    /// Autocast and loss scaling: only f16 is in need of the latter.
    pub fn configs(self) -> (AmpConfig, GradScalerConfig) {
        configs(&self.precision())
    }

    /// The precision in burn-zero's terms: f16 with PyTorch's loss scaling.
    pub fn precision(self) -> burn_zero::Precision {
        let torch = GradScalerConfig::default();
        match self {
            Self::Off => burn_zero::Precision::F32,
            Self::Bf16 => burn_zero::Precision::Bf16,
            Self::F16 => burn_zero::Precision::F16(LossScaling::Dynamic {
                initial_scale: torch.init_scale,
                window: torch.growth_interval,
                hysteresis: torch.hysteresis,
                min_scale: torch.min_scale,
            }),
        }
    }

    /// What `--amp` would be for this precision, whatever the loss scaling.
    pub fn of(precision: &burn_zero::Precision) -> Self {
        match precision {
            burn_zero::Precision::F32 => Self::Off,
            burn_zero::Precision::Bf16 => Self::Bf16,
            burn_zero::Precision::F16(_) => Self::F16,
        }
    }
}

/// A precision of burn-zero in burn-amp's terms.
fn configs(precision: &burn_zero::Precision) -> (AmpConfig, GradScalerConfig) {
    match *precision {
        burn_zero::Precision::F32 => (AmpConfig::off(), GradScalerConfig::disabled()),
        burn_zero::Precision::Bf16 => (AmpConfig::bf16(), GradScalerConfig::disabled()),
        burn_zero::Precision::F16(LossScaling::Fixed { scale }) => {
            (AmpConfig::f16(), GradScalerConfig::fixed(scale))
        }
        burn_zero::Precision::F16(LossScaling::Dynamic {
            initial_scale,
            window,
            hysteresis,
            min_scale,
        }) => {
            let scaler = GradScalerConfig {
                init_scale: initial_scale,
                growth_interval: window,
                hysteresis,
                min_scale,
                ..GradScalerConfig::default()
            };
            (AmpConfig::f16(), scaler)
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
        precision: &burn_zero::Precision,
        device: &B::Device,
    ) -> Result<Self, GptError> {
        let (policy, config) = configs(precision);
        policy.check::<B>(device)?;
        policy.install()?;
        let scaler = GradScaler::new(&config)?;
        Ok(Self {
            amp: Amp::of(precision),
            config,
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

    /// A loss scale that collapses interrupts the training.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_scaling_is_burn_amps() {
        assert_eq!(Amp::F16.configs().1, GradScalerConfig::default());
        assert!(!Amp::Bf16.configs().1.enabled);
        let deepspeeds = configs(&burn_zero::Precision::F16(LossScaling::default())).1;
        assert_eq!(
            (deepspeeds.growth_interval, deepspeeds.hysteresis),
            (1000, 2)
        );
        let fixed = LossScaling::Fixed { scale: 8.0 };
        let fixed = configs(&burn_zero::Precision::F16(fixed)).1;
        assert_eq!((fixed.init_scale, fixed.dynamic), (8.0, false));
        for amp in [Amp::Off, Amp::Bf16, Amp::F16] {
            assert_eq!(Amp::of(&amp.precision()), amp);
        }
    }
}
