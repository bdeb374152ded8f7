//! Operations on quantized tensors: `QTensorOps`, 80 rows.

/// Hands every row of [`QTensorOps`](burn_backend::ops::QTensorOps) to a macro; see [the crate's documentation](crate).
#[macro_export]
macro_rules! quantized_ops {
    ($callback:ident) => {
        $callback! {
            QTensorOps
            keep    q_from_data(data: [TensorData], device: DeviceRef) -> Quant;
            keep    quantize(tensor: Float, scheme: [&QuantScheme], qparams: QuantParams) -> Quant
                    = "The scheme decides the type.";
            keep    quantize_dynamic(tensor: Float, scheme: [&QuantScheme]) -> Quant;
            keep    dequantize(tensor: Quant, dtype: [FloatDType]) -> Float;
            keep    q_device(tensor: QuantRef) -> Device;
            keep    q_to_device(tensor: Quant, device: DeviceRef) -> Quant;
            keep    q_reshape(tensor: Quant, shape: [Shape]) -> Quant;
            keep    q_into_data(tensor: Quant) -> Data;
            keep    q_detach(tensor: Quant) -> Quant;
            keep    q_set_require_grad(tensor: Quant, require_grad: [bool]) -> Quant;
            keep    q_is_require_grad(tensor: QuantRef) -> [bool];
            keep    q_expand(tensor: Quant, shape: [Shape]) -> Quant;
            keep    q_transpose(tensor: Quant) -> Quant;
            keep    q_swap_dims(tensor: Quant, dim1: [usize], dim2: [usize]) -> Quant;
            keep    q_permute(tensor: Quant, axes: {usize}) -> Quant;
            keep    q_flip(tensor: Quant, axes: {usize}) -> Quant;
            keep    q_select(tensor: Quant, dim: [usize], indices: Int) -> Quant;
            keep    q_slice(tensor: Quant, slices: {Slice}) -> Quant;
            keep    q_gather(dim: [usize], tensor: Quant, indices: Int) -> Quant;
            keep    q_repeat_dim(tensor: Quant, dim: [usize], times: [usize]) -> Quant;
            keep    q_add(lhs: Quant, rhs: Quant) -> Tensor;
            keep    q_add_scalar(lhs: Quant, rhs: [Scalar]) -> Tensor;
            keep    q_clamp_min(tensor: Quant, min: [Scalar]) -> Tensor;
            keep    q_clamp_max(tensor: Quant, max: [Scalar]) -> Tensor;
            keep    q_clamp(tensor: Quant, min: [Scalar], max: [Scalar]) -> Tensor;
            keep    q_sub(lhs: Quant, rhs: Quant) -> Tensor;
            keep    q_sub_scalar(lhs: Quant, rhs: [Scalar]) -> Tensor;
            keep    q_mul(lhs: Quant, rhs: Quant) -> Tensor;
            keep    q_mul_scalar(lhs: Quant, rhs: [Scalar]) -> Tensor;
            keep    q_div(lhs: Quant, rhs: Quant) -> Tensor;
            keep    q_div_scalar(lhs: Quant, rhs: [Scalar]) -> Tensor;
            full    q_matmul(lhs: Tensor, rhs: Tensor) -> Tensor
                    = "Quantized operands are left alone; a float operand meets the f32 result of a dequantization.";
            keep    q_neg(tensor: Quant) -> Tensor;
            keep    q_recip(tensor: Quant) -> Tensor;
            keep    q_sum(tensor: Quant) -> Tensor;
            keep    q_sum_dim(tensor: Quant, dim: [usize]) -> Tensor;
            keep    q_prod(tensor: Quant) -> Tensor;
            keep    q_prod_dim(tensor: Quant, dim: [usize]) -> Tensor;
            keep    q_mean(tensor: Quant) -> Tensor;
            keep    q_mean_dim(tensor: Quant, dim: [usize]) -> Tensor;
            keep    q_cumsum(tensor: Quant, dim: [usize]) -> Tensor;
            keep    q_cumprod(tensor: Quant, dim: [usize]) -> Tensor;
            keep    q_cummin(tensor: Quant, dim: [usize]) -> Tensor;
            keep    q_cummax(tensor: Quant, dim: [usize]) -> Tensor;
            keep    q_exp(tensor: Quant) -> Tensor;
            keep    q_log(tensor: Quant) -> Tensor;
            keep    q_log1p(tensor: Quant) -> Tensor;
            keep    q_powf(lhs: Quant, rhs: Quant) -> Tensor;
            keep    q_powi(lhs: Quant, rhs: Int) -> Tensor;
            keep    q_powi_scalar(lhs: Quant, rhs: [Scalar]) -> Tensor;
            keep    q_powf_scalar(tensor: Quant, value: [Scalar]) -> Tensor;
            keep    q_sqrt(tensor: Quant) -> Tensor;
            keep    q_abs(tensor: Quant) -> Quant;
            keep    q_cos(tensor: Quant) -> Tensor;
            keep    q_sin(tensor: Quant) -> Tensor;
            keep    q_tan(tensor: Quant) -> Tensor;
            keep    q_cosh(tensor: Quant) -> Tensor;
            keep    q_sinh(tensor: Quant) -> Tensor;
            keep    q_tanh(tensor: Quant) -> Tensor;
            keep    q_erf(tensor: Quant) -> Tensor;
            keep    q_cat(tensors: Quants, dim: [usize]) -> Quant;
            keep    q_argmax(tensor: Quant, dim: [usize], out_dtype: [IntDType]) -> Int;
            keep    q_argtopk(tensor: Quant, dim: [usize], k: [usize], out_dtype: [IntDType]) -> Int;
            keep    q_topk(tensor: Quant, dim: [usize], k: [usize]) -> Quant;
            keep    q_argmin(tensor: Quant, dim: [usize], out_dtype: [IntDType]) -> Int;
            keep    q_max(tensor: Quant) -> Quant;
            keep    q_max_dim(tensor: Quant, dim: [usize]) -> Quant;
            keep    q_max_dim_with_indices(tensor: Quant, dim: [usize], out_dtype: [IntDType]) -> (Quant, Int);
            keep    q_min(tensor: Quant) -> Quant;
            keep    q_min_dim(tensor: Quant, dim: [usize]) -> Quant;
            keep    q_min_dim_with_indices(tensor: Quant, dim: [usize], out_dtype: [IntDType]) -> (Quant, Int);
            keep    q_max_abs(tensor: Quant) -> Quant;
            keep    q_max_abs_dim(tensor: Quant, dim: [usize]) -> Quant;
            keep    q_any(tensor: Quant, out_dtype: [BoolDType]) -> Bool;
            keep    q_any_dim(tensor: Quant, dim: [usize], out_dtype: [BoolDType]) -> Bool;
            keep    q_all(tensor: Quant, out_dtype: [BoolDType]) -> Bool;
            keep    q_all_dim(tensor: Quant, dim: [usize], out_dtype: [BoolDType]) -> Bool;
            keep    q_sort(tensor: Quant, dim: [usize], descending: [bool]) -> Quant;
            keep    q_sort_with_indices(tensor: Quant, dim: [usize], descending: [bool], out_dtype: [IntDType]) -> (Quant, Int);
            keep    q_argsort(tensor: Quant, dim: [usize], descending: [bool], out_dtype: [IntDType]) -> Int;
        }
    };
}
