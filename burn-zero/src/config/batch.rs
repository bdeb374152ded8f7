//! Three batch sizes of which any two give the third.

use serde::{Deserialize, Serialize};

use super::ConfigError;

/// The batch sizes that a configuration names. [`resolve`](Self::resolve) gives the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BatchConfig {
    /// Items an update, over all ranks and all accumulated micro-batches.
    pub train_batch_size: Option<u64>,
    /// Items a forward pass of one rank.
    pub train_micro_batch_size_per_gpu: Option<u64>,
    /// Micro-batches that a rank accumulates for an update.
    pub gradient_accumulation_steps: Option<u64>,
}

/// All batch sizes: `train = micro x steps x world_size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BatchSizes {
    /// Items an update, over all ranks and all accumulated micro-batches.
    pub train: u64,
    /// Items a forward pass of one rank.
    pub micro: u64,
    /// Micro-batches that a rank accumulates for an update.
    pub steps: u64,
    /// Ranks.
    pub world_size: usize,
}

const TRAIN: &str = "train_batch_size";
const MICRO: &str = "train_micro_batch_size_per_gpu";
const STEPS: &str = "gradient_accumulation_steps";

impl BatchConfig {
    /// All sizes for `world_size` ranks, by DeepSpeed's rules: two of them determine the third; if there is only one,
    /// other than the number of steps, that number is 1.
    ///
    /// # Errors
    ///
    /// [`ConfigError::NoBatchSize`], [`NoRanks`](ConfigError::NoRanks),
    /// [`BatchContradiction`](ConfigError::BatchContradiction), [`BatchRemainder`](ConfigError::BatchRemainder), and
    /// [`InvalidValue`](ConfigError::InvalidValue) for a size of 0 or a product above 2^64.
    pub fn resolve(&self, world_size: usize) -> Result<BatchSizes, ConfigError> {
        self.validate()?;
        if world_size == 0 {
            return Err(ConfigError::NoRanks);
        }
        let times = |size: u64| size.checked_mul(world_size as u64);
        let divide = |train: u64, name, value| {
            let divisor = times(value).filter(|divisor| train.is_multiple_of(*divisor));
            divisor
                .map(|divisor| train / divisor)
                .ok_or(ConfigError::BatchRemainder {
                    train,
                    name,
                    value,
                    world_size,
                })
        };
        let given = self.gradient_accumulation_steps;
        let steps = given.unwrap_or(1);
        let (train, micro, steps) =
            match (self.train_batch_size, self.train_micro_batch_size_per_gpu) {
                (None, None) => return Err(ConfigError::NoBatchSize),
                (Some(train), None) => (train, divide(train, STEPS, steps)?, steps),
                (Some(train), Some(micro)) if given.is_none() => {
                    (train, micro, divide(train, MICRO, micro)?)
                }
                (Some(train), Some(micro)) => (train, micro, steps),
                (None, Some(micro)) => {
                    let train = micro.checked_mul(steps).and_then(times).ok_or_else(|| {
                        let product = format!("{micro} x {steps} x {world_size}");
                        ConfigError::invalid(TRAIN, product, "below 2^64")
                    })?;
                    (train, micro, steps)
                }
            };
        if micro.checked_mul(steps).and_then(times) != Some(train) {
            return Err(ConfigError::BatchContradiction {
                train,
                micro,
                steps,
                world_size,
            });
        }
        Ok(BatchSizes {
            train,
            micro,
            steps,
            world_size,
        })
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let sizes = [
            (TRAIN, self.train_batch_size),
            (MICRO, self.train_micro_batch_size_per_gpu),
            (STEPS, self.gradient_accumulation_steps),
        ];
        match sizes.into_iter().find(|(_, size)| *size == Some(0)) {
            Some((name, _)) => Err(ConfigError::invalid(name, 0, "at least 1")),
            None => Ok(()),
        }
    }
}
