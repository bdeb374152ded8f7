//! How much of an optimizer is offloaded, and with what.

use burn::tensor::backend::AutodiffBackend;
use serde::{Deserialize, Serialize};

use super::error::require;
use super::{HostAdamWConfig, OffloadError, OffloadedAdamW};
use crate::{OptimizerOffload, ZeroSettings};

/// Configuration of an [`OffloadedAdamW`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OffloadConfig {
    /// AdamW's own numbers.
    pub adamw: HostAdamWConfig,
    /// The part of the elements whose state is on the host, 0 to 1 (DeepSpeed's `offload_optimizer.ratio`, the twin-flow of
    /// ZeRO-Offload++). Default 1. The rest is updated by Burn's AdamW on the device. Parameters are not split: the device
    /// gets those that fit into its part, in the order of the module, and never more. Those of bf16 and f16 have their
    /// masters on the host and go there at any ratio.
    pub ratio: f64,
    /// Parameters in transfer at once, at least 1: downloaded, updated or uploaded. Default 3, one of each. This bounds the memory of
    /// transfers, on the host and on the device.
    pub staging: usize,
    /// Approximate elements of gradients that leave the device at once during backward, at least 1 (DeepSpeed's
    /// `reduce_bucket_size`). Default 8,388,608. At most three such buckets are in transfer. Inside a
    /// [`ZeroOptimizer`](crate::ZeroOptimizer) [`ZeroSettings::bucket_elements`](crate::ZeroSettings::bucket_elements) is used instead.
    pub bucket_elements: usize,
}

impl Default for OffloadConfig {
    fn default() -> Self {
        Self {
            adamw: HostAdamWConfig::default(),
            ratio: 1.0,
            staging: 3,
            bucket_elements: ZeroSettings::default().bucket_elements,
        }
    }
}

impl OffloadConfig {
    /// All state on the host.
    pub fn new(adamw: HostAdamWConfig) -> Self {
        Self {
            adamw,
            ..Self::default()
        }
    }

    /// The configuration for a [`ZeroConfig`](crate::ZeroConfig)'s setting; `None` if that is the device.
    pub fn of(offload: &OptimizerOffload, adamw: HostAdamWConfig) -> Option<Self> {
        match offload {
            OptimizerOffload::None => None,
            OptimizerOffload::Host { ratio } => Some(Self {
                ratio: *ratio,
                ..Self::new(adamw)
            }),
        }
    }

    /// The optimizer, before its first step.
    ///
    /// # Errors
    ///
    /// [`OffloadError::InvalidValue`] for a number that cannot work.
    pub fn init<B: AutodiffBackend>(self) -> Result<OffloadedAdamW<B>, OffloadError> {
        OffloadedAdamW::new(self)
    }

    /// Checks every field.
    ///
    /// # Errors
    ///
    /// As [`init`](Self::init).
    pub fn validate(&self) -> Result<(), OffloadError> {
        self.adamw.validate()?;
        let in_range = (0.0..=1.0).contains(&self.ratio);
        require("ratio", self.ratio, in_range, "from 0 to 1")?;
        let counts = [
            ("staging", self.staging),
            ("bucket_elements", self.bucket_elements),
        ];
        counts
            .into_iter()
            .try_for_each(|(name, count)| require(name, count, count > 0, "at least 1"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deepspeeds_settings_become_these() {
        let adamw = HostAdamWConfig {
            beta_1: 0.8,
            ..HostAdamWConfig::default()
        };
        let offload = OptimizerOffload::Host { ratio: 0.4 };
        let config = OffloadConfig::of(&offload, adamw.clone()).unwrap();
        assert_eq!((config.ratio, &config.adamw), (0.4, &adamw));
        assert_eq!(OffloadConfig::of(&OptimizerOffload::None, adamw), None);
    }

    #[test]
    fn what_cannot_work_is_named() {
        for (text, expected) in [
            (r#"{"ratio": -0.1}"#, "ratio = -0.1"),
            (r#"{"ratio": 1.5}"#, "ratio = 1.5"),
            (r#"{"staging": 0}"#, "staging = 0"),
            (r#"{"bucket_elements": 0}"#, "bucket_elements = 0"),
            (r#"{"adamw": {"beta_2": 1}}"#, "beta_2 = 1"),
        ] {
            let config: OffloadConfig = serde_json::from_str(text).unwrap();
            let message = config.validate().unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        let config = OffloadConfig {
            ratio: f64::NAN,
            ..Default::default()
        };
        assert!(config.validate().is_err());
        assert!(serde_json::from_str::<OffloadConfig>(r#"{"ratoi": 1}"#).is_err());
    }
}
