//! Operations on float tensors: `FloatTensorOps`.

/// Hands every row of [`FloatTensorOps`](burn_backend::ops::FloatTensorOps) to a macro; see [the
/// crate's documentation](crate).
#[macro_export]
macro_rules! float_ops {
    ($callback:ident) => {
        $crate::rows_of_release! {
            $callback FloatTensorOps
            keep    fixed   float_from_data(data: [TensorData], device: DeviceRef) -> Float;
            keep    fixed   float_random(shape: [Shape], distribution: [Distribution], device: DeviceRef, dtype: [FloatDType]) -> Float;
            keep    new     float_zeros(shape: [Shape], device: DeviceRef, dtype: [FloatDType]) -> Float;
            keep    new     float_ones(shape: [Shape], device: DeviceRef, dtype: [FloatDType]) -> Float;
            keep    new     float_full(shape: [Shape], fill_value: [Scalar], device: DeviceRef, dtype: [FloatDType]) -> Float;
            keep    pass    float_into_data(tensor: Float) -> Data;
            keep    cheap   float_to_device(tensor: Float, device: DeviceRef) -> Float;
            keep    cheap   float_into_int(tensor: Float, out_dtype: [IntDType]) -> Int;
            keep    fixed   float_empty(shape: [Shape], device: DeviceRef, dtype: [FloatDType]) -> Float;
            keep    cheap   float_repeat_dim(tensor: Float, dim: [usize], times: [usize]) -> Float;
            promote cheap   float_add(lhs: Float, rhs: Float) -> Float;
            keep    cheap   float_add_scalar(lhs: Float, rhs: [Scalar]) -> Float;
            keep    cheap   float_clamp_min(tensor: Float, min: [Scalar]) -> Float;
            keep    cheap   float_clamp_max(tensor: Float, max: [Scalar]) -> Float;
            keep    cheap   float_clamp(tensor: Float, min: [Scalar], max: [Scalar]) -> Float;
            promote cheap   float_sub(lhs: Float, rhs: Float) -> Float;
            keep    cheap   float_sub_scalar(lhs: Float, rhs: [Scalar]) -> Float;
            promote cheap   float_mul(lhs: Float, rhs: Float) -> Float;
            keep    cheap   float_mul_scalar(lhs: Float, rhs: [Scalar]) -> Float;
            promote cheap   float_div(lhs: Float, rhs: Float) -> Float;
            keep    cheap   float_div_scalar(lhs: Float, rhs: [Scalar]) -> Float;
            promote math    float_remainder(lhs: Float, rhs: Float) -> Float;
            keep    math    float_remainder_scalar(lhs: Float, rhs: [Scalar]) -> Float;
            lower   compute float_matmul(lhs: Float, rhs: Float) -> Float
                    = "A column times a row adds nothing up: it is a product of elements, in the widest type of its operands, as `float_mul`.";
            promote cheap   float_cross(lhs: Float, rhs: Float, dim: [usize]) -> Float;
            keep    cheap   float_neg(tensor: Float) -> Float;
            full    cheap   float_recip(tensor: Float) -> Float
                    = "Leaves the range of f16 below 1.5e-5.";
            keep    view    float_transpose(tensor: Float) -> Float;
            keep    view    float_swap_dims(tensor: Float, dim1: [usize], dim2: [usize]) -> Float;
            keep    view    float_permute(tensor: Float, axes: {usize}) -> Float;
            keep    view    float_flip(tensor: Float, axes: {usize}) -> Float;
            keep    view    float_reshape(tensor: Float, shape: [Shape]) -> Float;
            keep    index   float_gather(dim: [usize], tensor: Float, indices: Int) -> Float;
            promote index   float_scatter_nd(data: Float, indices: Int, values: Float, reduction: [IndexingUpdateOp]) -> Float
                    = "Combines, as `float_scatter_add`.";
            keep    index   float_gather_nd(data: Float, indices: Int) -> Float;
            keep    index   float_select(tensor: Float, dim: [usize], indices: Int) -> Float;
            keep    view    float_slice(tensor: Float, slices: {Slice}) -> Float;
            keep    cheap   float_slice_assign(tensor: Float, slices: {Slice}, value: Follow) -> Float
                    = "Writes into the destination: the value follows its type, so that a cache keeps the type it was created in.";
            promote cheap   float_mask_where(tensor: Float, mask: Bool, value: Float) -> Float;
            keep    cheap   float_mask_fill(tensor: Float, mask: Bool, value: Fill) -> Float
                    = "A finite value stays finite: -1e9, a mask in f32, would be -inf in f16 and a fully masked softmax NaN.";
            promote cheap   float_equal(lhs: Float, rhs: Float, out_dtype: [BoolDType]) -> Bool;
            promote cheap   float_not_equal(lhs: Float, rhs: Float, out_dtype: [BoolDType]) -> Bool;
            keep    cheap   float_equal_elem(lhs: Float, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            keep    cheap   float_not_equal_elem(lhs: Float, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            promote cheap   float_greater(lhs: Float, rhs: Float, out_dtype: [BoolDType]) -> Bool;
            keep    cheap   float_greater_elem(lhs: Float, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            promote cheap   float_greater_equal(lhs: Float, rhs: Float, out_dtype: [BoolDType]) -> Bool;
            keep    cheap   float_greater_equal_elem(lhs: Float, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            promote cheap   float_lower(lhs: Float, rhs: Float, out_dtype: [BoolDType]) -> Bool;
            keep    cheap   float_lower_elem(lhs: Float, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            promote cheap   float_lower_equal(lhs: Float, rhs: Float, out_dtype: [BoolDType]) -> Bool;
            keep    cheap   float_lower_equal_elem(lhs: Float, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            keep    view    float_detach(tensor: Float) -> Float;
            keep    view    float_set_require_grad(tensor: Float, require_grad: [bool]) -> Float;
            keep    pass    float_is_require_grad(tensor: FloatRef) -> [bool];
            full    reduce  float_sum(tensor: Float) -> Float
                    = "Accumulates: 2048 + 1 is 2048 in f16.";
            full    reduce  float_sum_dim(tensor: Float, dim: [usize]) -> Float
                    = "As `float_sum`.";
            full    reduce  float_prod(tensor: Float) -> Float
                    = "Accumulates; leaves the range of f16 after a few factors.";
            full    reduce  float_prod_dim(tensor: Float, dim: [usize]) -> Float;
            full    reduce  float_mean(tensor: Float) -> Float
                    = "PyTorch's CUDA list leaves `mean` in the input's type; a mean is a sum and a division, and losses end in one.";
            full    reduce  float_mean_dim(tensor: Float, dim: [usize]) -> Float
                    = "As `float_mean`.";
            full    reduce  float_cumsum(tensor: Float, dim: [usize]) -> Float
                    = "Accumulates.";
            full    reduce  float_cumprod(tensor: Float, dim: [usize]) -> Float
                    = "Accumulates.";
            keep    reduce  float_cummin(tensor: Float, dim: [usize]) -> Float;
            keep    reduce  float_cummax(tensor: Float, dim: [usize]) -> Float;
            keep    cheap   float_cast(tensor: Float, dtype: [FloatDType]) -> Float
                    = "An explicit cast is the user's decision.";
            full    math    float_exp(tensor: Float) -> Float
                    = "Overflows f16 above 11.1.";
            full    math    float_log(tensor: Float) -> Float
                    = "Amplifies the rounding of its argument near 1.";
            full    math    float_log1p(tensor: Float) -> Float
                    = "Amplifies the rounding of its argument near 0.";
            full    math    float_powf(lhs: Float, rhs: Float) -> Float
                    = "Leaves the range of f16 for small bases and exponents.";
            full    math    float_powi(lhs: Float, rhs: Int) -> Float
                    = "As `float_powf`.";
            full    math    float_powi_scalar(lhs: Float, rhs: [Scalar]) -> Float
                    = "As `float_powf_scalar`.";
            full    math    float_powi_scalar_impl(lhs: Float, rhs: [Scalar]) -> Float
                    = "The kernel behind `float_powi_scalar`.";
            full    math    float_powf_scalar(tensor: Float, value: [Scalar]) -> Float
                    = "As `float_powf`; also squares, so variances and mean squared errors are f32.";
            full    math    float_powf_scalar_impl(tensor: Float, value: [Scalar]) -> Float
                    = "The kernel behind `float_powf_scalar`.";
            keep    cheap   float_sqrt(tensor: Float) -> Float
                    = "Shrinks the range; not in PyTorch's f32 list.";
            keep    cheap   float_abs(tensor: Float) -> Float;
            keep    math    float_cos(tensor: Float) -> Float;
            keep    math    float_sin(tensor: Float) -> Float;
            full    math    float_tan(tensor: Float) -> Float
                    = "Unbounded near its poles.";
            full    math    float_cosh(tensor: Float) -> Float
                    = "Overflows f16 above 11.8.";
            full    math    float_sinh(tensor: Float) -> Float
                    = "Overflows f16 above 11.8.";
            keep    math    float_tanh(tensor: Float) -> Float
                    = "Bounded; in the type of its input, as in PyTorch.";
            full    math    float_acos(tensor: Float) -> Float
                    = "Infinite slope at the ends of its domain.";
            keep    math    float_acosh(tensor: Float) -> Float;
            full    math    float_asin(tensor: Float) -> Float
                    = "Infinite slope at the ends of its domain.";
            keep    math    float_asinh(tensor: Float) -> Float;
            keep    math    float_atan(tensor: Float) -> Float;
            keep    math    float_atanh(tensor: Float) -> Float;
            promote math    float_atan2(lhs: Float, rhs: Float) -> Float;
            keep    cheap   float_round(tensor: Float) -> Float;
            keep    cheap   float_floor(tensor: Float) -> Float;
            keep    cheap   float_ceil(tensor: Float) -> Float;
            keep    cheap   float_trunc(tensor: Float) -> Float;
            keep    math    float_erf(tensor: Float) -> Float
                    = "Bounded; GELU stays in the type of its input.";
            promote cheap   float_cat(tensors: Floats, dim: [usize]) -> Float;
            keep    reduce  float_argmax(tensor: Float, dim: [usize], out_dtype: [IntDType]) -> Int;
            keep    sort    float_argtopk(tensor: Float, dim: [usize], k: [usize], out_dtype: [IntDType]) -> Int;
            keep    sort    float_topk(tensor: Float, dim: [usize], k: [usize]) -> Float
                    = "Selects, does not compute.";
            keep    reduce  float_argmin(tensor: Float, dim: [usize], out_dtype: [IntDType]) -> Int;
            keep    reduce  float_max(tensor: Float) -> Float
                    = "Selects, does not compute.";
            keep    reduce  float_max_dim(tensor: Float, dim: [usize]) -> Float;
            keep    reduce  float_max_dim_with_indices(tensor: Float, dim: [usize], indices_dtype: [IntDType]) -> (Float, Int);
            keep    reduce  float_min(tensor: Float) -> Float;
            keep    reduce  float_min_dim(tensor: Float, dim: [usize]) -> Float;
            keep    reduce  float_min_dim_with_indices(tensor: Float, dim: [usize], indices_dtype: [IntDType]) -> (Float, Int);
            keep    reduce  float_max_abs(tensor: Float) -> Float;
            keep    reduce  float_max_abs_dim(tensor: Float, dim: [usize]) -> Float;
            keep    reduce  float_any(tensor: Float, out_dtype: [BoolDType]) -> Bool;
            keep    reduce  float_any_dim(tensor: Float, dim: [usize], out_dtype: [BoolDType]) -> Bool;
            keep    reduce  float_all(tensor: Float, out_dtype: [BoolDType]) -> Bool;
            keep    reduce  float_all_dim(tensor: Float, dim: [usize], out_dtype: [BoolDType]) -> Bool;
            keep    cheap   float_sign(tensor: Float) -> Float;
            keep    view    float_expand(tensor: Float, shape: [Shape]) -> Float;
            keep    sort    float_sort(tensor: Float, dim: [usize], descending: [bool]) -> Float
                    = "Selects, does not compute.";
            keep    sort    float_sort_with_indices(tensor: Float, dim: [usize], descending: [bool], indices_dtype: [IntDType]) -> (Float, Int);
            keep    sort    float_argsort(tensor: Float, dim: [usize], descending: [bool], out_dtype: [IntDType]) -> Int;
            promote index   float_grid_sample_2d(tensor: Float, grid: Float, options: [GridSampleOptions]) -> Float
                    = "PyTorch's promote list.";
            keep    view    float_unfold(tensor: Float, dim: [usize], size: [usize], step: [usize]) -> Float;
            keep    cheap   float_is_nan(tensor: Float, out_dtype: [BoolDType]) -> Bool;
            keep    cheap   float_is_inf(tensor: Float, out_dtype: [BoolDType]) -> Bool;
        }
    };
}
