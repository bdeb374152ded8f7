//! Operations on float tensors: `FloatTensorOps`, 124 rows.

/// Hands every row of [`FloatTensorOps`](burn_backend::ops::FloatTensorOps) to a macro; see [the crate's documentation](crate).
#[macro_export]
macro_rules! float_ops {
    ($callback:ident) => {
        $callback! {
            FloatTensorOps
            keep    float_from_data(data: [TensorData], device: DeviceRef) -> Float;
            keep    float_random(shape: [Shape], distribution: [Distribution], device: DeviceRef, dtype: [FloatDType]) -> Float;
            keep    float_zeros(shape: [Shape], device: DeviceRef, dtype: [FloatDType]) -> Float;
            keep    float_ones(shape: [Shape], device: DeviceRef, dtype: [FloatDType]) -> Float;
            keep    float_full(shape: [Shape], fill_value: [Scalar], device: DeviceRef, dtype: [FloatDType]) -> Float;
            keep    float_into_data(tensor: Float) -> Data;
            keep    float_device(tensor: FloatRef) -> Device;
            keep    float_to_device(tensor: Float, device: DeviceRef) -> Float;
            keep    float_into_int(tensor: Float, out_dtype: [IntDType]) -> Int;
            keep    float_empty(shape: [Shape], device: DeviceRef, dtype: [FloatDType]) -> Float;
            keep    float_repeat_dim(tensor: Float, dim: [usize], times: [usize]) -> Float;
            promote float_add(lhs: Float, rhs: Float) -> Float;
            keep    float_add_scalar(lhs: Float, rhs: [Scalar]) -> Float;
            keep    float_clamp_min(tensor: Float, min: [Scalar]) -> Float;
            keep    float_clamp_max(tensor: Float, max: [Scalar]) -> Float;
            keep    float_clamp(tensor: Float, min: [Scalar], max: [Scalar]) -> Float;
            promote float_sub(lhs: Float, rhs: Float) -> Float;
            keep    float_sub_scalar(lhs: Float, rhs: [Scalar]) -> Float;
            promote float_mul(lhs: Float, rhs: Float) -> Float;
            keep    float_mul_scalar(lhs: Float, rhs: [Scalar]) -> Float;
            promote float_div(lhs: Float, rhs: Float) -> Float;
            keep    float_div_scalar(lhs: Float, rhs: [Scalar]) -> Float;
            promote float_remainder(lhs: Float, rhs: Float) -> Float;
            keep    float_remainder_scalar(lhs: Float, rhs: [Scalar]) -> Float;
            lower   float_matmul(lhs: Float, rhs: Float) -> Float;
            promote float_cross(lhs: Float, rhs: Float, dim: [usize]) -> Float;
            keep    float_neg(tensor: Float) -> Float;
            full    float_recip(tensor: Float) -> Float
                    = "Leaves the range of f16 below 1.5e-5.";
            keep    float_transpose(tensor: Float) -> Float;
            keep    float_swap_dims(tensor: Float, dim1: [usize], dim2: [usize]) -> Float;
            keep    float_permute(tensor: Float, axes: {usize}) -> Float;
            keep    float_flip(tensor: Float, axes: {usize}) -> Float;
            keep    float_reshape(tensor: Float, shape: [Shape]) -> Float;
            keep    float_gather(dim: [usize], tensor: Float, indices: Int) -> Float;
            promote float_scatter_add(dim: [usize], tensor: Float, indices: Int, value: Float) -> Float
                    = "Adds: PyTorch's promote list.";
            promote float_scatter_nd(data: Float, indices: Int, values: Float, reduction: [IndexingUpdateOp]) -> Float
                    = "Combines, as `float_scatter_add`.";
            keep    float_gather_nd(data: Float, indices: Int) -> Float;
            keep    float_select(tensor: Float, dim: [usize], indices: Int) -> Float;
            promote float_select_add(tensor: Float, dim: [usize], indices: Int, value: Float) -> Float
                    = "Adds, as `float_scatter_add`.";
            keep    float_slice(tensor: Float, slices: {Slice}) -> Float;
            keep    float_slice_assign(tensor: Float, slices: {Slice}, value: Follow) -> Float
                    = "Writes into the destination: the value follows its type, so that a cache keeps the type it was created in.";
            promote float_mask_where(tensor: Float, mask: Bool, value: Float) -> Float;
            keep    float_mask_fill(tensor: Float, mask: Bool, value: Fill) -> Float
                    = "A finite value stays finite: -1e9, a mask in f32, would be -inf in f16 and a fully masked softmax NaN.";
            promote float_equal(lhs: Float, rhs: Float, out_dtype: [BoolDType]) -> Bool;
            promote float_not_equal(lhs: Float, rhs: Float, out_dtype: [BoolDType]) -> Bool;
            keep    float_equal_elem(lhs: Float, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            keep    float_not_equal_elem(lhs: Float, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            promote float_greater(lhs: Float, rhs: Float, out_dtype: [BoolDType]) -> Bool;
            keep    float_greater_elem(lhs: Float, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            promote float_greater_equal(lhs: Float, rhs: Float, out_dtype: [BoolDType]) -> Bool;
            keep    float_greater_equal_elem(lhs: Float, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            promote float_lower(lhs: Float, rhs: Float, out_dtype: [BoolDType]) -> Bool;
            keep    float_lower_elem(lhs: Float, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            promote float_lower_equal(lhs: Float, rhs: Float, out_dtype: [BoolDType]) -> Bool;
            keep    float_lower_equal_elem(lhs: Float, rhs: [Scalar], out_dtype: [BoolDType]) -> Bool;
            keep    float_detach(tensor: Float) -> Float;
            keep    float_set_require_grad(tensor: Float, require_grad: [bool]) -> Float;
            keep    float_is_require_grad(tensor: FloatRef) -> [bool];
            full    float_sum(tensor: Float) -> Float
                    = "Accumulates: 2048 + 1 is 2048 in f16.";
            full    float_sum_dim(tensor: Float, dim: [usize]) -> Float
                    = "As `float_sum`.";
            full    float_prod(tensor: Float) -> Float
                    = "Accumulates; leaves the range of f16 after a few factors.";
            full    float_prod_dim(tensor: Float, dim: [usize]) -> Float;
            full    float_mean(tensor: Float) -> Float
                    = "PyTorch's CUDA list leaves `mean` in the input's type; a mean is a sum and a division, and losses end in one.";
            full    float_mean_dim(tensor: Float, dim: [usize]) -> Float
                    = "As `float_mean`.";
            full    float_cumsum(tensor: Float, dim: [usize]) -> Float
                    = "Accumulates.";
            full    float_cumprod(tensor: Float, dim: [usize]) -> Float
                    = "Accumulates.";
            keep    float_cummin(tensor: Float, dim: [usize]) -> Float;
            keep    float_cummax(tensor: Float, dim: [usize]) -> Float;
            keep    float_cast(tensor: Float, dtype: [FloatDType]) -> Float
                    = "An explicit cast is the user's decision.";
            full    float_exp(tensor: Float) -> Float
                    = "Overflows f16 above 11.1.";
            full    float_log(tensor: Float) -> Float
                    = "Amplifies the rounding of its argument near 1.";
            full    float_log1p(tensor: Float) -> Float
                    = "Amplifies the rounding of its argument near 0.";
            full    float_powf(lhs: Float, rhs: Float) -> Float
                    = "Leaves the range of f16 for small bases and exponents.";
            full    float_powi(lhs: Float, rhs: Int) -> Float
                    = "As `float_powf`.";
            full    float_powi_scalar(lhs: Float, rhs: [Scalar]) -> Float
                    = "As `float_powf_scalar`.";
            full    float_powi_scalar_impl(lhs: Float, rhs: [Scalar]) -> Float
                    = "The kernel behind `float_powi_scalar`.";
            full    float_powf_scalar(tensor: Float, value: [Scalar]) -> Float
                    = "As `float_powf`; also squares, so variances and mean squared errors are f32.";
            full    float_powf_scalar_impl(tensor: Float, value: [Scalar]) -> Float
                    = "The kernel behind `float_powf_scalar`.";
            keep    float_sqrt(tensor: Float) -> Float
                    = "Shrinks the range; not in PyTorch's f32 list.";
            keep    float_abs(tensor: Float) -> Float;
            keep    float_cos(tensor: Float) -> Float;
            keep    float_sin(tensor: Float) -> Float;
            full    float_tan(tensor: Float) -> Float
                    = "Unbounded near its poles.";
            full    float_cosh(tensor: Float) -> Float
                    = "Overflows f16 above 11.8.";
            full    float_sinh(tensor: Float) -> Float
                    = "Overflows f16 above 11.8.";
            keep    float_tanh(tensor: Float) -> Float
                    = "Bounded; in the type of its input, as in PyTorch.";
            full    float_acos(tensor: Float) -> Float
                    = "Infinite slope at the ends of its domain.";
            keep    float_acosh(tensor: Float) -> Float;
            full    float_asin(tensor: Float) -> Float
                    = "Infinite slope at the ends of its domain.";
            keep    float_asinh(tensor: Float) -> Float;
            keep    float_atan(tensor: Float) -> Float;
            keep    float_atanh(tensor: Float) -> Float;
            promote float_atan2(lhs: Float, rhs: Float) -> Float;
            keep    float_round(tensor: Float) -> Float;
            keep    float_floor(tensor: Float) -> Float;
            keep    float_ceil(tensor: Float) -> Float;
            keep    float_trunc(tensor: Float) -> Float;
            keep    float_erf(tensor: Float) -> Float
                    = "Bounded; GELU stays in the type of its input.";
            promote float_cat(tensors: Floats, dim: [usize]) -> Float;
            keep    float_argmax(tensor: Float, dim: [usize], out_dtype: [IntDType]) -> Int;
            keep    float_argtopk(tensor: Float, dim: [usize], k: [usize], out_dtype: [IntDType]) -> Int;
            keep    float_topk(tensor: Float, dim: [usize], k: [usize]) -> Float
                    = "Selects, does not compute.";
            keep    float_argmin(tensor: Float, dim: [usize], out_dtype: [IntDType]) -> Int;
            keep    float_max(tensor: Float) -> Float
                    = "Selects, does not compute.";
            keep    float_max_dim(tensor: Float, dim: [usize]) -> Float;
            keep    float_max_dim_with_indices(tensor: Float, dim: [usize], indices_dtype: [IntDType]) -> (Float, Int);
            keep    float_min(tensor: Float) -> Float;
            keep    float_min_dim(tensor: Float, dim: [usize]) -> Float;
            keep    float_min_dim_with_indices(tensor: Float, dim: [usize], indices_dtype: [IntDType]) -> (Float, Int);
            keep    float_max_abs(tensor: Float) -> Float;
            keep    float_max_abs_dim(tensor: Float, dim: [usize]) -> Float;
            keep    float_any(tensor: Float, out_dtype: [BoolDType]) -> Bool;
            keep    float_any_dim(tensor: Float, dim: [usize], out_dtype: [BoolDType]) -> Bool;
            keep    float_all(tensor: Float, out_dtype: [BoolDType]) -> Bool;
            keep    float_all_dim(tensor: Float, dim: [usize], out_dtype: [BoolDType]) -> Bool;
            keep    float_sign(tensor: Float) -> Float;
            keep    float_expand(tensor: Float, shape: [Shape]) -> Float;
            keep    float_sort(tensor: Float, dim: [usize], descending: [bool]) -> Float
                    = "Selects, does not compute.";
            keep    float_sort_with_indices(tensor: Float, dim: [usize], descending: [bool], indices_dtype: [IntDType]) -> (Float, Int);
            keep    float_argsort(tensor: Float, dim: [usize], descending: [bool], out_dtype: [IntDType]) -> Int;
            promote float_grid_sample_2d(tensor: Float, grid: Float, options: [GridSampleOptions]) -> Float
                    = "PyTorch's promote list.";
            keep    float_unfold(tensor: Float, dim: [usize], size: [usize], step: [usize]) -> Float;
            keep    float_is_nan(tensor: Float, out_dtype: [BoolDType]) -> Bool;
            keep    float_is_inf(tensor: Float, out_dtype: [BoolDType]) -> Bool;
        }
    };
}
