//! Every operation, made from its row: its operands are uploaded. Rows that are computed on the host come first.
#![deny(clippy::missing_trait_methods)]

use burn_backend::{Backend, TensorMetadata};
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};

use super::PlacedTensor::{Device as OnDevice, Host};
use super::{HostTensor, STAYS, WithHost};
use crate::host::HostRead;

/// An operation on one tensor: by `$host` if the tensor is in host memory and `$host` supports it, else on the device.
macro_rules! unary {
    ($op:ident($($arg:ident: $type:ty)?), $host:expr) => {
        #[inline]
        fn $op(tensor: FloatTensor<Self>, $($arg: $type)?) -> FloatTensor<Self> {
            let tensor = match tensor {
                OnDevice(tensor) => tensor,
                Host(tensor) => match $host(tensor) {
                    Ok(tensor) => return Host(tensor),
                    Err(tensor) => up::<B>(Host(tensor)),
                },
            };
            OnDevice(B::$op(tensor $(, $arg)?))
        }
    };
}

/// An elementwise operation on two tensors in host memory, or on one and a single number, which is downloaded if necessary.
macro_rules! binary {
    ($op:ident, $f:expr) => {
        #[inline]
        fn $op(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
            let lhs = match lhs {
                OnDevice(lhs) => lhs,
                Host(lhs) => {
                    let f: fn(f32, f32) -> f32 = $f;
                    let computed = match (&rhs, number::<B>(&rhs, lhs.shape.num_dims())) {
                        (Host(rhs), _) if rhs.shape == lhs.shape => lhs.zip(rhs, f),
                        (_, Some(number)) => lhs.map(|x| f(x, number)),
                        _ => Err(lhs),
                    };
                    match computed {
                        Ok(tensor) => return Host(tensor),
                        Err(lhs) => up::<B>(Host(lhs)),
                    }
                }
            };
            OnDevice(B::$op(lhs, up::<B>(rhs)))
        }
    };
}

/// A test for non-finite elements: nothing is uploaded if all are finite.
macro_rules! find {
    ($op:ident) => {
        #[inline]
        fn $op(tensor: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
            match &tensor {
                Host(host) if host.is_finite() => {
                    B::bool_zeros(host.shape.clone(), &host.device, out_dtype)
                }
                _ => B::$op(up::<B>(tensor), out_dtype),
            }
        }
    };
}

/// One method.
macro_rules! method {
    (float_from_data($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self> {
            match STAYS.get() {
                true => Host(HostTensor::new(data, device.clone())),
                false => OnDevice(B::float_from_data(data, device)),
            }
        }
    };
    (float_into_data($($arg:tt)*) -> $ret:tt) => {
        async fn float_into_data(tensor: FloatTensor<Self>) -> Result<TensorData, ExecutionError> {
            match tensor {
                OnDevice(tensor) => B::float_into_data(tensor).await,
                Host(tensor) => Ok(tensor.into_data()),
            }
        }
    };
    (float_device($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_device(tensor: &FloatTensor<Self>) -> Device<Self> {
            match tensor {
                OnDevice(tensor) => B::float_device(tensor),
                Host(tensor) => tensor.device.clone(),
            }
        }
    };
    (float_is_require_grad($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_is_require_grad(tensor: &FloatTensor<Self>) -> bool {
            matches!(tensor, OnDevice(tensor) if B::float_is_require_grad(tensor))
        }
    };
    (float_cat($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_cat(tensors: Vec<FloatTensor<Self>>, dim: usize) -> FloatTensor<Self> {
            let flat = tensors.iter().map(|tensor| match tensor {
                Host(tensor) if tensor.shape.num_dims() == 1 => tensor.floats(),
                _ => None,
            });
            match (tensors.first(), flat.collect::<Option<Vec<_>>>()) {
                (Some(Host(first)), Some(flat)) => Host(first.clone().flat(flat.concat())),
                _ => OnDevice(B::float_cat(tensors.into_iter().map(up::<B>).collect(), dim)),
            }
        }
    };
    (float_slice($($arg:tt)*) -> $ret:tt) => {
        unary! { float_slice(slices: &[Slice]), |host: HostTensor<_>| match (slices, host.floats()) {
            ([Slice { start, end: Some(end), step: 1 }], Some(all))
                if host.shape.num_dims() == 1 && 0 <= *start && start <= end =>
            {
                let part = all[*start as usize..*end as usize].to_vec();
                Ok(host.flat(part))
            }
            _ => Err(host),
        } }
    };
    (float_to_device($($arg:tt)*) -> $ret:tt) => {
        unary! { float_to_device(device: &Device<Self>), |host| {
            Ok(HostTensor { device: device.clone(), ..host })
        } }
    };
    (float_reshape($($arg:tt)*) -> $ret:tt) => {
        unary! { float_reshape(shape: Shape), |host| Ok(HostTensor { shape: shape.clone(), ..host }) }
    };
    (float_cast($($arg:tt)*) -> $ret:tt) => {
        unary! { float_cast(dtype: FloatDType), |host: HostTensor<_>| Ok(host.cast(dtype)) }
    };
    (float_sum($($arg:tt)*) -> $ret:tt) => { unary! { float_sum(), HostTensor::sum } };
    (float_powi_scalar($($arg:tt)*) -> $ret:tt) => {
        unary! { float_powi_scalar(power: Scalar), |host: HostTensor<_>| match power.elem::<i64>() {
            2 => host.map(|x| x * x),
            _ => Err(host),
        } }
    };
    (float_mul_scalar($($arg:tt)*) -> $ret:tt) => {
        unary! { float_mul_scalar(value: Scalar), |host: HostTensor<_>| {
            let value: f32 = value.elem();
            host.map(|x| x * value)
        } }
    };
    (float_div_scalar($($arg:tt)*) -> $ret:tt) => {
        unary! { float_div_scalar(value: Scalar), |host: HostTensor<_>| {
            let value: f32 = value.elem();
            host.map(|x| x / value)
        } }
    };
    (float_add($($arg:tt)*) -> $ret:tt) => { binary! { float_add, |x, y| x + y } };
    (float_mul($($arg:tt)*) -> $ret:tt) => { binary! { float_mul, |x, y| x * y } };
    (float_is_nan($($arg:tt)*) -> $ret:tt) => { find! { float_is_nan } };
    (float_is_inf($($arg:tt)*) -> $ret:tt) => { find! { float_is_inf } };

    ($op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        #[inline]
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            map_result!($ret B::$op($(map_operand!($kind $arg, up::<B>)),*), OnDevice)
        }
    };
}

fn up<B: Backend>(tensor: FloatTensor<WithHost<B>>) -> FloatTensor<B> {
    tensor.up::<B>()
}

/// The only element of an f32 tensor of so many dimensions.
fn number<B: Backend>(tensor: &FloatTensor<WithHost<B>>, dimensions: usize) -> Option<f32> {
    if tensor.shape().num_elements() != 1
        || tensor.rank() != dimensions
        || tensor.dtype() != DType::F32
    {
        return None;
    }
    match tensor {
        Host(tensor) => tensor.floats()?.first().copied(),
        OnDevice(tensor) => HostRead::start::<B>(tensor.clone()).wait().first().copied(),
    }
}

/// One trait.
macro_rules! implement {
    ($trait:ident $($class:ident $recipe:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Backend> $trait<Self> for WithHost<B> {
            $(method! { $op($($arg: $kind),*) -> $ret })*
        }
    };
}

burn_decorator::every_ops!(implement);
