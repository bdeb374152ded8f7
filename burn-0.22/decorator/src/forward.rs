//! What a decorator passes on as it is.

/// The associated types of `BackendTypes`, those of the inner backend but for the tensors that are
/// named: for the body of an `impl`.
///
/// Graphs are not captured through a decorator: replaying one is `unsafe`, because its buffers must
/// outlive it, and a decorator may free them.
#[macro_export]
macro_rules! forward_types {
    (
        $inner:ident,
        float tensor: $float:ty,
        int tensor: $int:ty,
        bool tensor: $bool:ty,
        quantized tensor: $quantized:ty
    ) => {
        type Device = $inner::Device;
        type FloatTensorPrimitive = $float;
        type IntTensorPrimitive = $int;
        type BoolTensorPrimitive = $bool;
        type QuantizedTensorPrimitive = $quantized;
        type GraphPrimitive = burn_backend::GraphUnsupported;
    };
}

/// The methods of `Backend` that are about the device, all but `name`: for the body of an `impl`.
#[macro_export]
macro_rules! forward_device {
    ($inner:ident) => {
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
            $inner::memory_cleanup(device);
        }

        fn memory_pool_report(
            device: &Self::Device,
        ) -> Option<Vec<burn_backend::SlicedPoolReport>> {
            $inner::memory_pool_report(device)
        }

        fn memory_pool_usage(device: &Self::Device) -> Option<burn_backend::MemoryPoolUsage> {
            $inner::memory_pool_usage(device)
        }

        fn seed(device: &Self::Device, seed: u64) {
            $inner::seed(device, seed);
        }

        fn sync(device: &Self::Device) -> Result<(), $crate::types::ExecutionError> {
            $inner::sync(device)
        }

        fn profile<O: Send + 'static>(
            device: &Self::Device,
            options: burn_backend::ProfileOptions,
            func: impl FnOnce() -> O + Send,
        ) -> Result<(O, burn_backend::ProfileDuration), $crate::types::ExecutionError> {
            $inner::profile(device, options, func)
        }

        fn profile_start(
            device: &Self::Device,
        ) -> Result<Option<burn_backend::ProfileToken>, $crate::types::ExecutionError> {
            $inner::profile_start(device)
        }

        fn profile_end(
            device: &Self::Device,
            token: burn_backend::ProfileToken,
            options: burn_backend::ProfileOptions,
        ) -> Result<burn_backend::ProfileDuration, $crate::types::ExecutionError> {
            $inner::profile_end(device, token, options)
        }

        fn profile_abandon(device: &Self::Device, token: burn_backend::ProfileToken) {
            $inner::profile_abandon(device, token);
        }

        fn flush(device: &Self::Device) -> Result<(), $crate::types::ExecutionError> {
            $inner::flush(device)
        }

        fn staging<'a, Iter>(data: Iter, device: &Self::Device)
        where
            Iter: Iterator<Item = &'a mut $crate::types::TensorData>,
        {
            $inner::staging(data, device);
        }

        fn supports_dtype(device: &Self::Device, dtype: $crate::types::DType) -> bool {
            $inner::supports_dtype(device, dtype)
        }

        fn dtype_usage(
            device: &Self::Device,
            dtype: $crate::types::DType,
        ) -> burn_backend::DTypeUsageSet {
            $inner::dtype_usage(device, dtype)
        }

        fn device_count(type_id: u16) -> usize {
            $inner::device_count(type_id)
        }
    };
}
