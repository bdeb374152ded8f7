//! What a decorator passes on as it is.

/// The associated types of `BackendTypes`, those of the inner backend but for the tensors that are named: for the body of an
/// `impl`.
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

/// The methods of `Backend` that are about the device, all but `name` and `dtype_usage`: for the body of an `impl`.
#[macro_export]
macro_rules! forward_device {
    ($inner:ident) => {
        $crate::forward_device!($inner, seed: $inner::seed, idle: || ());
    };
    ($inner:ident, seed: $seed:expr) => {
        $crate::forward_device!($inner, seed: $seed, idle: || ());
    };
    ($inner:ident, idle: $idle:expr) => {
        $crate::forward_device!($inner, seed: $inner::seed, idle: $idle);
    };
    ($inner:ident, seed: $seed:expr, idle: $idle:expr) => {
        fn ad_enabled(device: &Self::Device) -> bool {
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

/// The methods of `TensorMetadata`, those of the tensor in a field: for the body of an `impl`. With `wrapped by`, the function that
/// makes the whole from that field, a [`tape`](crate::tape) is found through the tensor.
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
