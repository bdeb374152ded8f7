//! A backend that can leave a tensor in host memory.
#![deny(clippy::missing_trait_methods)]

use std::marker::PhantomData;

use burn_backend::{Backend, BackendTypes, TensorMetadata};
use burn_decorator::carried::{carry, is_carried};
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};

use PlacedTensor::{Device as OnDevice, Host};

use super::placed::{GradientPart, HostTensor, Operand, PlacedTensor};
use crate::host::read_floats;

/// The backend `B`, some of whose float tensors are in host memory: gradients that left the device
/// during backward and whose optimizer is on the host. It is the inner backend of
/// [`Sharded`](super::Sharded), so that layers between backward and the optimizer (loss scalers,
/// accumulation, clipping) compute on such gradients in host memory.
///
/// The operations of those layers are computed on the host for f32 tensors: addition, scaling,
/// sums, casts, reads, tests for non-finite elements. A sum is computed in f64 and rounded once;
/// all else has the bits of the device's f32. Any other operation first uploads its operands, and
/// its result stays on the device. A tensor on the device costs nothing more than without this
/// layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct WithHost<B> {
    inner: PhantomData<B>,
}

impl<B: Backend> BackendTypes for WithHost<B> {
    burn_decorator::forward_types!(B, float tensor: PlacedTensor<B::FloatTensorPrimitive, B::Device>);
}

#[deny(clippy::missing_trait_methods)]
impl<B: Backend> Backend for WithHost<B> {
    burn_decorator::forward_device!(B);
    burn_decorator::forward_dtypes!(B);

    fn name(device: &Self::Device) -> String {
        B::name(device)
    }
}

/// Data that becomes a tensor stays in host memory.
struct StaysOnHost;

/// A tensor of data that stays in host memory, if the backend has a [`WithHost`] in it; otherwise
/// one on the device.
pub(crate) fn on_host<I: Backend>(data: TensorData, device: &I::Device) -> FloatTensor<I> {
    carry(StaysOnHost, || I::float_from_data(data, device)).0
}

// Every operation, made from its row: its operands are uploaded. Rows that are computed on the host
// come first.

/// An operation on one tensor: by `$host` if the tensor is in host memory and `$host` supports it,
/// else on the device. The result of a `linear` one on a gradient of one rank is such a gradient
/// too.
macro_rules! unary {
    (linear $op:ident($($arg:ident: $type:ty)?), $host:expr) => {
        #[inline]
        fn $op(tensor: FloatTensor<Self>, $($arg: $type)?) -> FloatTensor<Self> {
            let (tensor, part) = tensor.linear();
            unary!(tensor, $op($($arg)?), $host).of_rank(part)
        }
    };
    (read $op:ident($($arg:ident: $type:ty)?), $host:expr) => {
        #[inline]
        fn $op(tensor: FloatTensor<Self>, $($arg: $type)?) -> FloatTensor<Self> {
            let tensor = tensor.read();
            unary!(tensor, $op($($arg)?), $host)
        }
    };
    ($tensor:ident, $op:ident($($arg:ident)?), $host:expr) => {
        match $tensor {
            Host(tensor) => match $host(tensor) {
                Ok(tensor) => Host(tensor),
                Err(tensor) => OnDevice(B::$op(up::<B>(Host(tensor)) $(, $arg)?)),
            },
            tensor => OnDevice(B::$op(up::<B>(tensor) $(, $arg)?)),
        }
    };
}

/// An elementwise operation on two tensors in host memory, or on one and a single number, which is
/// downloaded if necessary.
macro_rules! binary {
    ($op:ident, $operands:ident, $f:expr) => {
        #[inline]
        fn $op(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
            let (lhs, rhs, part) = $operands(lhs, rhs);
            let lhs = match lhs {
                Host(lhs) => {
                    let computed = match operand::<B>(&rhs, &lhs.shape) {
                        Some(rhs) => lhs.combine(rhs, $f),
                        None => Err(lhs),
                    };
                    match computed {
                        Ok(tensor) => return Host(tensor).of_rank(part),
                        Err(lhs) => up::<B>(Host(lhs)),
                    }
                }
                lhs => up::<B>(lhs),
            };
            OnDevice(B::$op(lhs, up::<B>(rhs))).of_rank(part)
        }
    };
}

