//! Layer norm, softmax and attention as one operation each on autodiff's tape.
//!
//! `backend.rs` is the decorator, made from the table; `softmax.rs`, `layer_norm.rs` and `attention.rs` are the operations with their
//! gradients.

mod attention;
mod backend;
mod layer_norm;
mod softmax;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::{CheckpointStrategy, NoCheckpointing};
use burn::backend::autodiff::ops::{Backward, OpsKind};
use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend, BackendTypes, DType, FloatDType, TensorMetadata};

pub use backend::FusedBackward;

/// A tensor of Burn's `Autodiff`, with its node in the graph.
pub type AutodiffTensor<B> = FloatTensor<Autodiff<B>>;

/// A backend with the tensors of Burn's `Autodiff`, for decorators that put operations on its tape: `Autodiff` and [`FusedBackward`].
pub trait Tape:
    AutodiffBackend
    + BackendTypes<FloatTensorPrimitive = AutodiffTensor<<Self as AutodiffBackend>::InnerBackend>>
{
}

impl<B: Backend, C: CheckpointStrategy> Tape for Autodiff<B, C> {}

/// Puts `result`, an operation on `operands`, on the tape with what its backward needs.
pub(crate) fn record<B: Backend, O: Backward<B, N>, const N: usize>(
    operation: O,
    operands: [&AutodiffTensor<B>; N],
    state: O::State,
    result: FloatTensor<B>,
) -> AutodiffTensor<B> {
    let nodes = operands.map(|operand| operand.node.clone());
    let prepared = operation.prepare::<NoCheckpointing>(nodes).compute_bound();
    match prepared.stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(state, result),
        OpsKind::UnTracked(prepared) => prepared.finish(result),
    }
}

/// Casts to f32, if the tensor has 16 bits.
fn raise<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => B::float_cast(tensor, FloatDType::F32),
        _ => tensor,
    }
}

/// Casts to `dtype`, if the tensor has another type.
fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    match tensor.dtype() == dtype {
        true => tensor,
        false => B::float_cast(tensor, dtype.into()),
    }
}
