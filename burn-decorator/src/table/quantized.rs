//! Operations on quantized tensors: `QTensorOps`.

/// Hands every row of [`QTensorOps`](burn_backend::ops::QTensorOps) to a macro; see [the crate's
/// documentation](crate).
#[macro_export]
macro_rules! quantized_ops {
    ($callback:ident) => {
        $crate::rows_of_release! {
            $callback QTensorOps
            keep    fixed   q_from_data(data: [TensorData], device: DeviceRef) -> Quant;
            keep    cheap   quantize(tensor: Float, scheme: [&QuantScheme], qparams: QuantParams) -> Quant
                    = "The scheme decides the type.";
            keep    sort    quantize_dynamic(tensor: Float, scheme: [&QuantScheme]) -> Quant;
            keep    cheap   dequantize(tensor: Quant, dtype: [FloatDType]) -> Float;
            keep    cheap   q_to_device(tensor: Quant, device: DeviceRef) -> Quant;
            keep    view    q_reshape(tensor: Quant, shape: [Shape]) -> Quant;
            keep    pass    q_into_data(tensor: Quant) -> Data;
            keep    view    q_detach(tensor: Quant) -> Quant;
            keep    view    q_set_require_grad(tensor: Quant, require_grad: [bool]) -> Quant;
            keep    pass    q_is_require_grad(tensor: QuantRef) -> [bool];
            keep    view    q_expand(tensor: Quant, shape: [Shape]) -> Quant;
            keep    view    q_transpose(tensor: Quant) -> Quant;
            keep    view    q_swap_dims(tensor: Quant, dim1: [usize], dim2: [usize]) -> Quant;
            keep    view    q_permute(tensor: Quant, axes: {usize}) -> Quant;
            keep    view    q_flip(tensor: Quant, axes: {usize}) -> Quant;
            keep    index   q_select(tensor: Quant, dim: [usize], indices: Int) -> Quant;
            keep    view    q_slice(tensor: Quant, slices: {Slice}) -> Quant;
            keep    index   q_gather(dim: [usize], tensor: Quant, indices: Int) -> Quant;
            keep    cheap   q_repeat_dim(tensor: Quant, dim: [usize], times: [usize]) -> Quant;
            keep    cheap   q_add(lhs: Quant, rhs: Quant) -> Tensor;
            keep    cheap   q_add_scalar(lhs: Quant, rhs: [Scalar]) -> Tensor;
            keep    cheap   q_clamp_min(tensor: Quant, min: [Scalar]) -> Tensor;
            keep    cheap   q_clamp_max(tensor: Quant, max: [Scalar]) -> Tensor;
            keep    cheap   q_clamp(tensor: Quant, min: [Scalar], max: [Scalar]) -> Tensor;
            keep    cheap   q_sub(lhs: Quant, rhs: Quant) -> Tensor;
            keep    cheap   q_sub_scalar(lhs: Quant, rhs: [Scalar]) -> Tensor;
            keep    cheap   q_mul(lhs: Quant, rhs: Quant) -> Tensor;
            keep    cheap   q_mul_scalar(lhs: Quant, rhs: [Scalar]) -> Tensor;
            keep    cheap   q_div(lhs: Quant, rhs: Quant) -> Tensor;
            keep    cheap   q_div_scalar(lhs: Quant, rhs: [Scalar]) -> Tensor;
            full    compute q_matmul(lhs: Tensor, rhs: Tensor) -> Tensor
                    = "Quantized operands are left alone; a float operand meets the f32 result of a dequantization.";
            keep    cheap   q_neg(tensor: Quant) -> Tensor;
            keep    cheap   q_recip(tensor: Quant) -> Tensor;
            keep    reduce  q_sum(tensor: Quant) -> Tensor;
            keep    reduce  q_sum_dim(tensor: Quant, dim: [usize]) -> Tensor;
            keep    reduce  q_prod(tensor: Quant) -> Tensor;
            keep    reduce  q_prod_dim(tensor: Quant, dim: [usize]) -> Tensor;
            keep    reduce  q_mean(tensor: Quant) -> Tensor;
            keep    reduce  q_mean_dim(tensor: Quant, dim: [usize]) -> Tensor;
            keep    reduce  q_cumsum(tensor: Quant, dim: [usize]) -> Tensor;
            keep    reduce  q_cumprod(tensor: Quant, dim: [usize]) -> Tensor;
            keep    reduce  q_cummin(tensor: Quant, dim: [usize]) -> Tensor;
            keep    reduce  q_cummax(tensor: Quant, dim: [usize]) -> Tensor;
            keep    math    q_exp(tensor: Quant) -> Tensor;
            keep    math    q_log(tensor: Quant) -> Tensor;
            keep    math    q_log1p(tensor: Quant) -> Tensor;
            keep    math    q_powf(lhs: Quant, rhs: Quant) -> Tensor;
            keep    math    q_powi(lhs: Quant, rhs: Int) -> Tensor;
            keep    math    q_powi_scalar(lhs: Quant, rhs: [Scalar]) -> Tensor;
            keep    math    q_powf_scalar(tensor: Quant, value: [Scalar]) -> Tensor;
            keep    cheap   q_sqrt(tensor: Quant) -> Tensor;
            keep    cheap   q_abs(tensor: Quant) -> Quant;
            keep    math    q_cos(tensor: Quant) -> Tensor;
            keep    math    q_sin(tensor: Quant) -> Tensor;
            keep    math    q_tan(tensor: Quant) -> Tensor;
            keep    math    q_cosh(tensor: Quant) -> Tensor;
            keep    math    q_sinh(tensor: Quant) -> Tensor;
            keep    math    q_tanh(tensor: Quant) -> Tensor;
            keep    math    q_erf(tensor: Quant) -> Tensor;
            keep    cheap   q_cat(tensors: Quants, dim: [usize]) -> Quant;
            keep    reduce  q_argmax(tensor: Quant, dim: [usize], out_dtype: [IntDType]) -> Int;
            keep    sort    q_argtopk(tensor: Quant, dim: [usize], k: [usize], out_dtype: [IntDType]) -> Int;
            keep    sort    q_topk(tensor: Quant, dim: [usize], k: [usize]) -> Quant;
            keep    reduce  q_argmin(tensor: Quant, dim: [usize], out_dtype: [IntDType]) -> Int;
            keep    reduce  q_max(tensor: Quant) -> Quant;
            keep    reduce  q_max_dim(tensor: Quant, dim: [usize]) -> Quant;
            keep    reduce  q_max_dim_with_indices(tensor: Quant, dim: [usize], out_dtype: [IntDType]) -> (Quant, Int);
            keep    reduce  q_min(tensor: Quant) -> Quant;
            keep    reduce  q_min_dim(tensor: Quant, dim: [usize]) -> Quant;
            keep    reduce  q_min_dim_with_indices(tensor: Quant, dim: [usize], out_dtype: [IntDType]) -> (Quant, Int);
            keep    reduce  q_max_abs(tensor: Quant) -> Quant;
            keep    reduce  q_max_abs_dim(tensor: Quant, dim: [usize]) -> Quant;
            keep    reduce  q_any(tensor: Quant, out_dtype: [BoolDType]) -> Bool;
            keep    reduce  q_any_dim(tensor: Quant, dim: [usize], out_dtype: [BoolDType]) -> Bool;
            keep    reduce  q_all(tensor: Quant, out_dtype: [BoolDType]) -> Bool;
            keep    reduce  q_all_dim(tensor: Quant, dim: [usize], out_dtype: [BoolDType]) -> Bool;
            keep    sort    q_sort(tensor: Quant, dim: [usize], descending: [bool]) -> Quant;
            keep    sort    q_sort_with_indices(tensor: Quant, dim: [usize], descending: [bool], out_dtype: [IntDType]) -> (Quant, Int);
            keep    sort    q_argsort(tensor: Quant, dim: [usize], descending: [bool], out_dtype: [IntDType]) -> Int;
        }
    };
}
