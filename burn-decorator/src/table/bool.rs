//! Operations on bool tensors: `BoolTensorOps`, 39 rows.

/// Hands every row of [`BoolTensorOps`](burn_backend::ops::BoolTensorOps) to a macro; see [the crate's documentation](crate).
#[macro_export]
macro_rules! bool_ops {
    ($callback:ident) => {
        $callback! {
            BoolTensorOps
            keep    bool_empty(shape: [Shape], device: DeviceRef, dtype: [BoolDType]) -> Bool;
            keep    bool_zeros(shape: [Shape], device: DeviceRef, dtype: [BoolDType]) -> Bool;
            keep    bool_ones(shape: [Shape], device: DeviceRef, dtype: [BoolDType]) -> Bool;
            keep    bool_into_data(tensor: Bool) -> Data;
            keep    bool_from_data(data: [TensorData], device: DeviceRef) -> Bool;
            keep    bool_into_int(tensor: Bool, out_dtype: [IntDType]) -> Int;
            keep    bool_into_float(tensor: Bool, out_dtype: [FloatDType]) -> Float;
            keep    bool_device(tensor: BoolRef) -> Device;
            keep    bool_to_device(tensor: Bool, device: DeviceRef) -> Bool;
            keep    bool_reshape(tensor: Bool, shape: [Shape]) -> Bool;
            keep    bool_slice(tensor: Bool, slices: {Slice}) -> Bool;
            keep    bool_slice_assign(tensor: Bool, slices: {Slice}, value: Bool) -> Bool;
            keep    bool_mask_where(tensor: Bool, mask: Bool, value: Bool) -> Bool;
            keep    bool_mask_fill(tensor: Bool, mask: Bool, value: [Scalar]) -> Bool;
            keep    bool_gather(dim: [usize], tensor: Bool, indices: Int) -> Bool;
            keep    bool_scatter_or(dim: [usize], tensor: Bool, indices: Int, value: Bool) -> Bool;
            keep    bool_select(tensor: Bool, dim: [usize], indices: Int) -> Bool;
            keep    bool_select_or(tensor: Bool, dim: [usize], indices: Int, value: Bool) -> Bool;
            keep    bool_repeat_dim(tensor: Bool, dim: [usize], times: [usize]) -> Bool;
            keep    bool_cat(tensors: Bools, dim: [usize]) -> Bool;
            keep    bool_equal(lhs: Bool, rhs: Bool) -> Bool;
            keep    bool_not_equal(lhs: Bool, rhs: Bool) -> Bool;
            keep    bool_equal_elem(lhs: Bool, rhs: [Scalar]) -> Bool;
            keep    bool_not_equal_elem(lhs: Bool, rhs: [Scalar]) -> Bool;
            keep    bool_not(tensor: Bool) -> Bool;
            keep    bool_and(lhs: Bool, rhs: Bool) -> Bool;
            keep    bool_or(lhs: Bool, rhs: Bool) -> Bool;
            keep    bool_xor(lhs: Bool, rhs: Bool) -> Bool;
            keep    bool_transpose(tensor: Bool) -> Bool;
            keep    bool_swap_dims(tensor: Bool, dim1: [usize], dim2: [usize]) -> Bool;
            keep    bool_permute(tensor: Bool, axes: {usize}) -> Bool;
            keep    bool_flip(tensor: Bool, axes: {usize}) -> Bool;
            keep    bool_any(tensor: Bool) -> Bool;
            keep    bool_any_dim(tensor: Bool, dim: [usize]) -> Bool;
            keep    bool_all(tensor: Bool) -> Bool;
            keep    bool_all_dim(tensor: Bool, dim: [usize]) -> Bool;
            keep    bool_argwhere(tensor: Bool, out_dtype: [IntDType]) -> FutureInt;
            keep    bool_expand(tensor: Bool, shape: [Shape]) -> Bool;
            keep    bool_unfold(tensor: Bool, dim: [usize], size: [usize], step: [usize]) -> Bool;
        }
    };
}