/// A test for non-finite elements: nothing is uploaded if all are finite.
macro_rules! find {
    ($op:ident) => {
        #[inline]
        fn $op(tensor: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
            let tensor = tensor.read();
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
            if is_carried::<StaysOnHost>() {
                Host(HostTensor::new(data, device.clone()))
            } else {
                OnDevice(B::float_from_data(data, device))
            }
        }
    };
    (float_into_data($($arg:tt)*) -> $ret:tt) => {
        fn float_into_data(
            tensor: FloatTensor<Self>,
        ) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send {
            // Now, and not when the future is polled, which another thread may do.
            let read = match tensor.read() {
                Host(tensor) => Err(tensor.into_data()),
                tensor => Ok(B::float_into_data(up::<B>(tensor))),
            };
            async move {
                match read {
                    Ok(read) => read.await,
                    Err(data) => Ok(data),
                }
            }
        }
    };
    (float_device($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_device(tensor: &FloatTensor<Self>) -> Device<Self> {
            match tensor {
                OnDevice(tensor) => B::float_device(tensor),
                Host(tensor) => tensor.device.clone(),
                PlacedTensor::OfRank(_) => Self::float_device(tensor.placed()),
            }
        }
    };
    (float_is_require_grad($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_is_require_grad(tensor: &FloatTensor<Self>) -> bool {
            matches!(tensor.placed(), OnDevice(tensor) if B::float_is_require_grad(tensor))
        }
    };
    (float_cat($($arg:tt)*) -> $ret:tt) => {
        #[inline]
        fn float_cat(tensors: Vec<FloatTensor<Self>>, dim: usize) -> FloatTensor<Self> {
            let tensors: Vec<_> = tensors.into_iter().map(PlacedTensor::read).collect();
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
    (float_to_device($($arg:tt)*) -> $ret:tt) => {
        unary! { linear float_to_device(device: &Device<Self>), |host| {
            Ok(HostTensor { device: device.clone(), ..host })
        } }
    };
    (float_reshape($($arg:tt)*) -> $ret:tt) => {
        unary! { linear float_reshape(shape: Shape), |host| Ok(HostTensor { shape: shape.clone(), ..host }) }
    };
    (float_cast($($arg:tt)*) -> $ret:tt) => {
        unary! { linear float_cast(dtype: FloatDType), |host: HostTensor<_>| Ok(host.cast(dtype)) }
    };
    (float_sum($($arg:tt)*) -> $ret:tt) => { unary! { read float_sum(), HostTensor::sum } };
    (float_powi_scalar($($arg:tt)*) -> $ret:tt) => {
        unary! { read float_powi_scalar(power: Scalar), |host: HostTensor<_>| match power.elem::<i64>() {
            2 => host.combine(Operand::Number(2.0), |x, _| x * x),
            _ => Err(host),
        } }
    };
    (float_mul_scalar($($arg:tt)*) -> $ret:tt) => {
        unary! { linear float_mul_scalar(value: Scalar), |host: HostTensor<_>| {
            host.combine(Operand::Number(value.elem()), |x, y| x * y)
        } }
    };
    (float_div_scalar($($arg:tt)*) -> $ret:tt) => {
        unary! { linear float_div_scalar(value: Scalar), |host: HostTensor<_>| {
            host.combine(Operand::Number(value.elem()), |x, y| x / y)
        } }
    };
    (float_add($($arg:tt)*) -> $ret:tt) => { binary! { float_add, terms, |x, y| x + y } };
    (float_mul($($arg:tt)*) -> $ret:tt) => { binary! { float_mul, factors, |x, y| x * y } };
    (tr_execute($transaction:ident: $kind:tt) -> $ret:tt) => {
        fn tr_execute($transaction: kind_type!($kind)) -> kind_type!($ret) {
            let TransactionPrimitive { read_floats, read_qfloats, read_ints, read_bools, .. } = $transaction;
            let (mut floats, mut on_host) = (Vec::new(), Vec::new());
            for (index, tensor) in read_floats.into_iter().enumerate() {
                match tensor.read() {
                    Host(tensor) => on_host.push((index, tensor.into_data())),
                    tensor => floats.push(up::<B>(tensor)),
                }
            }
            // CubeCL has no transaction of nothing.
            let is_empty = floats.is_empty() && read_qfloats.is_empty() && read_ints.is_empty() && read_bools.is_empty();
            let others = TransactionPrimitive::<B>::new(floats, read_qfloats, read_ints, read_bools);
            let others = (!is_empty).then(|| B::tr_execute(others));
            async move {
                let mut data = match others {
                    Some(others) => others.await?,
                    None => TransactionPrimitiveData::default(),
                };
                for (index, read) in on_host {
                    data.read_floats.insert(index, read);
                }
                Ok(data)
            }
        }
    };
    (float_is_nan($($arg:tt)*) -> $ret:tt) => { find! { float_is_nan } };
    (float_is_inf($($arg:tt)*) -> $ret:tt) => { find! { float_is_inf } };

    ($op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        #[inline]
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            map_result!($ret B::$op($(map_operand!($kind $arg, read::<B>)),*), OnDevice)
        }
    };
}

fn up<B: Backend>(tensor: FloatTensor<WithHost<B>>) -> FloatTensor<B> {
    tensor.up::<B>()
}

fn read<B: Backend>(tensor: FloatTensor<WithHost<B>>) -> FloatTensor<B> {
    tensor.read().up::<B>()
}

/// The operands of a sum, and which part of a gradient it is.
fn terms<T, D>(
    lhs: PlacedTensor<T, D>,
    rhs: PlacedTensor<T, D>,
) -> (PlacedTensor<T, D>, PlacedTensor<T, D>, Option<GradientPart>) {
    let ((lhs, left), (rhs, right)) = (lhs.linear(), rhs.linear());
    (lhs, rhs, left.or(right))
}

/// The operands of a product, and which part of a gradient it is. It is linear unless both are
/// gradients, as in a square.
fn factors<T, D>(
    lhs: PlacedTensor<T, D>,
    rhs: PlacedTensor<T, D>,
) -> (PlacedTensor<T, D>, PlacedTensor<T, D>, Option<GradientPart>) {
    if lhs.part().is_some() && rhs.part().is_some() {
        return (lhs.read(), rhs.unmarked(), None);
    }
    terms(lhs, rhs)
}

/// The second operand for an f32 tensor of this shape in host memory: a tensor of the same shape in
/// host memory, or a single number with as many dimensions in either memory. `None` for any other
/// tensor.
fn operand<'a, B: Backend>(
    tensor: &'a FloatTensor<WithHost<B>>,
    shape: &Shape,
) -> Option<Operand<'a>> {
    match tensor {
        Host(tensor) if tensor.shape == *shape => tensor.floats().map(Operand::Elements),
        _ if tensor.shape().num_elements() != 1
            || tensor.rank() != shape.num_dims()
            || tensor.dtype() != DType::F32 =>
        {
            None
        }
        Host(tensor) => Some(Operand::Number(*tensor.floats()?.first()?)),
        tensor => {
            let read = read_floats::<B>(up::<B>(tensor.clone()));
            Some(Operand::Number(*read.first()?))
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
