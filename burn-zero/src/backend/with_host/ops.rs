//! Every operation, made from its row: its operands are brought to the device. The rows that are computed on the host come first.
#![deny(clippy::missing_trait_methods)]

use burn_backend::{Backend, TensorMetadata};
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};

use super::tensor::{HostTensor, PlacedTensor, up};
use super::{STAYS, WithHost};

/// Elementwise with a number, as the device does in f32.
macro_rules! scalar {
    ($op:ident, $f:expr) => {
        #[inline]
        fn $op(tensor: FloatTensor<Self>, value: Scalar) -> FloatTensor<Self> {
            match tensor {
                PlacedTensor::Host(tensor) if tensor.floats().is_some() => {
                    let value: f32 = value.elem();
                    let f: fn(f32, f32) -> f32 = $f;
                    PlacedTensor::Host(tensor.map(|x| f(x, value)))
                }
                tensor => PlacedTensor::Device(B::$op(up::<B>(tensor), value)),
            }
        }
    };
}

/// Elementwise on two tensors.
macro_rules! binary {
    ($op:ident, $f:expr) => {
        #[inline]
        fn $op(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
            let f: fn(f32, f32) -> f32 = $f;
            match on_host::<B>(lhs, rhs, f) {
                Ok(tensor) => PlacedTensor::Host(tensor),
                Err((lhs, rhs)) => PlacedTensor::Device(B::$op(up::<B>(lhs), up::<B>(rhs))),
            }
        }
    };
}

