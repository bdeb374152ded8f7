//! The configuration of a job: stage, batches, communication, offload. Values only, independent of
//! Burn and of the other crates; `sections` has the rest of a DeepSpeed file, precision and
//! optimizer, and `update` makes an update of all of it.

mod deepspeed;
mod keys;
mod sections;
mod update;

use std::collections::BTreeMap;

use burn_ranks::{BufferDtype, Partition, ReduceOp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use sections::{DeepSpeedConfig, DeepSpeedPrecision};
pub use update::{DeepSpeedParts, FromDeepSpeed};

use crate::error::{ConfigFault, ZeroError};
use crate::settings::{Memory, Stage, ZeroSettings};

/// How a job trains over its ranks. Written by hand, read from DeepSpeed's JSON
/// ([`from_deepspeed_json`](Self::from_deepspeed_json)), or deserialized from its own fields
/// (serde); both refuse unknown names.
///
/// Defaults are those of DeepSpeed 0.19.8 except for the bucket sizes: its 5e8 would put all
/// gradients of most models into one bucket, which could only be reduced after backward.
///
/// ```
/// use burn_zero::{Memory, Stage, ZeroConfig};
///
/// let config = ZeroConfig::from_deepspeed_json(
///     r#"{"train_batch_size": 64, "fp16": {"enabled": true}, "zero_optimization": {"stage": 2, "offload_optimizer":
///         {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "cpu"}}}"#,
/// )?;
/// assert_eq!(config.stage, Stage::Gradients);
/// assert_eq!(config.offload_optimizer, Memory::Host);
/// assert_eq!(config.gradient_clipping, Some(1.0)); // DeepSpeed's default since June 2026
/// assert_eq!(config.sections["fp16"]["enabled"], true); // a `DeepSpeedConfig` makes burn-amp's settings of it
/// let ignored: Vec<_> = config.ignored.keys().collect();
/// assert_eq!(ignored, ["zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_param"]);
///
/// let batch = config.batch.resolve(4)?;
/// assert_eq!((batch.micro, batch.steps), (16, 1));
///
/// let error = ZeroConfig::from_deepspeed_json(r#"{"zero_optimisation": {"stage": 2}}"#).unwrap_err();
/// assert_eq!(error.to_string(), "zero_optimisation: there is no such key; the nearest is `zero_optimization`");
/// # Ok::<(), burn_zero::ZeroError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ZeroConfig {
    /// What is sharded. Default [`DEFAULT_STAGE`](Self::DEFAULT_STAGE).
    pub stage: Stage,
    /// Batch sizes. Default none: one must be set before [`BatchConfig::resolve`].
    pub batch: BatchConfig,
    /// The norm over all parameters and ranks that gradients are to be scaled down to. Default 1;
    /// `None` (0 in DeepSpeed's file) for no clipping.
    pub gradient_clipping: Option<f64>,
    /// Where the optimizer state of a rank's shard is kept and updated (ZeRO-Offload, Ren et al.,
    /// arXiv 2101.06840). Default the device.
    pub offload_optimizer: Memory,
    /// Where parameters are while no operation uses them. Default the device. DeepSpeed's file can
    /// put them in host memory at stage 3; [`ZeroSettings::parameters`] does it in every stage. At
    /// stage 3 of several ranks [`shards`](Self::shards) counts instead.
    pub offload_param: Memory,
    /// Where a rank's shards of the parameters are at stage 3 of several ranks: see
    /// [`ZeroSettings::shards`]. Default host memory. DeepSpeed's file says it by the `device` of
    /// `offload_param`: `"none"` is the device, `"cpu"` host memory; without it they are where the
    /// default is, unlike in DeepSpeed.
    pub shards: Memory,
    /// Elements of gradients that are reduced at a time, at most. Default 8,388,608.
    pub reduce_bucket_size: u64,
    /// Elements of parameters that are gathered at a time, at most. Default 8,388,608. Both fill
    /// the same buckets: the smaller of the two sizes counts.
    pub allgather_bucket_size: u64,
    /// The type in which gradients are sent. Default f32, their own type.
    pub communication_dtype: BufferDtype,
    /// The sections `fp16`, `bf16`, `optimizer` and `scheduler` of DeepSpeed's file as they are: a
    /// [`DeepSpeedConfig`] reads and checks them. `"auto"` is filled in, and what is null is left
    /// out.
    pub sections: BTreeMap<String, Value>,
    /// Keys of the file that have no effect here, as paths, and why they have none.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub ignored: BTreeMap<String, String>,
}

