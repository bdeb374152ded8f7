//! The four kinds of tensors, and a value of any of them.

use std::fmt::Debug;

use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor, QuantizedTensor};
use burn_backend::{Backend, DType, ExecutionError, Shape, TensorData, TensorMetadata};
use burn_decorator::{device_of, view_shape};

/// A kind of tensor of a backend: [`Float`], [`Int`], [`Bool`] or [`Quant`].
pub trait Kind<B: Backend>: Clone + Debug + Send + Sync + 'static {
    /// The backend's tensor of this kind.
    type Primitive: TensorMetadata + 'static;

    /// A reference to the tensor of a value; `None` if it is of another kind.
    fn peek(value: &Value<B>) -> Option<&Self::Primitive>;

    /// Takes the tensor out of a value; `None` if it is of another kind.
    fn unwrap(value: Value<B>) -> Option<Self::Primitive>;

    /// A value of the tensor.
    fn wrap(tensor: Self::Primitive) -> Value<B>;

    /// Where the tensor is.
    fn device(tensor: &Self::Primitive) -> Device<B>;
}

/// Why a node's value can be converted to the kind of a handle.
pub(crate) const SAME_KIND: &str = "a node's kind is that of its handles";

/// A read to the host.
pub(crate) type Download =
    std::pin::Pin<Box<dyn Future<Output = Result<TensorData, ExecutionError>> + Send>>;

/// How a tensor of some kind is made from data.
pub(crate) type Upload<B> = fn(TensorData, &Device<B>) -> Value<B>;

/// Float tensors.
#[derive(Clone, Copy, Debug)]
pub struct Float;

/// Int tensors.
#[derive(Clone, Copy, Debug)]
pub struct Int;

/// Bool tensors.
#[derive(Clone, Copy, Debug)]
pub struct Bool;

/// Quantized float tensors.
#[derive(Clone, Copy, Debug)]
pub struct Quant;

/// A tensor of any kind, or the several results of one operation.
#[derive(Clone)]
pub enum Value<B: Backend> {
    /// A float tensor.
    Float(FloatTensor<B>),
    /// An int tensor.
    Int(IntTensor<B>),
    /// A bool tensor.
    Bool(BoolTensor<B>),
    /// A quantized tensor: boxed, because it is larger than the others, and each operation moves
    /// values.
    Quant(Box<QuantizedTensor<B>>),
    /// Several results.
    Many(Vec<Value<B>>),
    /// An optional result that is not there.
    Absent,
}

impl<B: Backend> Value<B> {
    /// A view that an operation of the current stream makes. A quantized tensor is returned as it
    /// is.
    pub(crate) fn view(self) -> Self {
        let shape = view_shape(&self.shape());
        match self {
            Self::Float(x) => Self::Float(B::float_reshape(x, shape)),
            Self::Int(x) => Self::Int(B::int_reshape(x, shape)),
            Self::Bool(x) => Self::Bool(B::bool_reshape(x, shape)),
            Self::Quant(_) | Self::Many(_) | Self::Absent => self,
        }
    }
}

macro_rules! kinds {
    ($($kind:ident $(($boxed:path, $deref:tt))? $name:ident: $tensor:ident, $device:ident, $into_data:ident, $from_data:ident;)*) => {
        $(impl<B: Backend> Kind<B> for $kind {
            type Primitive = $tensor<B>;

            #[inline]
            fn peek(value: &Value<B>) -> Option<&$tensor<B>> {
                match value {
                    Value::$kind(x) => Some(x),
                    _ => None,
                }
            }

            #[inline]
            fn unwrap(value: Value<B>) -> Option<$tensor<B>> {
                match value {
                    Value::$kind(x) => Some($($deref)? x),
                    _ => None,
                }
            }

            #[inline]
            fn wrap(tensor: $tensor<B>) -> Value<B> {
                Value::$kind($($boxed)?(tensor))
            }

            #[inline]
            fn device(tensor: &$tensor<B>) -> Device<B> {
                device_of!(B, $device, tensor)
            }
        })*

        impl<B: Backend> Value<B> {
            $(
                #[doc = concat!("The tensor of a value that is `", stringify!($kind), "`.\n\n# Panics\n\nIf it is anything else.")]
                pub fn $name(self) -> $tensor<B> {
                    <$kind as Kind<B>>::unwrap(self)
                        .unwrap_or_else(|| panic!("the value is not `{}`", stringify!($kind)))
                }
            )*

            /// The shape of one tensor.
            pub(crate) fn shape(&self) -> Shape {
                match self {
                    $(Self::$kind(x) => x.shape(),)*
                    Self::Many(_) | Self::Absent => Shape::new([]),
                }
            }

            /// The type of one tensor.
            pub(crate) fn dtype(&self) -> DType {
                match self {
                    $(Self::$kind(x) => x.dtype(),)*
                    Self::Many(_) | Self::Absent => DType::U8,
                }
            }

            /// Where a tensor is.
            pub(crate) fn device(&self) -> Option<Device<B>> {
                match self {
                    $(Self::$kind(x) => Some(<$kind as Kind<B>>::device(x)),)*
                    Self::Many(_) | Self::Absent => None,
                }
            }

            /// Starts to read the tensor to the host; `None` if the value is not one tensor.
            pub(crate) fn download(self) -> Option<Download> {
                match self {
                    $(Self::$kind(x) => Some(Box::pin(B::$into_data($($deref)? x))),)*
                    Self::Many(_) | Self::Absent => None,
                }
            }

            /// The function that uploads a tensor of this kind; `None` if the value is not one
            /// tensor.
            pub(crate) fn upload(&self) -> Option<Upload<B>> {
                match self {
                    $(Self::$kind(_) => Some(|data, device| Self::$kind($($boxed)?(B::$from_data(data, device)))),)*
                    Self::Many(_) | Self::Absent => None,
                }
            }
        }
    };
}

kinds! {
    Float float: FloatTensor, float_device, float_into_data, float_from_data;
    Int int: IntTensor, int_device, int_into_data, int_from_data;
    Bool bool: BoolTensor, bool_device, bool_into_data, bool_from_data;
    Quant (Box::new, *) quant: QuantizedTensor, q_device, q_into_data, q_from_data;
}