/// Whether elements are so: true nowhere is told without sending anything up.
macro_rules! find {
    ($op:ident, $is:expr) => {
        #[inline]
        fn $op(tensor: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
            let is: fn(f32) -> bool = $is;
            match &tensor {
                PlacedTensor::Host(host) if host.any(is) == Some(false) => {
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
                true => PlacedTensor::Host(HostTensor::new(data, device.clone())),
                false => PlacedTensor::Device(B::float_from_data(data, device)),
            }
        }
    };
    (float_into_data($($arg:tt)*) -> $ret:tt) => {
        async fn float_into_data(tensor: FloatTensor<Self>) -> Result<TensorData, ExecutionError> {
            match tensor {
                PlacedTensor::Device(tensor) => B::float_into_data(tensor).await,
                PlacedTensor::Host(tensor) => Ok(tensor.into_data()),
            }
        }
    };
    (float_device($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_device(tensor: &FloatTensor<Self>) -> Device<Self> {
            tensor.device::<B>()
        }
    };
    (float_is_require_grad($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_is_require_grad(tensor: &FloatTensor<Self>) -> bool {
            tensor.on_device().is_some_and(B::float_is_require_grad)
        }
    };
    (float_to_device($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_to_device(tensor: FloatTensor<Self>, device: &Device<Self>) -> FloatTensor<Self> {
            match tensor {
                PlacedTensor::Device(tensor) => PlacedTensor::Device(B::float_to_device(tensor, device)),
                PlacedTensor::Host(tensor) => PlacedTensor::Host(HostTensor { device: device.clone(), ..tensor }),
            }
        }
    };
    (float_reshape($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_reshape(tensor: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> {
            match tensor {
                PlacedTensor::Device(tensor) => PlacedTensor::Device(B::float_reshape(tensor, shape)),
                PlacedTensor::Host(tensor) => PlacedTensor::Host(tensor.reshape(shape)),
            }
        }
    };
    (float_cast($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
            let tensor = match tensor {
                PlacedTensor::Device(tensor) => tensor,
                PlacedTensor::Host(tensor) => match tensor.cast(dtype) {
                    Ok(tensor) => return PlacedTensor::Host(tensor),
                    Err(tensor) => up::<B>(PlacedTensor::Host(tensor)),
                },
            };
            PlacedTensor::Device(B::float_cast(tensor, dtype))
        }
    };
    (float_sum($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_sum(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
            match tensor {
                PlacedTensor::Host(tensor) if tensor.floats().is_some() => PlacedTensor::Host(tensor.sum()),
                tensor => PlacedTensor::Device(B::float_sum(up::<B>(tensor))),
            }
        }
    };
    (float_slice($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_slice(tensor: FloatTensor<Self>, slices: &[Slice]) -> FloatTensor<Self> {
            let flat = match (&tensor, slices) {
                (PlacedTensor::Host(host), [Slice { start, end: Some(end), step: 1 }])
                    if host.shape.num_dims() == 1 && 0 <= *start && start <= end =>
                {
                    host.clone().range(*start as usize..*end as usize)
                }
                _ => None,
            };
            match flat {
                Some(flat) => PlacedTensor::Host(flat),
                None => PlacedTensor::Device(B::float_slice(up::<B>(tensor), slices)),
            }
        }
    };
    (float_cat($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_cat(tensors: Vec<FloatTensor<Self>>, dim: usize) -> FloatTensor<Self> {
            let hosts: Option<Vec<_>> = tensors.iter().map(|tensor| match tensor {
                PlacedTensor::Host(tensor) => Some(tensor),
                PlacedTensor::Device(_) => None,
            }).collect();
            match hosts.and_then(|hosts| HostTensor::cat(&hosts)) {
                Some(all) => PlacedTensor::Host(all),
                None => PlacedTensor::Device(B::float_cat(tensors.into_iter().map(up::<B>).collect(), dim)),
            }
        }
    };
    (float_powi_scalar($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_powi_scalar(tensor: FloatTensor<Self>, power: Scalar) -> FloatTensor<Self> {
            match tensor {
                // A square.
                PlacedTensor::Host(tensor) if power.elem::<i64>() == 2 && tensor.floats().is_some() => {
                    PlacedTensor::Host(tensor.map(|x| x * x))
                }
                tensor => PlacedTensor::Device(B::float_powi_scalar(up::<B>(tensor), power)),
            }
        }
    };
    (float_mul_scalar($($arg:tt)*) -> $ret:tt) => { scalar! { float_mul_scalar, |x, y| x * y } };
    (float_div_scalar($($arg:tt)*) -> $ret:tt) => { scalar! { float_div_scalar, |x, y| x / y } };
    (float_add($($arg:tt)*) -> $ret:tt) => { binary! { float_add, |x, y| x + y } };
    (float_mul($($arg:tt)*) -> $ret:tt) => { binary! { float_mul, |x, y| x * y } };
    (float_is_nan($($arg:tt)*) -> $ret:tt) => { find! { float_is_nan, f32::is_nan } };
    (float_is_inf($($arg:tt)*) -> $ret:tt) => { find! { float_is_inf, f32::is_infinite } };

    ($op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        #[inline]
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            map_result!($ret B::$op($(map_operand!($kind $arg, up::<B>)),*), PlacedTensor::Device)
        }
    };
}

/// Two operands in host memory, or one there and a number: that is read, where it is on the device. As they are where that cannot
/// be.
#[allow(clippy::type_complexity, reason = "what came")]
fn on_host<B: Backend>(
    lhs: FloatTensor<WithHost<B>>,
    rhs: FloatTensor<WithHost<B>>,
    f: fn(f32, f32) -> f32,
) -> Result<HostTensor<B::Device>, (FloatTensor<WithHost<B>>, FloatTensor<WithHost<B>>)> {
    let fits = lhs.dtype() == DType::F32
        && rhs.dtype() == DType::F32
        && (matches!(lhs, PlacedTensor::Host(_)) || matches!(rhs, PlacedTensor::Host(_)));
    let (left, right) = (lhs.shape(), rhs.shape());
    let elements = (left.num_elements(), right.num_elements());
    if !fits || left.num_dims() != right.num_dims() {
        return Err((lhs, rhs));
    }
    match (lhs, rhs) {
        (PlacedTensor::Host(lhs), PlacedTensor::Host(rhs)) if left == right => Ok(lhs.zip(rhs, f)),
        (PlacedTensor::Host(lhs), rhs) if elements.1 == 1 => match number::<B>(&rhs) {
            Some(y) => Ok(lhs.map(|x| f(x, y))),
            None => Err((PlacedTensor::Host(lhs), rhs)),
        },
        (lhs, PlacedTensor::Host(rhs)) if elements.0 == 1 => match number::<B>(&lhs) {
            Some(x) => Ok(rhs.map(|y| f(x, y))),
            None => Err((lhs, PlacedTensor::Host(rhs))),
        },
        (lhs, rhs) => Err((lhs, rhs)),
    }
}

/// The only element of an f32 tensor.
fn number<B: Backend>(tensor: &FloatTensor<WithHost<B>>) -> Option<f32> {
    match tensor {
        PlacedTensor::Host(tensor) => tensor.only(),
        PlacedTensor::Device(tensor) => {
            let read = crate::host::HostRead::start::<B>(tensor.clone());
            read.wait().first().copied()
        }
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
