//! The settings of an update over ranks.

use std::fmt;

use burn_ranks::{BufferDtype, Partition, ReduceOp};
use serde::{Deserialize, Serialize};

/// How gradients and the optimizer's state are sharded. All ranks must use the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ZeroSettings {
    /// What is sharded. Default [`DEFAULT_STAGE`](Self::DEFAULT_STAGE).
    pub stage: Stage,
    /// How elements are assigned to ranks. Default [`Partition::Flat`], for optimizers that update
    /// each element by itself, such as SGD with momentum, Adam, AdamW, RMSprop and Adagrad.
    /// [`Partition::Whole`] is for those that need a parameter's shape or norm, such as Muon, LARS
    /// and LAMB, or gradients clipped tensor by tensor: with `Flat` they would update each rank's
    /// shard as if it were the parameter. [`Update::prepare`](burn_update::Update::prepare) detects
    /// that by trial steps.
    pub partition: Partition,
    /// Elements that are reduced or gathered at once, at most (DeepSpeed's `reduce_bucket_size`).
    /// Default 8,388,608. Smaller buckets overlap more of the communication with backward and hold
    /// less memory: at most the gradients of three buckets and one buffer exist at once. The
    /// gradient of a parameter larger than a bucket is held whole.
    pub bucket_elements: usize,
    /// Type in which gradients are sent; they are added in f32 and rounded once. Default f32; bf16
    /// and f16 halve the bytes. Under a loss scaler stage 2 sends scaled gradients, stages 0 and 1
    /// unscaled ones, whose values below 3e-8 are lost in f16: prefer bf16 there. Updated
    /// parameters are sent in their own type.
    pub communication_dtype: BufferDtype,
    /// How the ranks' gradients are reduced. Default [`ReduceOp::Mean`], which is the gradient of
    /// the mean loss over all ranks' data if every rank has as many items as the others. Otherwise
    /// accumulate with burn-accum's `Normalization::Tokens`, which counts the items of all ranks;
    /// or divide each rank's *summed* loss by the number of items of all ranks
    /// ([`ProcessGroup::agree_sum`](crate::ProcessGroup::agree_sum)), and use [`ReduceOp::Sum`].
    pub reduction: ReduceOp,
    /// Where gradients are between backward and the step. Default [`Memory::Device`].
    pub gradients: Memory,
    /// Where parameters are while no operation uses them (DeepSpeed's `offload_param`). Default
    /// [`Memory::Device`]. With [`Memory::Host`] [`Update::prepare`](burn_update::Update::prepare)
    /// puts them in host memory, as [`offload_parameters`](crate::offload_parameters()) does, and
    /// each step leaves them there: the backend must have a [`Remat`](burn_checkpoint::Remat) in
    /// it. The device holds all of them at the end of a step whose optimizer is on the device:
    /// [`OffloadedAdamW`](crate::OffloadedAdamW) updates one at a time.
    pub parameters: Memory,
    /// Where this rank's shards of the parameters are at [`Stage::Parameters`] of several ranks,
    /// trained ones and frozen ones, and what of them is in the low type of an autocast. Default
    /// [`Memory::Host`]. On a GPU with room for them [`Memory::Device`], as DeepSpeed and FSDP2
    /// have it, frees that host memory, and an optimizer on the device neither uploads nor reads
    /// shards in its step. Both give the same bits for parameters in f32, and records are the same;
    /// new values of a parameter in 16 bits are rounded by the backend's own cast on the device.
    ///
    /// Host memory is the default because a backend of Burn 0.21 does not say how much memory its
    /// device has, and because ranks communicate through host memory: with shards on the device
    /// each gather waits until the device has run what is queued there, and reads the shards of its
    /// unit.
    pub shards: Memory,
}

/// Where gradients are between backward and the step, parameters between their uses, or shards of
/// parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// On the device, with the parameters.
    #[default]
    Device,
    /// In host memory, for an optimizer that is there ([`OffloadedAdamW`](crate::OffloadedAdamW)).
    /// Gradients leave the device during backward, in every stage and with one rank too, so that
    /// the device holds about a bucket of them; reduced gradients stay in host memory. Layers
    /// between backward and the optimizer (loss scalers, accumulation, clipping) compute on the
    /// host: see [`WithHost`](crate::WithHost). The backend must be `Sharded<Autodiff<..>>`.
    Host,
}

