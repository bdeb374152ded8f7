//! What a decorator passes on as it is.

/// The associated types of `BackendTypes`, those of the inner backend but for the tensors that are
/// named: for the body of an `impl`.
#[macro_export]
macro_rules! forward_types {
    ($inner:ident, float tensor: $float:ty) => {
        $crate::forward_types!(
            $inner,
            float tensor: $float,
            int tensor: $inner::IntTensorPrimitive,
            bool tensor: $inner::BoolTensorPrimitive,
            quantized tensor: $inner::QuantizedTensorPrimitive
        );
    };
    (
        $inner:ident,
        float tensor: $float:ty,
        int tensor: $int:ty,
        bool tensor: $bool:ty,
        quantized tensor: $quantized:ty
    ) => {
        type Device = $inner::Device;

        type FloatTensorPrimitive = $float;
        type FloatElem = $inner::FloatElem;

        type IntTensorPrimitive = $int;
        type IntElem = $inner::IntElem;

        type BoolTensorPrimitive = $bool;
        type BoolElem = $inner::BoolElem;

        type QuantizedTensorPrimitive = $quantized;
    };
}

/// The methods of `Backend` that are about the device, all but `name`: for the body of an `impl`.
#[macro_export]
macro_rules! forward_device {
    ($inner:ident) => {
        $crate::forward_device!($inner, seed: $inner::seed, idle: || (), asked: || ());
    };
    ($inner:ident, seed: $seed:expr) => {
        $crate::forward_device!($inner, seed: $seed, idle: || (), asked: || ());
    };
    ($inner:ident, idle: $idle:expr) => {
        $crate::forward_device!($inner, seed: $inner::seed, idle: $idle, asked: || ());
    };
    ($inner:ident, asked: $asked:expr) => {
        $crate::forward_device!($inner, seed: $inner::seed, idle: || (), asked: $asked);
    };
    ($inner:ident, seed: $seed:expr, idle: $idle:expr, asked: $asked:expr) => {
        fn ad_enabled(device: &Self::Device) -> bool {
            $asked();
            $inner::ad_enabled(device)
        }

        fn memory_persistent_allocations<
            Output: Send,
            Input: Send,
            Func: Fn(Input) -> Output + Send,
        >(
            device: &Self::Device,
            input: Input,
            func: Func,
        ) -> Output {
            $inner::memory_persistent_allocations(device, input, func)
        }

        fn memory_cleanup(device: &Self::Device) {
            $idle();
            $inner::memory_cleanup(device);
        }

        fn seed(device: &Self::Device, seed: u64) {
            $seed(device, seed);
        }

        fn sync(device: &Self::Device) -> Result<(), $crate::types::ExecutionError> {
            $idle();
            $inner::sync(device)
        }

        fn staging<'a, Iter>(data: Iter, device: &Self::Device)
        where
            Iter: Iterator<Item = &'a mut $crate::types::TensorData>,
        {
            $inner::staging(data, device);
        }

        fn device_count(type_id: u16) -> usize {
            $inner::device_count(type_id)
        }
    };
}

/// The methods of `Backend` about the types of elements, those of the inner backend: for the body
/// of an `impl`.
#[macro_export]
macro_rules! forward_dtypes {
    ($inner:ident) => {
        fn supports_dtype(device: &Self::Device, dtype: $crate::types::DType) -> bool {
            $inner::supports_dtype(device, dtype)
        }

        fn dtype_usage(
            device: &Self::Device,
            dtype: $crate::types::DType,
        ) -> $crate::types::DTypeUsageSet {
            $inner::dtype_usage(device, dtype)
        }
    };
}

/// The methods of `AutodiffBackend` that convert tensors without gradients, which are those of the
/// inner backend: for the body of an `impl`.
#[macro_export]
macro_rules! forward_inner {
    ($inner:ident) => {
        $crate::forward_inner! { @methods $inner
            int_inner int_from_inner IntTensor
            bool_inner bool_from_inner BoolTensor
            q_inner q_from_inner QuantizedTensor
        }
    };
    (@methods $inner:ident $($to:ident $from:ident $tensor:ident)*) => {
        $(
            fn $to(
                tensor: $crate::types::$tensor<Self>,
            ) -> $crate::types::$tensor<Self::InnerBackend> {
                $inner::$to(tensor)
            }

            fn $from(
                tensor: $crate::types::$tensor<Self::InnerBackend>,
            ) -> $crate::types::$tensor<Self> {
                $inner::$from(tensor)
            }
        )*
    };
}

/// The methods of `TensorMetadata`, those of the tensor in a field: for the body of an `impl`. With
/// `wrapped by`, the function that makes the whole from that field, a [`tape`](crate::tape) is
/// found through the tensor.
#[macro_export]
macro_rules! forward_metadata {
    ($tensor:ident $(, wrapped by $wrap:expr)?) => {
        #[inline]
        fn dtype(&self) -> $crate::types::DType {
            self.$tensor.dtype()
        }

        #[inline]
        fn shape(&self) -> $crate::types::Shape {
            self.$tensor.shape()
        }

        #[inline]
        fn rank(&self) -> usize {
            let rank = self.$tensor.rank();
            $($crate::tape::wrap(|this: &Self| &this.$tensor, |this: Self| this.$tensor, $wrap);)?
            rank
        }
    };
}
