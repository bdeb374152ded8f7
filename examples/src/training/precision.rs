//! Mixed precision.

use std::fmt;

use burn::backend::Autodiff;
use burn_amp::{AmpConfig, Autocast, Configured, GradScalerConfig};
use burn_checkpoint::Remat;
use burn_fused::FusedBackward;
use burn_zero::Sharded;
use clap::ValueEnum;
use serde::Serialize;

/// What differentiates on `B`, and what `fit` estimates.
pub type Differentiating<B> = FusedBackward<Autodiff<Remat<B>>>;

/// The backend that trains on `B`, for every precision, every choice for activations and every
/// number of ranks: one type, so the training is compiled once for each backend.
pub type Training<B> = Autocast<Sharded<Differentiating<B>>, Configured>;

/// What `--amp` chooses from.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Amp {
    /// f32 throughout
    Off,
    /// bfloat16 where it is safe; needs no loss scale
    Bf16,
    /// IEEE half precision where it is safe, with dynamic loss scaling
    F16,
}

impl Amp {
    /// Autocast and PyTorch's loss scaling, which only f16 needs.
    pub fn configs(self) -> (AmpConfig, GradScalerConfig) {
        match self {
            Self::Off => (AmpConfig::off(), GradScalerConfig::disabled()),
            Self::Bf16 => (AmpConfig::bf16(), GradScalerConfig::disabled()),
            Self::F16 => (AmpConfig::f16(), GradScalerConfig::default()),
        }
    }

    /// What most of the arithmetic is in: `f32`, `bf16` or `f16`.
    pub fn dtype(self) -> &'static str {
        match self {
            Self::Off => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

/// As on the command line.
impl fmt::Display for Amp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            lower => lower.dtype(),
        })
    }
}
