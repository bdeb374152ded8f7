//! The settings of a `ZeroOptimizer`.

use serde::{Deserialize, Serialize};

use super::Stage;
use crate::group::{BufferDtype, ReduceOp};

/// How gradients and the optimizer's state are sharded. All ranks must use the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sharding {
    /// What is sharded. Default [`Stage::One`].
    pub stage: Stage,
    /// Where parameters are cut. Default [`Partition::Elements`].
    pub partition: Partition,
    /// Elements of the gradients that are reduced at once (DeepSpeed's `reduce_bucket_size`), at least: a bucket ends with the
    /// parameter that reaches them. Default 8,388,608. Smaller ones overlap more of the communication with backward
    /// and hold less memory: three buckets at most are under way.
    pub bucket_elements: usize,
    /// Type in which gradients are sent, added up in f32 and rounded once. Default f32; halves the bytes otherwise. Updated
    /// parameters are sent in their own type.
    pub communication_dtype: BufferDtype,
    /// How the ranks' gradients become one. Default [`ReduceOp::Mean`], which is the gradient of the mean loss over all ranks'
    /// data if every rank has equally much. Where they have not, divide each rank's *summed* loss by the number of items of
    /// all ranks, and use [`ReduceOp::Sum`].
    pub reduction: ReduceOp,
}

impl Default for Sharding {
    fn default() -> Self {
        Self {
            stage: Stage::default(),
            partition: Partition::default(),
            bucket_elements: 1 << 23,
            communication_dtype: BufferDtype::F32,
            reduction: ReduceOp::Mean,
        }
    }
}

impl Sharding {
    /// The defaults, at another stage.
    pub fn stage(stage: Stage) -> Self {
        Self {
            stage,
            ..Self::default()
        }
    }
}

/// Where parameters may be cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Partition {
    /// Anywhere: every rank holds the same number of elements. For optimizers that update each element by itself: SGD
    /// with momentum, Adam, AdamW, RMSprop, Adagrad. The optimizer meets flat pieces.
    #[default]
    Elements,
    /// Nowhere: each parameter is on one rank, as balanced as their sizes allow. For optimizers that need a parameter's
    /// shape or norm, such as Muon, LARS and LAMB, or gradients clipped tensor by tensor.
    Parameters,
}
