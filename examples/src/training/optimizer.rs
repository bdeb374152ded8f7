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
    HostAdamWConfig, Memory, OffloadConfig, OffloadRecord, OffloadedAdamW, ParameterShards,
    ZeroConfig, ZeroError, ZeroOptimizer,
};
use ciborium::Value;

use super::error::TrainingError;
use super::ranks::Rank;

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

/// What trains on `B`.
pub type TrainingOptimizer<B> = ZeroOptimizer<ClipGlobalNorm<PlacedAdamW<B>>>;

/// The optimizer for a Learner with a ZeroStrategy over `ranks` ranks, where it goes into the
/// layers around it.
///
/// # Errors
///
/// [`TrainingError::Options`].
pub fn in_learner<B: AutodiffBackend>(
    adamw: &HostAdamWConfig,
    zero: &ZeroConfig,
    ranks: usize,
) -> Result<TrainingOptimizer<B>, TrainingError> {
    let clip = clipped(adamw, zero)?;
    Ok(with_norm_of_all_ranks(
        ZeroOptimizer::in_learner(clip, zero.settings()),
        ranks,
    ))
}

/// The optimizer of a rank in a loop of one's own.
///
/// # Errors
///
/// [`TrainingError::Options`]; [`TrainingError::Ranks`] if the ranks' settings differ.
pub fn of_rank<B: AutodiffBackend>(
    adamw: &HostAdamWConfig,
    zero: &ZeroConfig,
    rank: &Rank,
) -> Result<TrainingOptimizer<B>, TrainingError> {
    let clip = clipped(adamw, zero)?;
    let optimizer = ZeroOptimizer::new(clip, rank.clone(), zero.settings())?;
    Ok(with_norm_of_all_ranks(optimizer, rank.world_size()))
}

/// AdamW, clipped to the configuration's norm.
///
/// Without clipping the limit is `f32::MAX`: gradients are multiplied with 1, which changes no bit,
/// and the type is the same.
fn clipped<B: AutodiffBackend>(
    adamw: &HostAdamWConfig,
    zero: &ZeroConfig,
) -> Result<ClipGlobalNorm<PlacedAdamW<B>>, TrainingError> {
    let adamw = PlacedAdamW::new(adamw, zero)?;
    let max_norm = zero.gradient_clipping.unwrap_or(f32::MAX.into());
    Ok(ClipGlobalNorm::new(adamw, max_norm as f32).expect("the configuration's norm is positive"))
}

/// A rank has only a shard of the gradients, so the norm is reduced over all ranks.
fn with_norm_of_all_ranks<B: AutodiffBackend>(
    optimizer: TrainingOptimizer<B>,
    ranks: usize,
) -> TrainingOptimizer<B> {
    if ranks == 1 {
        return optimizer;
    }
    let norm = optimizer.inner().norm();
    optimizer.with_norm(move |value| norm.provide(value))
}

impl<B: AutodiffBackend> PlacedAdamW<B> {
    fn new(adamw: &HostAdamWConfig, zero: &ZeroConfig) -> Result<Self, TrainingError> {
        if zero.offload_optimizer == Memory::Device {
            let burns = AdamWConfig::new()
                .with_beta_1(adamw.beta_1 as f32)
                .with_beta_2(adamw.beta_2 as f32)
                .with_epsilon(adamw.epsilon as f32)
                .with_weight_decay(adamw.weight_decay as f32);
            return Ok(Self::Device(burns.init()));
        }
        let offload = OffloadConfig {
            bucket_elements: zero.settings().bucket_elements,
            ..OffloadConfig::new(adamw.clone())
        };
        let refused = |error: ZeroError| TrainingError::Options(error.to_string());
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
