//! Kinds as Rust types.

/// The Rust type of an operand or a result of this kind, over the backend `Self`.
///
/// ```
/// use burn_decorator::kind_type;
///
/// trait Read: burn_backend::Backend {
///     fn first(tensors: kind_type!(Floats)) -> kind_type!(Float);
/// }
/// ```
#[macro_export]
macro_rules! kind_type {
    (Float) => { $crate::types::FloatTensor<Self> };
    (Follow) => { $crate::types::FloatTensor<Self> };
    (FloatRef) => { &$crate::types::FloatTensor<Self> };
    (FloatOpt) => { Option<$crate::types::FloatTensor<Self>> };
    (Floats) => { Vec<$crate::types::FloatTensor<Self>> };
    (Int) => { $crate::types::IntTensor<Self> };
    (IntRef) => { &$crate::types::IntTensor<Self> };
    (Ints) => { Vec<$crate::types::IntTensor<Self>> };
    (Bool) => { $crate::types::BoolTensor<Self> };
    (BoolRef) => { &$crate::types::BoolTensor<Self> };
    (BoolOpt) => { Option<$crate::types::BoolTensor<Self>> };
    (Bools) => { Vec<$crate::types::BoolTensor<Self>> };
    (Quant) => { $crate::types::QuantizedTensor<Self> };
    (QuantRef) => { &$crate::types::QuantizedTensor<Self> };
    (Quants) => { Vec<$crate::types::QuantizedTensor<Self>> };
    (Tensor) => { $crate::types::TensorPrimitive<Self> };
    (QuantParams) => { $crate::types::QuantizationParametersPrimitive<Self> };
    (Fill) => { $crate::types::Scalar };
    (Device) => { $crate::types::Device<Self> };
    (DeviceRef) => { &$crate::types::Device<Self> };
    (Data) => {
        impl $crate::types::Future<
            Output = Result<$crate::types::TensorData, $crate::types::ExecutionError>,
        > + Send
    };
    (FutureFloat) => {
        impl $crate::types::Future<Output = $crate::types::FloatTensor<Self>> + 'static + Send
    };
    (FutureInt) => {
        impl $crate::types::Future<Output = $crate::types::IntTensor<Self>> + 'static + Send
    };
    (FutureBool) => {
        impl $crate::types::Future<Output = $crate::types::BoolTensor<Self>> + 'static + Send
    };
    (Transaction) => { $crate::types::TransactionPrimitive<Self> };
    (TransactionData) => {
        impl $crate::types::Future<
            Output = Result<
                $crate::types::TransactionPrimitiveData,
                $crate::types::ExecutionError,
            >,
        > + Send
    };
    (($a:tt, $b:tt)) => { ($crate::kind_type!($a), $crate::kind_type!($b)) };
    ([$plain:ty]) => { $plain };
    ({$element:ty}) => { &[$element] };
    ({$name:ident $($field:ident: $kind:tt),+}) => { $crate::types::$name<Self> };
}
