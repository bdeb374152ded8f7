//! The configuration of offloaded optimizers.

use burn::optim::AdamWConfig;
use burn_ranks::InvalidSetting;
use serde::{Deserialize, Serialize};

use super::OffloadedAdamW;
use crate::error::ZeroError;
use crate::settings::ZeroSettings;

/// Configuration of an [`OffloadedAdamW`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OffloadConfig {
    /// Hyperparameters of AdamW.
    pub adamw: HostAdamWConfig,
    /// Approximate elements of gradients that leave the device at once during backward, at least 1
    /// (DeepSpeed's `reduce_bucket_size`). Default 8,388,608. At most three such buckets are in
    /// transfer. In an [update over ranks](crate::ReduceOverRanks)
    /// [`ZeroSettings::bucket_elements`](crate::ZeroSettings::bucket_elements) is used instead.
    pub bucket_elements: usize,
}

impl Default for OffloadConfig {
    fn default() -> Self {
        Self {
            adamw: HostAdamWConfig::default(),
            bucket_elements: ZeroSettings::default().bucket_elements,
        }
    }
}

burn_decorator::config!(OffloadConfig {
    adamw: HostAdamWConfig = with_adamw,
    bucket_elements: usize = with_bucket_elements,
});

impl OffloadConfig {
    /// A configuration with the default size of buckets.
    pub fn new(adamw: HostAdamWConfig) -> Self {
        Self {
            adamw,
            ..Self::default()
        }
    }

    /// The optimizer, before its first step.
    ///
    /// # Errors
    ///
    /// [`ZeroError::InvalidSetting`] for a number out of its range.
    pub fn init(self) -> Result<OffloadedAdamW, ZeroError> {
        self.validate()?;
        Ok(OffloadedAdamW::new(self))
    }

    /// Checks every field.
    ///
    /// # Errors
    ///
    /// As [`init`](Self::init).
    pub fn validate(&self) -> Result<(), ZeroError> {
        self.adamw.validate()?;
        let count = self.bucket_elements;
        InvalidSetting::unless(count > 0, "bucket_elements", count, "at least 1")?;
        Ok(())
    }
}

/// Configuration of a [`HostAdamW`](super::HostAdamW), under the names of Burn's `AdamWConfig` and
/// with the defaults of PyTorch's `torch.optim.AdamW`, which differ from Burn's (`epsilon` 1e-5,
/// `weight_decay` 1e-4).
///
/// AMSGrad is not supported: it needs a third moment, a third more memory and traffic. Unknown
/// names, `amsgrad` among them, are refused when read from a file.
///
/// The factors are f64: `1 - 0.999` is 0.001 here, as in PyTorch, where Burn's f32 makes it
/// 0.00099998713.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HostAdamWConfig {
    /// Decay of the first moment. Default 0.9.
    pub beta_1: f64,
    /// Decay of the second moment. Default 0.999.
    pub beta_2: f64,
    /// Added to the root of the corrected second moment. Default 1e-8.
    pub epsilon: f64,
    /// Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), multiplied with the
    /// learning rate. Default 0.01.
    pub weight_decay: f64,
}

impl Default for HostAdamWConfig {
    fn default() -> Self {
        Self {
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
        }
    }
}

/// Burn's configuration with these numbers, as f32.
impl From<&HostAdamWConfig> for AdamWConfig {
    fn from(config: &HostAdamWConfig) -> Self {
        Self::new()
            .with_beta_1(config.beta_1 as f32)
            .with_beta_2(config.beta_2 as f32)
            .with_epsilon(config.epsilon as f32)
            .with_weight_decay(config.weight_decay as f32)
    }
}

/// Burn's configuration under the same names, so that a swap of the optimizer changes no value.
///
/// ```
/// use burn::optim::AdamWConfig;
/// use burn_zero::{HostAdamWConfig, OffloadConfig};
///
/// let config = AdamWConfig::new().with_epsilon(1e-6);
/// let optimizer = OffloadConfig::new(HostAdamWConfig::try_from(config)?).init()?; // config.init()
/// # let _ = optimizer;
/// # Ok::<(), burn_zero::ZeroError>(())
/// ```
///
/// # Errors
///
/// This is `TryFrom` and not `From` because Burn's AdamW has what there is not on the host:
/// [`ZeroError::InvalidSetting`] for `amsgrad`, `cautious_weight_decay`, and `grad_clipping`, in
/// place of which burn-accum's `clip_norm` clips by the norm of all gradients. Left out in
/// silence they would change the training.
impl TryFrom<AdamWConfig> for HostAdamWConfig {
    type Error = ZeroError;

    fn try_from(config: AdamWConfig) -> Result<Self, Self::Error> {
        /// The fields of Burn's configuration, which are private there.
        #[derive(Deserialize)]
        struct Fields {
            beta_1: f32,
            beta_2: f32,
            epsilon: f32,
            weight_decay: f32,
            cautious_weight_decay: bool,
            amsgrad: bool,
            grad_clipping: Option<serde_json::Value>,
        }
        /// The number as it was written: 0.9 for the f32 that is nearest to it.
        fn written(number: f32) -> f64 {
            let text = number.to_string();
            text.parse().expect("a number is written as one")
        }
        let value = serde_json::to_value(&config).expect("Burn writes its configurations so");
        let fields: Fields = serde_json::from_value(value).expect("the fields of Burn 0.21.0");
        InvalidSetting::unless(!fields.amsgrad, "amsgrad", true, "false")?;
        let cautious = fields.cautious_weight_decay;
        InvalidSetting::unless(!cautious, "cautious_weight_decay", true, "false")?;
        if let Some(clipping) = fields.grad_clipping {
            let expected =
                "absent: clip all gradients together, by burn_accum's `Update::clip_norm`";
            InvalidSetting::unless(false, "grad_clipping", clipping, expected)?;
        }
        Ok(Self {
            beta_1: written(fields.beta_1),
            beta_2: written(fields.beta_2),
            epsilon: written(fields.epsilon),
            weight_decay: written(fields.weight_decay),
        })
    }
}

burn_decorator::config!(HostAdamWConfig {
    beta_1: f64 = with_beta_1,
    beta_2: f64 = with_beta_2,
    epsilon: f64 = with_epsilon,
    weight_decay: f64 = with_weight_decay,
});

impl HostAdamWConfig {
    /// Checks every field.
    ///
    /// # Errors
    ///
    /// [`ZeroError::InvalidSetting`] for the first field out of its range.
    pub fn validate(&self) -> Result<(), ZeroError> {
        for (name, beta) in [("beta_1", self.beta_1), ("beta_2", self.beta_2)] {
            let holds = (0.0..1.0).contains(&beta);
            InvalidSetting::unless(holds, name, beta, "at least 0 and below 1")?;
        }
        not_negative("epsilon", self.epsilon)?;
        not_negative("weight_decay", self.weight_decay)?;
        Ok(())
    }
}

/// # Errors
///
/// [`InvalidSetting`].
pub(super) fn not_negative(name: &'static str, value: f64) -> Result<(), InvalidSetting> {
    let holds = value.is_finite() && value >= 0.0;
    InvalidSetting::unless(holds, name, value, "finite and not negative")
}