impl Default for ZeroConfig {
    /// Each field that [`settings`](ZeroConfig::settings) reads has the default of that setting,
    /// but for the stage.
    fn default() -> Self {
        let settings = ZeroSettings::stage(Self::DEFAULT_STAGE);
        let bucket_size = settings.bucket_elements as u64;
        Self {
            stage: settings.stage,
            batch: BatchConfig::default(),
            gradient_clipping: Some(1.0),
            offload_optimizer: settings.gradients,
            offload_param: settings.parameters,
            shards: settings.shards,
            reduce_bucket_size: bucket_size,
            allgather_bucket_size: bucket_size,
            communication_dtype: settings.communication_dtype,
            sections: BTreeMap::new(),
            ignored: BTreeMap::new(),
        }
    }
}

impl ZeroConfig {
    /// The stage of a file that names none: 0, as in DeepSpeed. Settings that name none have
    /// another one: [`ZeroSettings::DEFAULT_STAGE`].
    pub const DEFAULT_STAGE: Stage = Stage::DataParallel;

    /// The settings for a [reduction](crate::ReduceOverRanks). Gradients are averaged over
    /// ranks, as in DeepSpeed; parameters are cut at any element: see [`ZeroSettings::partition`]
    /// for optimizers that need the other partition.
    ///
    /// ```
    /// use burn_zero::{ZeroSettings, Stage, ZeroConfig};
    ///
    /// let config = ZeroConfig::from_deepspeed_json(
    ///     r#"{"zero_optimization": {"stage": 2, "reduce_bucket_size": 2e6, "allgather_bucket_size": 1e6}}"#,
    /// )?;
    /// let expected = ZeroSettings { bucket_elements: 1_000_000, ..ZeroSettings::stage(Stage::Gradients) };
    /// assert_eq!(config.settings(), expected);
    /// # Ok::<(), burn_zero::ZeroError>(())
    /// ```
    pub fn settings(&self) -> ZeroSettings {
        let bucket_size = self.reduce_bucket_size.min(self.allgather_bucket_size);
        // Each setting by name, so that a new one is not left at its default unseen.
        ZeroSettings {
            stage: self.stage,
            partition: Partition::Flat,
            // Saturated: longer than any buffer.
            bucket_elements: usize::try_from(bucket_size).unwrap_or(usize::MAX),
            communication_dtype: self.communication_dtype,
            reduction: ReduceOp::Mean,
            gradients: self.offload_optimizer,
            parameters: self.offload_param,
            shards: self.shards,
        }
    }
}

/// The batch sizes that a configuration names. [`resolve`](Self::resolve) computes the others.
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
    /// All sizes for `world_size` ranks, by DeepSpeed's rules: two of them determine the third; if
    /// there is only one, other than the number of steps, that number is 1.
    ///
    /// # Errors
    ///
    /// [`ConfigFault::Key`] for a size of 0 or a product above 2^64; [`ConfigFault::Batch`] for
    /// sizes that contradict each other or do not divide evenly, for none at all, and for no ranks.
    pub fn resolve(&self, world_size: usize) -> Result<BatchSizes, ZeroError> {
        let (train, micro, steps) = (
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
        );
        for (name, size) in [(TRAIN, train), (MICRO, micro), (STEPS, steps)] {
            ConfigFault::require(size != Some(0), name, "0", "at least 1")?;
        }
        let refused = |reason: String| Err(ConfigFault::Batch(reason).into());
        if world_size == 0 {
            return refused("a world of 0 ranks: there must be at least 1".to_owned());
        }
        let ranks = world_size as u64;
        let (micro, steps) = match (train, micro, steps) {
            (None, None, _) => {
                return refused(format!(
                    "neither {TRAIN} nor {MICRO} has a number: put one there, or set it in ZeroConfig::batch"
                ));
            }
            (Some(train), None, steps) => {
                let steps = steps.unwrap_or(1);
                (train / steps.saturating_mul(ranks), steps)
            }
            (Some(train), Some(micro), None) => (micro, train / micro.saturating_mul(ranks)),
            (_, Some(micro), steps) => (micro, steps.unwrap_or(1)),
        };
        let product = micro.checked_mul(steps);
        let Some(product) = product.and_then(|items| items.checked_mul(ranks)) else {
            let product = format!("{micro} x {steps} x {world_size}");
            return Err(ConfigFault::invalid(TRAIN, product, "below 2^64").into());
        };
        match train.filter(|train| *train != product) {
            Some(train) => refused(format!(
                "{TRAIN} {train}, but {MICRO} {micro} x {STEPS} {steps} x {world_size} ranks = {product}"
            )),
            None => Ok(BatchSizes {
                train: product,
                micro,
                steps,
                world_size,
            }),
        }
    }
}
