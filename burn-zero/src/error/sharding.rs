//! The faults of sharded training.

use burn_backend::DType;
use thiserror::Error;

/// What cannot be trained in shards, found before anything is sent wherever that is possible.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ShardingFault {
    /// A step before the optimizer knows the model.
    #[error(
        "there is no model yet: call `let model = update.prepare(model)?` before the first forward, \
         so that all ranks start from the same weights"
    )]
    NotPrepared,

    /// A model, gradient or state that does not belong to the model that was prepared. The text
    /// names it, with both shapes, and what to do.
    #[error("{0}")]
    OtherModel(String),

    /// A parameter whose gradients leave in backward for another optimizer over ranks.
    #[error(
        "the gradients of {path} leave during backward for another update over ranks, so this one would get none: \
         give the groups of one update their optimizers (`Update::of_groups`), or drop the other one before this one is prepared"
    )]
    SecondUpdate {
        /// Path of the parameter.
        path: String,
    },

    /// A backend without hooks.
    #[error("{what}, which the backend {backend} cannot: use `Sharded<Autodiff<..>>`")]
    NotSharded {
        /// What needs hooks.
        what: &'static str,
        /// Name of the backend.
        backend: String,
    },

    /// A backend that cannot hold parameters in host memory.
    #[error(
        "parameters in host memory are uploaded at each use, which the backend {backend} cannot: put a `Remat` below autodiff, \
         `Autodiff<Remat<..>>`"
    )]
    NoRemat {
        /// Name of the backend.
        backend: String,
    },

    /// A type that neither collectives nor the optimizer on the host support.
    #[error(
        "{path} is {dtype:?}: only f32, bf16 and f16 are exchanged between ranks and updated on the host"
    )]
    UnsupportedDtype {
        /// Path of the parameter.
        path: String,
        /// Its type.
        dtype: DType,
    },

    /// A parameter with more dimensions than the shard of a
    /// [`Partition::Whole`](crate::Partition::Whole) can have.
    #[error(
        "{path} has {dimensions} dimensions: with `partition: Partition::Whole` the optimizer meets \
         parameters in their shape, and Burn's optimizers keep state of tensors of at most 8; hold it in fewer dimensions and \
         reshape it in `forward`"
    )]
    TooManyDimensions {
        /// Path of the parameter.
        path: String,
        /// How many it has.
        dimensions: usize,
    },

    /// The optimizer updates trial tensors in another way if they are sharded.
    #[error(
        "{optimizer} cannot be sharded so: of trial tensors it makes {whole:?}, of their shards {cut:?}; {instead}"
    )]
    NotShardable {
        /// Type of the optimizer.
        optimizer: String,
        /// The trial tensors, updated whole by one optimizer.
        whole: Vec<f32>,
        /// The same, updated in shards.
        cut: Vec<f32>,
        /// What to do.
        instead: &'static str,
    },

    /// State of an optimizer that cannot be taken apart or put together.
    #[error("state of the optimizer: {reason}")]
    State {
        /// What is wrong, and with which entry.
        reason: String,
    },

    /// State of an optimizer whose type a record does not keep.
    #[error(
        "{path} is {dtype:?}, but a record keeps the optimizer's state of it as {kept:?}, because Burn's records of tensors have no \
         type of their own: train parameters in {kept:?}, under autocast if the model computes in a lower precision, or with \
         `OffloadedAdamW`, whose state is f32 and resumes exactly"
    )]
    StateDtype {
        /// Path of the parameter.
        path: String,
        /// Its type.
        dtype: DType,
        /// The type of the state when it is loaded.
        kept: DType,
    },
}
