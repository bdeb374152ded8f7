//! The module that the optimizer steps on: this rank's shards of the parameters.
#![allow(missing_docs, reason = "records and fields that Burn's derive makes")]

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Tensor, TensorMetadata, TensorPrimitive, backend::Backend};
use burn_backend::AutodiffBackend;
use burn_backend::tensor::FloatTensor;

use crate::offload::HostShards;
use crate::parameters::NewValue;

/// This rank's shards, in the order of the parameters: the optimizer of an update over ranks is an
/// `Optimizer<ParameterShards<B>, B>`, which Rust infers. One that is typed for the model is none:
///
/// ```compile_fail,E0277
/// # use burn::{backend::Autodiff, nn::Linear, optim::AdamConfig};
/// # use burn_update::{Update, UpdateError};
/// # use burn_zero::{ReduceOverRanks, ZeroSettings};
/// # type B = Autodiff<burn_flex::Flex>;
/// # fn main() -> Result<(), UpdateError> {
/// let adam = AdamConfig::new().init::<B, Linear<B>>(); // `.init()`
/// let update: Update<Linear<B>, B> = Update::new(adam).reduce_in_learner(ZeroSettings::default())?;
/// # Ok(())
/// # }
/// ```
///
/// Each shard has one id for the whole training, the same in every process. The shards exist during
/// a step only; the optimizer keeps their state by id.
#[derive(Module, Debug)]
pub struct ParameterShards<B: Backend> {
    shards: Vec<ParameterShard<B>>,
}

/// The first bytes of a shard's id spell "zero": `ParamId`s are random 64-bit numbers, these are
/// the same in every process.
const FIRST_ID: u64 = u64::from_be_bytes(*b"zero\0\0\0\0");

/// The id of the shard of a parameter.
pub(crate) fn shard_id(parameter: usize) -> ParamId {
    ParamId::from(FIRST_ID | parameter as u64)
}

impl<B: Backend> ParameterShards<B> {
    /// From tensors of at most [`MOST_DIMENSIONS`] dimensions and their ids.
    pub(crate) fn with_ids(shards: impl Iterator<Item = (ParamId, FloatTensor<B>)>) -> Self {
        Self {
            shards: shards
                .map(|(id, shard)| ParameterShard::new(id, shard))
                .collect(),
        }
    }

    /// The positions of the parameters and their shards, after a [step on
    /// shards](crate::offload::step_on_shards) that left some on the host.
    pub(super) fn into_updated(
        self,
        mut on_host: HostShards,
    ) -> HashMap<usize, NewValue<B::InnerBackend>>
    where
        B: AutodiffBackend,
    {
        let shards = self.shards.into_iter().map(|shard| {
            let (id, was_read) = shard.was_read();
            let updated = match on_host.remove(&id) {
                // One that was read as a tensor may have changed since.
                Some(data) if !was_read => {
                    drop(shard); // which shares the data
                    NewValue::Host(Arc::unwrap_or_clone(data))
                }
                _ => NewValue::Device(B::inner(shard.into_parts().1)),
            };
            ((id.val() & !FIRST_ID) as usize, updated)
        });
        shards.collect()
    }

    /// The shards and their ids.
    pub(crate) fn into_ids(self) -> impl Iterator<Item = (ParamId, FloatTensor<B>)> {
        self.shards.into_iter().map(ParameterShard::into_parts)
    }
}

/// The variants of a shard, and the functions that match on them.
macro_rules! shard {
    ($($rank:ident = $dimensions:literal),*) => {
        /// A shard of a parameter: flat, or a whole parameter in its shape
        /// ([`Partition::Whole`](crate::Partition::Whole)).
        #[derive(Module, Debug)]
        pub enum ParameterShard<B: Backend> {
            $($rank(Param<Tensor<B, $dimensions>>)),*
        }

        impl<B: Backend> ParameterShard<B> {
            fn new(id: ParamId, shard: FloatTensor<B>) -> Self {
                let rank = shard.rank();
                let shard = TensorPrimitive::Float(shard);
                match rank {
                    $($dimensions => Self::$rank(Param::initialized(id, Tensor::from_primitive(shard))),)*
                    _ => unreachable!("`prepare` refuses parameters of {rank} dimensions"),
                }
            }

            /// Its id, and whether it was read as a tensor.
            fn was_read(&self) -> (ParamId, bool) {
                match self {
                    $(Self::$rank(param) => (param.id, param.is_initialized())),*
                }
            }

            fn into_parts(self) -> (ParamId, FloatTensor<B>) {
                match self {
                    $(Self::$rank(param) => {
                        let (id, tensor, _) = param.consume();
                        (id, tensor.into_primitive().tensor())
                    })*
                }
            }
        }
    };
}

shard! {
    Rank1 = 1, Rank2 = 2, Rank3 = 3, Rank4 = 4, Rank5 = 5, Rank6 = 6, Rank7 = 7, Rank8 = 8
}
