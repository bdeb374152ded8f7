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

const MICRO: &str = "train_micro_batch_size_per_gpu";
const STEPS: &str = "gradient_accumulation_steps";

impl BatchConfig {
    /// All sizes for `world_size` ranks, by DeepSpeed's rules: two of them give the third, and where only one is there
    /// (not the number of steps) one step is taken.
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
        let Self {
            train_batch_size: train,
            train_micro_batch_size_per_gpu: micro,
            gradient_accumulation_steps: steps,
        } = *self;
        let (train, micro, steps) = match (train, micro, steps) {
            (Some(train), Some(micro), Some(steps)) => (train, micro, steps),
            (Some(train), Some(micro), None) => {
                (train, micro, divide(train, MICRO, micro, world_size)?)
            }
            (Some(train), None, steps) => {
                let steps = steps.unwrap_or(1);
                (train, divide(train, STEPS, steps, world_size)?, steps)
            }
            (None, Some(micro), steps) => {
                let steps = steps.unwrap_or(1);
                (multiply(micro, steps, world_size)?, micro, steps)
            }
            (None, None, _) => return Err(ConfigError::NoBatchSize),
        };
        if product(micro, steps, world_size) != Some(train) {
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
            ("train_batch_size", self.train_batch_size),
            (MICRO, self.train_micro_batch_size_per_gpu),
            (STEPS, self.gradient_accumulation_steps),
        ];
        for (name, size) in sizes {
            if size == Some(0) {
                return Err(invalid(name, "0", "at least 1"));
            }
        }
        Ok(())
    }
}

fn divide(
    train: u64,
    name: &'static str,
    value: u64,
    world_size: usize,
) -> Result<u64, ConfigError> {
    let exact = product(value, 1, world_size).filter(|divisor| train.is_multiple_of(*divisor));
    exact
        .map(|divisor| train / divisor)
        .ok_or(ConfigError::BatchRemainder {
            train,
            name,
            value,
            world_size,
        })
}

fn multiply(micro: u64, steps: u64, world_size: usize) -> Result<u64, ConfigError> {
    product(micro, steps, world_size).ok_or_else(|| {
        let product = format!("{micro} x {steps} x {world_size}");
        invalid("train_batch_size", &product, "below 2^64")
    })
}

fn product(micro: u64, steps: u64, world_size: usize) -> Option<u64> {
    micro
        .checked_mul(steps)?
        .checked_mul(u64::try_from(world_size).ok()?)
}

fn invalid(name: &str, value: &str, expected: &'static str) -> ConfigError {
    ConfigError::InvalidValue {
        path: name.to_owned(),
        value: value.to_owned(),
        expected,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn config(train: Option<u64>, micro: Option<u64>, steps: Option<u64>) -> BatchConfig {
        BatchConfig {
            train_batch_size: train,
            train_micro_batch_size_per_gpu: micro,
            gradient_accumulation_steps: steps,
        }
    }

    proptest! {
        #[test]
        fn any_two_sizes_give_the_third(micro in 1u64..1000, steps in 1u64..1000, world_size in 1usize..1000) {
            let train = micro * steps * world_size as u64;
            let expected = BatchSizes { train, micro, steps, world_size };
            for config in [
                config(Some(train), Some(micro), Some(steps)),
                config(Some(train), Some(micro), None),
                config(Some(train), None, Some(steps)),
                config(None, Some(micro), Some(steps)),
            ] {
                prop_assert_eq!(config.resolve(world_size), Ok(expected));
            }
            if world_size > 1 {
                let error = config(Some(train + 1), Some(micro), None).resolve(world_size);
                prop_assert!(error.is_err());
                let error = config(Some(train + 1), None, Some(steps)).resolve(world_size);
                prop_assert!(error.is_err());
            }
        }
    }

    #[test]
    fn one_size_means_one_step() {
        let sizes = |train, micro, steps| BatchSizes {
            train,
            micro,
            steps,
            world_size: 4,
        };
        assert_eq!(
            config(Some(64), None, None).resolve(4),
            Ok(sizes(64, 16, 1))
        );
        assert_eq!(config(None, Some(2), None).resolve(4), Ok(sizes(8, 2, 1)));
        assert_eq!(
            config(None, None, Some(2)).resolve(4),
            Err(ConfigError::NoBatchSize)
        );
    }

    #[test]
    fn errors_say_the_numbers() {
        let says = |config: BatchConfig, world_size, text: &str| {
            assert_eq!(config.resolve(world_size).unwrap_err().to_string(), text);
        };
        says(
            config(Some(64), Some(4), Some(2)),
            3,
            "train_batch_size 64, but train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x 3 ranks = 24",
        );
        says(
            config(Some(64), Some(5), None),
            3,
            "train_batch_size 64 is no multiple of 3 ranks x train_micro_batch_size_per_gpu 5 = 15",
        );
        says(
            config(Some(64), None, None),
            3,
            "train_batch_size 64 is no multiple of 3 ranks x gradient_accumulation_steps 1 = 3",
        );
        says(
            config(Some(0), None, None),
            3,
            "train_batch_size: 0, but it must be at least 1",
        );
        says(
            config(Some(1), None, None),
            0,
            "a world of 0 ranks: there must be at least 1",
        );
        let huge = config(None, Some(u64::MAX), Some(u64::MAX))
            .resolve(2)
            .unwrap_err();
        assert_eq!(huge.path(), Some("train_batch_size"));
    }
}
