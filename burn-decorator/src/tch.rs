//! Burn's LibTorch backend without the faults of burn-tch 0.21.0 that spoil results.
#![deny(clippy::missing_trait_methods)]

use std::marker::PhantomData;

use burn_backend::ops::attention::attention_fallback;
use burn_backend::{Backend, BackendTypes, TensorMetadata};
use burn_tch::TchTensor;
use tch::Tensor;

use crate::types::*;
use crate::{kind_type, map_operand, map_result};

/// LibTorch as Burn defines its operations: `Autocast<Autodiff<Mended<LibTorch>>>`. Its tensors are
/// LibTorch's own, so that it costs nothing. It mends these faults of burn-tch 0.21.0:
///
/// - An operation writes its result into an operand that nothing else holds. A transposed or
///   permuted tensor shares its memory with the tensor it was made from, and burn-tch does not
///   count that: `x.clone().transpose().exp()` overwrites `x`
///   (<https://github.com/tracel-ai/burn/issues/5375>). So does `scatter_nd` that assigns.
/// - `attention` takes `true` in a mask for "attend", where Burn means "mask", ignores `softcap`,
///   and aligns a causal mask to the first key, where Burn aligns it to the last.
/// - `prelu` with a weight for each channel panics.
/// - A low tensor times a number is rounded otherwise in place: LibTorch rounds the number to the
///   low type first.
/// - `linear` and its gradients are products of batches of matrices, with a copy of the weight and
///   a gradient of the weight for each sequence of a batch. Here they are products of two matrices,
///   as in PyTorch, whose sums are also rounded once.
///
/// ```
/// use burn_backend::TensorMetadata;
/// use burn_backend::ops::FloatTensorOps;
/// use burn_decorator::tch::Mended;
/// use burn_tch::LibTorch;
///
/// type B = Mended<LibTorch>;
/// let x = B::float_ones([2, 3].into(), &Default::default(), burn_backend::FloatDType::F32);
/// assert_eq!(B::float_transpose(x).shape(), [3, 2].into());
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Mended<B>(PhantomData<B>);

/// A backend of LibTorch's tensors: [`burn_tch::LibTorch`].
pub trait Tch:
    Backend<
        FloatTensorPrimitive = TchTensor,
        IntTensorPrimitive = TchTensor,
        BoolTensorPrimitive = TchTensor,
    >
{
}

impl<E: burn_tch::TchElement> Tch for burn_tch::LibTorch<E> {}

impl<B: Tch> BackendTypes for Mended<B> {
    crate::forward_types!(B, float tensor: TchTensor);
}

impl<B: Tch> Backend for Mended<B> {
    crate::forward_device!(B);

    fn name(device: &Self::Device) -> String {
        format!("mended<{}>", B::name(device))
    }

    crate::forward_dtypes!(B);
}

/// The tensor, or a copy if its memory is shared.
fn exclusive(tensor: TchTensor) -> TchTensor {
    tensor.unary_ops(|tensor| tensor, |tensor| tensor.copy())
}

/// The tensor as a matrix: all dimensions but the last are rows.
fn rows(tensor: TchTensor) -> Tensor {
    tensor.tensor.flatten(0, -2)
}

/// The fused kernel where it computes what Burn defines, and Burn's composition elsewhere.
fn attention<B: Tch>(
    query: TchTensor,
    key: TchTensor,
    value: TchTensor,
    mask: Option<TchTensor>,
    bias: Option<TchTensor>,
    options: AttentionModuleOptions,
) -> TchTensor {
    let is_square = query.shape()[2] == key.shape()[2];
    let is_fused = bias.is_none()
        && options.softcap.is_none()
        && (!options.is_causal || (is_square && mask.is_none()));
    if is_fused {
        let attend = mask.map(B::bool_not);
        return B::attention(query, key, value, attend, None, options);
    }
    attention_fallback::<Mended<B>>(query, key, value, mask, bias, options)
}

