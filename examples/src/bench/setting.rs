//! What is compared.

use burn_amp::Detection;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::gpt::options::Amp;

/// What `--settings` lists.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Setting {
    /// The backend under autodiff, without a type of burn-amp
    Bare,
    /// Under burn-amp, with policy Off
    Off,
    /// bfloat16 where it is safe
    Bf16,
    /// IEEE half precision where it is safe, with dynamic loss scaling
    F16,
    /// f16 that reads its overflow flag in the step
    F16Sync,
    /// f16 that reads its overflow flag one step late
    F16Deferred,
}

impl Setting {
    /// The name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Off => "off",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F16Sync => "f16-sync",
            Self::F16Deferred => "f16-deferred",
        }
    }

    /// The precision; nothing where burn-amp has no part in it.
    pub fn amp(self) -> Option<Amp> {
        match self {
            Self::Bare => None,
            Self::Off => Some(Amp::Off),
            Self::Bf16 => Some(Amp::Bf16),
            Self::F16 | Self::F16Sync | Self::F16Deferred => Some(Amp::F16),
        }
    }

    /// How the optimizer learns of an overflow.
    pub fn detection(self) -> Detection {
        match self {
            Self::F16Sync => Detection::Sync,
            Self::F16Deferred => Detection::Deferred,
            _ => Detection::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_knows_them_by_their_names() {
        for setting in Setting::value_variants() {
            let value = setting.to_possible_value().unwrap();
            assert_eq!(value.get_name(), setting.name());
            assert_eq!(
                serde_json::to_value(setting).unwrap(),
                serde_json::Value::from(setting.name())
            );
        }
    }
}
