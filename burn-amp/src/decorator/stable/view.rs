//! Casts, operations that only arrange elements, which pass on what their operand remembers, and
//! sampling between them.

use burn_backend::ops::GridSampleOptions;
use burn_backend::{Backend, DType, FloatDType, Shape, TensorMetadata, tensor::FloatTensor};

use super::number::remembering;
use super::{Call, Tensor};
use crate::cast::is_low;
use crate::decorator::ops::Row;
use crate::decorator::origin::Origin;
use crate::policy::Policy;

/// A row's statistic, of which there is one for many elements, remembers its f32 value for a
/// division.
pub(in crate::decorator) fn float_cast<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    dtype: FloatDType,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    let is_single = x.tensor.dtype() == DType::F32;
    let x = x.brought::<B>(call.target);
    let shape = x.shape();
    let is_statistic = shape.num_dims() > 1 && shape[shape.num_dims() - 1] == 1;
    let statistic = (call.mends && is_single && is_low(dtype) && is_statistic).then(|| x.clone());
    let result = call.wrap::<B>(B::float_cast(x, dtype));
    match statistic {
        Some(statistic) => result.with_origin(Origin::statistic(statistic)),
        None => result,
    }
}

/// The same elements; an f32 operation on them shares the operand's cast.
fn arranged<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    run: impl Fn(FloatTensor<B>) -> FloatTensor<B> + Send + Sync + 'static,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    let result = run(x.clone().brought::<B>(call.target));
    if !call.mends || !call.is_low {
        return call.wrap::<B>(result);
    }
    remembering::<B>(call, x, result, run)
}

/// Pixels between pixels, in f32 and rounded once: autodiff composes it, and a low type has no
/// fractions of a pixel.
pub(in crate::decorator) fn float_grid_sample_2d<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    grid: Tensor<B>,
    options: GridSampleOptions,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x, &grid]);
    if !call.mends || !call.is_low {
        let [x, grid] = [x, grid].map(|operand| operand.brought::<B>(call.target));
        return call.wrap::<B>(B::float_grid_sample_2d(x, grid, options));
    }
    let dtype = call.target.unwrap_or(x.tensor.dtype().into());
    let sampled = B::float_grid_sample_2d(x.raised::<B>(), grid.raised::<B>(), options);
    call.wrap::<B>(B::float_cast(sampled, dtype))
}

pub(in crate::decorator) fn float_reshape<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    shape: Shape,
) -> Tensor<B> {
    arranged::<B, P>(row, x, move |x| B::float_reshape(x, shape.clone()))
}

pub(in crate::decorator) fn float_transpose<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
) -> Tensor<B> {
    arranged::<B, P>(row, x, B::float_transpose)
}

pub(in crate::decorator) fn float_swap_dims<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    first: usize,
    second: usize,
) -> Tensor<B> {
    arranged::<B, P>(row, x, move |x| B::float_swap_dims(x, first, second))
}

pub(in crate::decorator) fn float_permute<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    axes: &[usize],
) -> Tensor<B> {
    let axes = axes.to_vec();
    arranged::<B, P>(row, x, move |x| B::float_permute(x, &axes))
}
