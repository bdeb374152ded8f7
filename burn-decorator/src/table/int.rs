//! Operations on int tensors: `IntTensorOps`.

/// Hands every row of [`IntTensorOps`](burn_backend::ops::IntTensorOps) to a macro; see [the
/// crate's documentation](crate).
#[macro_export]
macro_rules! int_ops {
    ($callback:ident) => {
        $crate::rows_of_release! {
            $callback IntTensorOps
            keep    fixed   int_empty(shape: [Shape], device: DeviceRef, dtype: [IntDType]) -> Int;
            keep    pass    int_into_data(tensor: Int) -> Data;
            keep    fixed   int_from_data(data: [TensorData], device: DeviceRef) -> Int;
            keep    cheap   int_to_device(tensor: Int, device: DeviceRef) -> Int;
            keep    view    int_reshape(tensor: Int, shape: [Shape]) -> Int;
            keep    view    int_slice(tensor: Int, slices: {Slice}) -> Int;
            keep    cheap   int_slice_assign(tensor: Int, slices: {Slice}, value: Int) -> Int;
            keep    cheap   int_into_float(tensor: Int, out_dtype: [FloatDType]) -> Float;
            keep    cheap   int_mask_where(tensor: Int, mask: Bool, value: Int) -> Int;
            keep    cheap   int_mask_fill(tensor: Int, mask: Bool, value: [Scalar]) -> Int;
            keep    index   int_gather(dim: [usize], tensor: Int, indices: Int) -> Int;
            keep    index   int_scatter_nd(data: Int, indices: Int, values: Int, reduction: [IndexingUpdateOp]) -> Int;
            keep    index   int_gather_nd(data: Int, indices: Int) -> Int;
            keep    index   int_select(tensor: Int, dim: [usize], indices: Int) -> Int;
            keep    cheap   int_repeat_dim(tensor: Int, dim: [usize], times: [usize]) -> Int;
            keep    cheap   int_cat(tensors: Ints, dim: [usize]) -> Int;
            keep    cheap   int_equal(lhs: Int, rhs: Int, out_dtype: [BoolDType]) -> Bool;
            keep    cheap   int_not_equal(lhs: Int, rhs: Int, out_dtype: [BoolDType]) -> Bool;
            keep    cheap   int_equal_elem(lhs: Int, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            keep    cheap   int_not_equal_elem(lhs: Int, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            keep    cheap   int_greater(lhs: Int, rhs: Int, out_dtype: [BoolDType]) -> Bool;
            keep    cheap   int_greater_elem(lhs: Int, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            keep    cheap   int_greater_equal(lhs: Int, rhs: Int, out_dtype: [BoolDType]) -> Bool;
            keep    cheap   int_greater_equal_elem(lhs: Int, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            keep    cheap   int_lower(lhs: Int, rhs: Int, out_dtype: [BoolDType]) -> Bool;
            keep    cheap   int_lower_elem(lhs: Int, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            keep    cheap   int_lower_equal(lhs: Int, rhs: Int, out_dtype: [BoolDType]) -> Bool;
            keep    cheap   int_lower_equal_elem(lhs: Int, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            keep    cheap   int_add(lhs: Int, rhs: Int) -> Int;
            keep    cheap   int_add_scalar(lhs: Int, rhs: [Scalar]) -> Int;
            keep    math    int_powi(lhs: Int, rhs: Int) -> Int;
            keep    math    int_powi_scalar(lhs: Int, rhs: [Scalar]) -> Int;
            keep    math    int_powi_scalar_impl(lhs: Int, rhs: [Scalar]) -> Int;
            keep    cheap   int_clamp_min(tensor: Int, min: [Scalar]) -> Int;
            keep    cheap   int_clamp_max(tensor: Int, max: [Scalar]) -> Int;
            keep    cheap   int_clamp(tensor: Int, min: [Scalar], max: [Scalar]) -> Int;
            keep    cheap   int_sub(lhs: Int, rhs: Int) -> Int;
            keep    cheap   int_sub_scalar(lhs: Int, rhs: [Scalar]) -> Int;
            keep    cheap   int_mul(lhs: Int, rhs: Int) -> Int;
            keep    cheap   int_mul_scalar(lhs: Int, rhs: [Scalar]) -> Int;
            keep    cheap   int_div(lhs: Int, rhs: Int) -> Int;
            keep    cheap   int_div_scalar(lhs: Int, rhs: [Scalar]) -> Int;
            keep    math    int_remainder(lhs: Int, rhs: Int) -> Int;
            keep    math    int_remainder_scalar(lhs: Int, rhs: [Scalar]) -> Int;
            keep    compute int_matmul(lhs: Int, rhs: Int) -> Int;
            keep    cheap   int_neg(tensor: Int) -> Int;
            keep    new     int_zeros(shape: [Shape], device: DeviceRef, dtype: [IntDType]) -> Int;
            keep    new     int_ones(shape: [Shape], device: DeviceRef, dtype: [IntDType]) -> Int;
            keep    new     int_full(shape: [Shape], fill_value: [Scalar], device: DeviceRef, dtype: [IntDType]) -> Int;
            keep    reduce  int_sum(tensor: Int) -> Int;
            keep    reduce  int_sum_dim(tensor: Int, dim: [usize]) -> Int;
            keep    reduce  int_prod(tensor: Int) -> Int;
            keep    reduce  int_prod_dim(tensor: Int, dim: [usize]) -> Int;
            keep    reduce  int_mean(tensor: Int) -> Int;
            keep    reduce  int_mean_dim(tensor: Int, dim: [usize]) -> Int;
            keep    reduce  int_cumsum(tensor: Int, dim: [usize]) -> Int;
            keep    reduce  int_cumprod(tensor: Int, dim: [usize]) -> Int;
            keep    reduce  int_cummin(tensor: Int, dim: [usize]) -> Int;
            keep    reduce  int_cummax(tensor: Int, dim: [usize]) -> Int;
            keep    reduce  int_argmax(tensor: Int, dim: [usize]) -> Int;
            keep    sort    int_argtopk(tensor: Int, dim: [usize], k: [usize]) -> Int;
            keep    sort    int_topk(tensor: Int, dim: [usize], k: [usize]) -> Int;
            keep    reduce  int_argmin(tensor: Int, dim: [usize]) -> Int;
            keep    reduce  int_max(tensor: Int) -> Int;
            keep    reduce  int_max_dim(tensor: Int, dim: [usize]) -> Int;
            keep    reduce  int_max_dim_with_indices(tensor: Int, dim: [usize]) -> (Int, Int);
            keep    reduce  int_max_abs(tensor: Int) -> Int;
            keep    reduce  int_max_abs_dim(tensor: Int, dim: [usize]) -> Int;
            keep    reduce  int_min(tensor: Int) -> Int;
            keep    reduce  int_min_dim(tensor: Int, dim: [usize]) -> Int;
            keep    reduce  int_min_dim_with_indices(tensor: Int, dim: [usize]) -> (Int, Int);
            keep    cheap   int_abs(tensor: Int) -> Int;
            keep    view    int_transpose(tensor: Int) -> Int;
            keep    view    int_swap_dims(tensor: Int, dim1: [usize], dim2: [usize]) -> Int;
            keep    view    int_permute(tensor: Int, axes: {usize}) -> Int;
            keep    view    int_flip(tensor: Int, axes: {usize}) -> Int;
            keep    fixed   int_random(shape: [Shape], distribution: [Distribution], device: DeviceRef, dtype: [IntDType]) -> Int;
            keep    new     int_arange_step(range: [Range<i64>], step: [usize], device: DeviceRef, dtype: [IntDType]) -> Int;
            keep    new     int_arange(range: [Range<i64>], device: DeviceRef, dtype: [IntDType]) -> Int;
            keep    reduce  int_any(tensor: Int, out_dtype: [BoolDType]) -> Bool;
            keep    reduce  int_any_dim(tensor: Int, dim: [usize], out_dtype: [BoolDType]) -> Bool;
            keep    reduce  int_all(tensor: Int, out_dtype: [BoolDType]) -> Bool;
            keep    reduce  int_all_dim(tensor: Int, dim: [usize], out_dtype: [BoolDType]) -> Bool;
            keep    cheap   int_sign(tensor: Int) -> Int;
            keep    view    int_expand(tensor: Int, shape: [Shape]) -> Int;
            keep    sort    int_sort(tensor: Int, dim: [usize], descending: [bool]) -> Int;
            keep    sort    int_sort_with_indices(tensor: Int, dim: [usize], descending: [bool]) -> (Int, Int);
            keep    sort    int_argsort(tensor: Int, dim: [usize], descending: [bool]) -> Int;
            keep    cheap   bitwise_and(lhs: Int, rhs: Int) -> Int;
            keep    cheap   bitwise_and_scalar(lhs: Int, rhs: [Scalar]) -> Int;
            keep    cheap   bitwise_or(lhs: Int, rhs: Int) -> Int;
            keep    cheap   bitwise_or_scalar(lhs: Int, rhs: [Scalar]) -> Int;
            keep    cheap   bitwise_xor(lhs: Int, rhs: Int) -> Int;
            keep    cheap   bitwise_xor_scalar(lhs: Int, rhs: [Scalar]) -> Int;
            keep    cheap   bitwise_not(tensor: Int) -> Int;
            keep    cheap   bitwise_left_shift(lhs: Int, rhs: Int) -> Int;
            keep    cheap   bitwise_left_shift_scalar(lhs: Int, rhs: [Scalar]) -> Int;
            keep    cheap   bitwise_right_shift(lhs: Int, rhs: Int) -> Int;
            keep    cheap   bitwise_right_shift_scalar(lhs: Int, rhs: [Scalar]) -> Int;
            keep    cheap   int_cast(tensor: Int, dtype: [IntDType]) -> Int;
            keep    view    int_unfold(tensor: Int, dim: [usize], size: [usize], step: [usize]) -> Int;
        }
    };
}
