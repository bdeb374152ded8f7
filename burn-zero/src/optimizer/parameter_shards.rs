//! The module that the wrapped optimizer meets: this rank's pieces of the parameters.
#![allow(missing_docs, reason = "records and fields that Burn's derive makes")]

use std::sync::Arc;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Tensor, TensorData, TensorMetadata, TensorPrimitive, backend::Backend};
use burn_backend::AutodiffBackend;
use burn_backend::tensor::FloatTensor;

use crate::offload::HostShards;

/// This rank's pieces, in the order of the parameters: what a wrapped optimizer is an `Optimizer<ParameterShards<B>, B>` of. Rust infers it.
///
/// Each piece keeps its id for the whole training, the same in every process. The pieces exist during a step only; what stays
/// is the optimizer's state, by id.
#[derive(Module, Debug)]
pub struct ParameterShards<B: Backend> {
    pieces: Vec<ParameterShard<B>>,
}

/// A piece: flat, or a whole parameter in its shape ([`Partition::Whole`](crate::Partition::Whole)).
#[derive(Module, Debug)]
pub enum ParameterShard<B: Backend> {
    /// `[elements]`
    Rank1(Param<Tensor<B, 1>>),
    /// As the parameter.
    Rank2(Param<Tensor<B, 2>>),
    /// As the parameter.
    Rank3(Param<Tensor<B, 3>>),
    /// As the parameter.
    Rank4(Param<Tensor<B, 4>>),
    /// As the parameter.
    Rank5(Param<Tensor<B, 5>>),
    /// As the parameter.
    Rank6(Param<Tensor<B, 6>>),
    /// As the parameter.
    Rank7(Param<Tensor<B, 7>>),
    /// As the parameter.
    Rank8(Param<Tensor<B, 8>>),
}

/// Dimensions of a piece at most: Burn's records of optimizers end there too.
pub(crate) const MOST_DIMENSIONS: usize = 8;

/// The first bytes of a piece's id spell "zero": `ParamId`s are random 64-bit numbers, these are the same in every process.
const FIRST_ID: u64 = u64::from_be_bytes(*b"zero\0\0\0\0");

/// The id of the piece of a parameter.
pub(crate) fn shard_id(parameter: usize) -> ParamId {
    ParamId::from(FIRST_ID | parameter as u64)
}

fn parameter_of(piece: ParamId) -> usize {
    (piece.val() & !FIRST_ID) as usize
}

/// Evaluates `$body` with `$param` bound to the piece's parameter, whatever its rank.
macro_rules! with_param {
    ($piece:expr, $param:ident => $body:expr) => {
        match $piece {
            ParameterShard::Rank1($param) => $body,
            ParameterShard::Rank2($param) => $body,
            ParameterShard::Rank3($param) => $body,
            ParameterShard::Rank4($param) => $body,
            ParameterShard::Rank5($param) => $body,
            ParameterShard::Rank6($param) => $body,
            ParameterShard::Rank7($param) => $body,
            ParameterShard::Rank8($param) => $body,
        }
    };
}

/// A piece after the step.
pub(super) enum Updated<B: Backend> {
    /// On the device.
    Device(FloatTensor<B>),
    /// On the host, where it was updated.
    Host(TensorData),
}

impl<B: AutodiffBackend> Updated<B> {
    pub(super) fn inner(self) -> Updated<B::InnerBackend> {
        match self {
            Self::Device(piece) => Updated::Device(B::inner(piece)),
            Self::Host(data) => Updated::Host(data),
        }
    }
}

impl<B: Backend> ParameterShards<B> {
    /// From the pieces and the positions of their parameters.
    pub(super) fn new(pieces: Vec<(usize, FloatTensor<B>)>) -> Self {
        let pieces = pieces.into_iter();
        Self::with_ids(pieces.map(|(index, piece)| (shard_id(index), piece)))
    }

    /// From tensors of at most [`MOST_DIMENSIONS`] dimensions and their ids.
    pub(crate) fn with_ids(pieces: impl Iterator<Item = (ParamId, FloatTensor<B>)>) -> Self {
        Self {
            pieces: pieces
                .map(|(id, piece)| ParameterShard::new(id, piece))
                .collect(),
        }
    }

    /// The pieces and the positions of their parameters.
    pub(super) fn into_pieces(self) -> impl Iterator<Item = (usize, FloatTensor<B>)> {
        let pieces = self.into_ids();
        pieces.map(|(id, piece)| (parameter_of(id), piece))
    }

    /// The pieces and the positions of their parameters, after a [step on shards](crate::offload::step_on_shards).
    pub(super) fn into_updated(
        self,
        on_host: &mut HostShards,
    ) -> impl Iterator<Item = (usize, Updated<B>)> {
        self.pieces.into_iter().map(|piece| {
            let (id, seen) = with_param!(&piece, param => (param.id, param.is_initialized()));
            let data = match seen {
                // Whoever looked may have changed it: the optimizer is to look too.
                true => {
                    on_host.forget(id);
                    None
                }
                false => on_host.take(id),
            };
            let updated = match data {
                Some(data) => {
                    drop(piece); // which shares the data
                    Updated::Host(Arc::unwrap_or_clone(data))
                }
                None => Updated::Device(piece.into_parts().1),
            };
            (parameter_of(id), updated)
        })
    }

    /// The pieces and their ids.
    pub(crate) fn into_ids(self) -> impl Iterator<Item = (ParamId, FloatTensor<B>)> {
        self.pieces.into_iter().map(ParameterShard::into_parts)
    }

    /// Number of pieces.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether this rank holds nothing.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }
}

impl<B: Backend> ParameterShard<B> {
    fn new(id: ParamId, piece: FloatTensor<B>) -> Self {
        let rank = piece.rank();
        let piece = TensorPrimitive::Float(piece);
        match rank {
            1 => Self::Rank1(Param::initialized(id, Tensor::from_primitive(piece))),
            2 => Self::Rank2(Param::initialized(id, Tensor::from_primitive(piece))),
            3 => Self::Rank3(Param::initialized(id, Tensor::from_primitive(piece))),
            4 => Self::Rank4(Param::initialized(id, Tensor::from_primitive(piece))),
            5 => Self::Rank5(Param::initialized(id, Tensor::from_primitive(piece))),
            6 => Self::Rank6(Param::initialized(id, Tensor::from_primitive(piece))),
            7 => Self::Rank7(Param::initialized(id, Tensor::from_primitive(piece))),
            8 => Self::Rank8(Param::initialized(id, Tensor::from_primitive(piece))),
            _ => unreachable!("`prepare` refuses parameters of {rank} dimensions"),
        }
    }

    fn into_parts(self) -> (ParamId, FloatTensor<B>) {
        with_param!(self, param => {
            let (id, tensor, _) = param.consume();
            (id, tensor.into_primitive().tensor())
        })
    }
}
