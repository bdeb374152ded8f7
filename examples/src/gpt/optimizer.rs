//! The optimizer: AdamW with its state on the device or on the host, clipped, in a
//! [`ZeroOptimizer`].
//!
//! One type for both places, so that the training is compiled once.

use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig};
use burn::optim::{GradientsParams, MultiGradientsParams, Optimizer};
use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::backend::AutodiffBackend;
use burn_accum::ClipGlobalNorm;
use burn_zero::{
    Memory, OffloadConfig, OffloadRecord, OffloadedAdamW, ParameterShards, ZeroError, ZeroOptimizer,
};
use ciborium::Value;

use super::error::GptError;
use super::job::Job;

/// Burn's AdamW, on the parameters that a [`ZeroOptimizer`] gives it: with one rank all of them.
type OnDevice<B> = OptimizerAdaptor<AdamW, Shards<B>, B>;

type Shards<B> = ParameterShards<B>;

/// AdamW with its state on the device or on the host.
#[derive(Clone)]
pub enum PlacedAdamW<B: AutodiffBackend> {
    /// On the device: Burn's.
    Device(OnDevice<B>),
    /// On the host.
    Host(OffloadedAdamW),
}

/// Its state.
#[derive(Record, Clone)]
pub enum PlacedRecord<B: AutodiffBackend> {
    /// On the device.
    Device(<OnDevice<B> as Optimizer<Shards<B>, B>>::Record),
    /// On the host.
    Host(OffloadRecord),
}

/// The optimizer of a job over `ranks` ranks. It goes into a Learner with a ZeroStrategy, and there
/// into the layers around it.
///
/// # Errors
///
/// [`GptError::Options`].
pub fn optimizer<B: AutodiffBackend>(
    job: &Job,
    ranks: usize,
) -> Result<ZeroOptimizer<ClipGlobalNorm<PlacedAdamW<B>>>, GptError> {
    let adamw = PlacedAdamW::new(job)?;
    // Without clipping the limit is `f32::MAX`: gradients are multiplied with 1, which changes no
    // bit, and the type is the same.
    let max_norm = job.zero.gradient_clipping.unwrap_or(f32::MAX.into());
    let clip =
        ClipGlobalNorm::new(adamw, max_norm as f32).expect("the configuration's norm is positive");
    let norm = clip.norm();
    let zero = ZeroOptimizer::in_learner(clip, job.zero.settings());
    Ok(match ranks {
        1 => zero,
        // A rank has only a shard of the gradients, so the norm is reduced over all ranks.
        _ => zero.with_norm(move |value| norm.provide(value)),
    })
}

impl<B: AutodiffBackend> PlacedAdamW<B> {
    fn new(job: &Job) -> Result<Self, GptError> {
        let adamw = &job.adamw;
        if job.zero.offload_optimizer == Memory::Device {
            let burns = AdamWConfig::new()
                .with_beta_1(adamw.beta_1 as f32)
                .with_beta_2(adamw.beta_2 as f32)
                .with_epsilon(adamw.epsilon as f32)
                .with_weight_decay(adamw.weight_decay as f32);
            return Ok(Self::Device(burns.init()));
        }
        let offload = OffloadConfig {
            bucket_elements: job.zero.settings().bucket_elements,
            ..OffloadConfig::new(adamw.clone())
        };
        let refused = |error: ZeroError| GptError::Options(error.to_string());
        offload.init().map(Self::Host).map_err(refused)
    }
}

impl<B: AutodiffBackend> Optimizer<Shards<B>, B> for PlacedAdamW<B> {
    type Record = PlacedRecord<B>;

    fn step(&mut self, lr: f64, shards: Shards<B>, grads: GradientsParams) -> Shards<B> {
        match self {
            Self::Device(adamw) => adamw.step(lr, shards, grads),
            Self::Host(adamw) => adamw.step(lr, shards, grads),
        }
    }

    fn step_multi(&mut self, lr: f64, shards: Shards<B>, grads: MultiGradientsParams) -> Shards<B> {
        match self {
            Self::Device(adamw) => adamw.step_multi(lr, shards, grads),
            Self::Host(adamw) => adamw.step_multi(lr, shards, grads),
        }
    }

    fn to_record(&self) -> PlacedRecord<B> {
        match self {
            Self::Device(adamw) => PlacedRecord::Device(adamw.to_record()),
            Self::Host(adamw) => PlacedRecord::Host(Optimizer::<Shards<B>, B>::to_record(adamw)),
        }
    }

    /// Loads the state of a run that kept it in the other place too: the same numbers, bit for bit.
    fn load_record(self, record: PlacedRecord<B>) -> Self {
        let load = Optimizer::<Shards<B>, B>::load_record;
        match (self, record) {
            (Self::Device(adamw), PlacedRecord::Device(it)) => Self::Device(adamw.load_record(it)),
            (Self::Device(adamw), PlacedRecord::Host(it)) => {
                Self::Device(adamw.load_record(moved::<B, _>(it)))
            }
            (Self::Host(adamw), PlacedRecord::Device(it)) => {
                Self::Host(load(adamw, moved::<B, _>(it)))
            }
            (Self::Host(adamw), PlacedRecord::Host(it)) => Self::Host(load(adamw, it)),
        }
    }
}

/// The record as that of the other place: both are serialized alike.
fn moved<B: AutodiffBackend, To: Record<B>>(record: impl Record<B>) -> To {
    let value = Value::serialized(&record.into_item::<FullPrecisionSettings>());
    let item = value
        .expect("AdamW's state can be serialized")
        .deserialized();
    let item = item.expect("both places have one form of AdamW's state");
    To::from_item::<FullPrecisionSettings>(item, &Default::default())
}