impl Default for ZeroSettings {
    fn default() -> Self {
        Self {
            stage: Self::DEFAULT_STAGE,
            partition: Partition::Flat,
            bucket_elements: 1 << 23,
            communication_dtype: BufferDtype::F32,
            reduction: ReduceOp::Mean,
            gradients: Memory::Device,
            parameters: Memory::Device,
            shards: Memory::Host,
        }
    }
}

burn_decorator::config!(ZeroSettings {
    stage: Stage = with_stage,
    partition: Partition = with_partition,
    bucket_elements: usize = with_bucket_elements,
    communication_dtype: BufferDtype = with_communication_dtype,
    reduction: ReduceOp = with_reduction,
    gradients: Memory = with_gradients,
    parameters: Memory = with_parameters,
    shards: Memory = with_shards,
});

impl ZeroSettings {
    /// The stage of settings that name none: 1, which costs no more communication than 0. A
    /// DeepSpeed file that names none has another one:
    /// [`ZeroConfig::DEFAULT_STAGE`](crate::ZeroConfig::DEFAULT_STAGE).
    pub const DEFAULT_STAGE: Stage = Stage::OptimizerState;

    /// The defaults, with another stage.
    pub fn stage(stage: Stage) -> Self {
        Self {
            stage,
            ..Self::default()
        }
    }
}

/// What is sharded over ranks: the stages of ZeRO (Rajbhandari et al., arXiv 1910.02054, section
/// 5).
///
/// Written to files as its number, as in DeepSpeed's JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
#[non_exhaustive]
pub enum Stage {
    /// 0: nothing; plain data parallel.
    DataParallel,
    /// 1: optimizer state.
    OptimizerState,
    /// 2: optimizer state and gradients.
    Gradients,
    /// 3: parameters too. Each rank holds its shard of them, in host memory or on the device
    /// ([`ZeroSettings::shards`]); a unit, which is a repeated block such as `blocks.0` or all
    /// parameters outside of blocks, is gathered when an operation uses one of its parameters, in
    /// forward and in backward, and the device holds a parameter only while it is used. The backend
    /// must be `Sharded<Autodiff<Remat<..>>>`. All ranks use and read parameters (`val()`,
    /// `valid()`, records) in the same order: each gather is a collective, and another order is an
    /// error. With one rank all parameters are where [`ZeroSettings::parameters`] puts them.
    Parameters,
}

impl Stage {
    /// All stages, ascending.
    pub const ALL: [Self; 4] = [
        Self::DataParallel,
        Self::OptimizerState,
        Self::Gradients,
        Self::Parameters,
    ];

    /// The stages in which every rank has whole parameters, ascending.
    pub const WITH_WHOLE_PARAMETERS: [Self; 3] =
        [Self::DataParallel, Self::OptimizerState, Self::Gradients];

    /// Its number in the paper and in DeepSpeed.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Whether the optimizer state is sharded.
    pub fn shards_optimizer_state(self) -> bool {
        self >= Self::OptimizerState
    }

    /// Whether the gradients are sharded.
    pub fn shards_gradients(self) -> bool {
        self >= Self::Gradients
    }
}

impl TryFrom<u8> for Stage {
    type Error = String;

    fn try_from(number: u8) -> Result<Self, Self::Error> {
        let stage = Self::ALL.into_iter().find(|stage| stage.number() == number);
        stage.ok_or_else(|| format!("ZeRO stage {number}, but there are 0, 1, 2 and 3"))
    }
}

impl From<Stage> for u8 {
    fn from(stage: Stage) -> Self {
        stage.number()
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHARDED: [&str; 4] = [
            "plain data parallel",
            "optimizer state sharded",
            "optimizer state and gradients sharded",
            "optimizer state, gradients and parameters sharded",
        ];
        let number = self.number();
        let sharded = SHARDED[usize::from(number)];
        write!(formatter, "ZeRO stage {number} ({sharded})")
    }
}