/// A method whose result shares the operand's memory.
macro_rules! view {
    ($op:ident($tensor:ident: $kind:tt $(, $arg:ident: $type:tt)*) -> $ret:tt) => {
        fn $op($tensor: TchTensor $(, $arg: kind_type!($type))*) -> TchTensor {
            let storage = $tensor.storage.clone();
            TchTensor::from_existing(B::$op($tensor $(, $arg)*).tensor, storage)
        }
    };
}

/// A method that may write into its first operand.
macro_rules! writing {
    ($op:ident($data:ident: $kind:tt $(, $arg:ident: $type:tt)*) -> $ret:tt) => {
        fn $op($data: TchTensor $(, $arg: kind_type!($type))*) -> TchTensor {
            B::$op(exclusive($data) $(, $arg)*)
        }
    };
}

/// One method.
macro_rules! method {
    (float_transpose $($row:tt)*) => { view!(float_transpose $($row)*); };
    (float_swap_dims $($row:tt)*) => { view!(float_swap_dims $($row)*); };
    (float_permute $($row:tt)*) => { view!(float_permute $($row)*); };
    (int_transpose $($row:tt)*) => { view!(int_transpose $($row)*); };
    (int_swap_dims $($row:tt)*) => { view!(int_swap_dims $($row)*); };
    (int_permute $($row:tt)*) => { view!(int_permute $($row)*); };
    (bool_transpose $($row:tt)*) => { view!(bool_transpose $($row)*); };
    (bool_swap_dims $($row:tt)*) => { view!(bool_swap_dims $($row)*); };
    (bool_permute $($row:tt)*) => { view!(bool_permute $($row)*); };
    (float_scatter_nd $($row:tt)*) => { writing!(float_scatter_nd $($row)*); };
    (int_scatter_nd $($row:tt)*) => { writing!(int_scatter_nd $($row)*); };
    (float_mul_scalar($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn float_mul_scalar(lhs: TchTensor, rhs: Scalar) -> TchTensor {
            // A second holder keeps it from being written in place.
            let _shared = matches!(lhs.dtype(), DType::F16 | DType::BF16).then(|| lhs.clone());
            B::float_mul_scalar(lhs, rhs)
        }
    };
    (attention($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn attention($($arg: kind_type!($kind)),*) -> TchTensor {
            attention::<B>($($arg),*)
        }
    };
    (linear($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn linear(x: TchTensor, weight: TchTensor, bias: Option<TchTensor>) -> TchTensor {
            let bias = bias.map(|bias| bias.tensor);
            TchTensor::new(x.tensor.linear(&weight.tensor.transpose(0, 1), bias.as_ref()))
        }
    };
    (linear_x_backward($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn linear_x_backward(weight: TchTensor, output_grad: TchTensor) -> TchTensor {
            TchTensor::new(output_grad.tensor.matmul(&weight.tensor.transpose(0, 1)))
        }
    };
    (linear_weight_backward($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn linear_weight_backward(x: TchTensor, output_grad: TchTensor) -> TchTensor {
            let [x, output_grad] = [x, output_grad].map(rows);
            TchTensor::new(x.transpose(0, 1).matmul(&output_grad))
        }
    };
    (linear_bias_backward($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn linear_bias_backward(output_grad: TchTensor) -> TchTensor {
            TchTensor::new(rows(output_grad).sum_dim_intlist([0].as_slice(), false, None))
        }
    };
    (prelu($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn prelu(tensor: TchTensor, alpha: TchTensor) -> TchTensor {
            let channels = alpha.shape().num_elements();
            B::prelu(tensor, B::float_reshape(alpha, Shape::new([channels])))
        }
    };
    ($op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        #[inline]
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            map_result!($ret B::$op($(map_operand!($kind $arg, |tensor| tensor)),*), |tensor| tensor)
        }
    };
}

/// One trait.
macro_rules! implement {
    ($trait:ident $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Tch> $trait<Self> for Mended<B> {
            $(method! { $op($($arg: $kind),*) -> $ret })*
        }
    };
}

crate::every_ops!(implement);
