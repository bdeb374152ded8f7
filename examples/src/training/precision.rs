//! Mixed precision.

use std::fmt;

use burn::backend::Autodiff;
use burn_amp::{Autocast, Configured, GradScalerConfig};
use burn_checkpoint::Remat;
use burn_fused::FusedBackward;
use burn_zero::{DeepSpeedPrecision, Sharded};
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
    /// The precision of an update, with PyTorch's loss scaling, which only f16 needs.
    pub fn precision(self) -> DeepSpeedPrecision {
        match self {
            Self::Off => DeepSpeedPrecision::F32,
            Self::Bf16 => DeepSpeedPrecision::Bf16,
            Self::F16 => DeepSpeedPrecision::F16(GradScalerConfig::default()),
        }
    }

    /// The precision of an update whose file may say another: with the file's loss scale if it says
    /// this one.
    pub fn precision_beside(self, file: &DeepSpeedPrecision) -> DeepSpeedPrecision {
        if self == Self::of(file) {
            file.clone()
        } else {
            self.precision()
        }
    }

    /// What the command line calls a file's precision.
    pub fn of(precision: &DeepSpeedPrecision) -> Self {
        match precision {
            DeepSpeedPrecision::F32 => Self::Off,
            DeepSpeedPrecision::Bf16 => Self::Bf16,
            DeepSpeedPrecision::F16(_) => Self::F16,
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
