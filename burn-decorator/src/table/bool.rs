//! Operations on bool tensors: `BoolTensorOps`.

/// Hands every row of [`BoolTensorOps`](burn_backend::ops::BoolTensorOps) to a macro; see [the
/// crate's documentation](crate).
#[macro_export]
macro_rules! bool_ops {
    ($callback:ident) => {
        $crate::rows_of_release! {
            $callback BoolTensorOps
            keep    fixed   bool_empty(shape: [Shape], device: DeviceRef, dtype: [BoolDType]) -> Bool;
            keep    new     bool_zeros(shape: [Shape], device: DeviceRef, dtype: [BoolDType]) -> Bool;
            keep    new     bool_ones(shape: [Shape], device: DeviceRef, dtype: [BoolDType]) -> Bool;
            keep    pass    bool_into_data(tensor: Bool) -> Data;
            keep    fixed   bool_from_data(data: [TensorData], device: DeviceRef) -> Bool;
            keep    cheap   bool_into_int(tensor: Bool, out_dtype: [IntDType]) -> Int;
            keep    cheap   bool_into_float(tensor: Bool, out_dtype: [FloatDType]) -> Float;
            keep    cheap   bool_to_device(tensor: Bool, device: DeviceRef) -> Bool;
            keep    view    bool_reshape(tensor: Bool, shape: [Shape]) -> Bool;
            keep    view    bool_slice(tensor: Bool, slices: {Slice}) -> Bool;
            keep    cheap   bool_slice_assign(tensor: Bool, slices: {Slice}, value: Bool) -> Bool;
            keep    cheap   bool_mask_where(tensor: Bool, mask: Bool, value: Bool) -> Bool;
            keep    cheap   bool_mask_fill(tensor: Bool, mask: Bool, value: [Scalar]) -> Bool;
            keep    index   bool_gather(dim: [usize], tensor: Bool, indices: Int) -> Bool;
            keep    index   bool_scatter_or(dim: [usize], tensor: Bool, indices: Int, value: Bool) -> Bool;
            keep    index   bool_select(tensor: Bool, dim: [usize], indices: Int) -> Bool;
            keep    index   bool_select_or(tensor: Bool, dim: [usize], indices: Int, value: Bool) -> Bool;
            keep    cheap   bool_repeat_dim(tensor: Bool, dim: [usize], times: [usize]) -> Bool;
            keep    cheap   bool_cat(tensors: Bools, dim: [usize]) -> Bool;
            keep    cheap   bool_equal(lhs: Bool, rhs: Bool) -> Bool;
            keep    cheap   bool_not_equal(lhs: Bool, rhs: Bool) -> Bool;
            keep    cheap   bool_equal_elem(lhs: Bool, rhs: [Scalar]) -> Bool;
            keep    cheap   bool_not_equal_elem(lhs: Bool, rhs: [Scalar]) -> Bool;
            keep    cheap   bool_not(tensor: Bool) -> Bool;
            keep    cheap   bool_and(lhs: Bool, rhs: Bool) -> Bool;
            keep    cheap   bool_or(lhs: Bool, rhs: Bool) -> Bool;
            keep    cheap   bool_xor(lhs: Bool, rhs: Bool) -> Bool;
            keep    view    bool_transpose(tensor: Bool) -> Bool;
            keep    view    bool_swap_dims(tensor: Bool, dim1: [usize], dim2: [usize]) -> Bool;
            keep    view    bool_permute(tensor: Bool, axes: {usize}) -> Bool;
            keep    view    bool_flip(tensor: Bool, axes: {usize}) -> Bool;
            keep    reduce  bool_any(tensor: Bool) -> Bool;
            keep    reduce  bool_any_dim(tensor: Bool, dim: [usize]) -> Bool;
            keep    reduce  bool_all(tensor: Bool) -> Bool;
            keep    reduce  bool_all_dim(tensor: Bool, dim: [usize]) -> Bool;
            keep    fixed   bool_argwhere(tensor: Bool, out_dtype: [IntDType]) -> FutureInt;
            keep    view    bool_expand(tensor: Bool, shape: [Shape]) -> Bool;
            keep    view    bool_unfold(tensor: Bool, dim: [usize], size: [usize], step: [usize]) -> Bool;
        }
    };
}
