//! Operations behind modules: linear, convolutions, pooling, attention, norms: `ModuleOps`.

/// Hands every row of [`ModuleOps`](burn_backend::ops::ModuleOps) to a macro; see [the crate's
/// documentation](crate).
#[macro_export]
macro_rules! module_ops {
    ($callback:ident) => {
        $crate::rows_of_release! {
            $callback ModuleOps
            keep    index   embedding(weights: Float, indices: Int) -> Float
                    = "A lookup: the first lowered operation behind it casts the few rows used, not the table.";
            promote index   embedding_backward(weights: Float, output_grad: Float, indices: Int) -> Float
                    = "Adds rows, as `float_scatter_add`.";
            lower   compute linear(x: Float, weight: Float, bias: FloatOpt) -> Float;
            lower   compute linear_x_backward(weight: Float, output_grad: Float) -> Float;
            lower   compute linear_weight_backward(x: Float, output_grad: Float) -> Float;
            full    reduce  linear_bias_backward(output_grad: Float) -> Float
                    = "A sum over the batch.";
            lower   compute conv1d(x: Float, weight: Float, bias: FloatOpt, options: [ConvOptions<1>]) -> Float;
            lower   compute conv1d_x_backward(x: Float, weight: Float, output_grad: Float, options: [ConvOptions<1>]) -> Float;
            lower   compute conv1d_weight_backward(x: Float, weight: Float, output_grad: Float, options: [ConvOptions<1>]) -> Float;
            full    reduce  conv1d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float
                    = "A sum over the batch.";
            lower   compute conv2d(x: Float, weight: Float, bias: FloatOpt, options: [ConvOptions<2>]) -> Float;
            lower   compute conv2d_x_backward(x: Float, weight: Float, output_grad: Float, options: [ConvOptions<2>]) -> Float;
            lower   compute conv2d_weight_backward(x: Float, weight: Float, output_grad: Float, options: [ConvOptions<2>]) -> Float;
            full    reduce  conv2d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float
                    = "A sum over the batch.";
            full    compute deform_conv2d(x: Float, offset: Float, weight: Float, mask: FloatOpt, bias: FloatOpt, options: [DeformConvOptions<2>]) -> Float
                    = "Sampling positions: a low type has no fractions of a pixel from 128 (bf16) or 2048 (f16) on.";
            full    compute deform_conv2d_backward(x: Float, offset: Float, weight: Float, mask: FloatOpt, bias: FloatOpt, output_grad: Float, options: [DeformConvOptions<2>]) -> {DeformConv2dBackward x_grad: Float, offset_grad: Float, weight_grad: Float, mask_grad: FloatOpt, bias_grad: FloatOpt}
                    = "As its forward.";
            lower   compute conv3d(x: Float, weight: Float, bias: FloatOpt, options: [ConvOptions<3>]) -> Float;
            lower   compute conv3d_x_backward(x: Float, weight: Float, output_grad: Float, options: [ConvOptions<3>]) -> Float;
            lower   compute conv3d_weight_backward(x: Float, weight: Float, output_grad: Float, options: [ConvOptions<3>]) -> Float;
            full    reduce  conv3d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float
                    = "A sum over the batch.";
            lower   compute conv_transpose1d(x: Float, weight: Float, bias: FloatOpt, options: [ConvTransposeOptions<1>]) -> Float;
            lower   compute conv_transpose1d_x_backward(weight: Float, output_grad: Float, options: [ConvTransposeOptions<1>]) -> Float;
            lower   compute conv_transpose1d_weight_backward(x: Float, weight: Float, output_grad: Float, options: [ConvTransposeOptions<1>]) -> Float;
            full    reduce  conv_transpose1d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float
                    = "A sum over the batch.";
            lower   compute conv_transpose2d(x: Float, weight: Float, bias: FloatOpt, options: [ConvTransposeOptions<2>]) -> Float;
            lower   compute conv_transpose2d_x_backward(weight: Float, output_grad: Float, options: [ConvTransposeOptions<2>]) -> Float;
            lower   compute conv_transpose2d_weight_backward(x: Float, weight: Float, output_grad: Float, options: [ConvTransposeOptions<2>]) -> Float;
            full    reduce  conv_transpose2d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float
                    = "A sum over the batch.";
            lower   compute conv_transpose3d(x: Float, weight: Float, bias: FloatOpt, options: [ConvTransposeOptions<3>]) -> Float;
            lower   compute conv_transpose3d_x_backward(weight: Float, output_grad: Float, options: [ConvTransposeOptions<3>]) -> Float;
            lower   compute conv_transpose3d_weight_backward(x: Float, weight: Float, output_grad: Float, options: [ConvTransposeOptions<3>]) -> Float;
            full    reduce  conv_transpose3d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float
                    = "A sum over the batch.";
            keep    index   unfold4d(x: Float, kernel_size: [[usize; 2]], options: [UnfoldOptions]) -> Float;
            full    index   avg_pool1d(x: Float, kernel_size: [usize], stride: [usize], padding: [usize], count_include_pad: [bool], ceil_mode: [bool]) -> Float
                    = "A mean: adding up 4096 ones in f16 gives 2048.";
            full    index   avg_pool1d_backward(x: Float, grad: Float, kernel_size: [usize], stride: [usize], padding: [usize], count_include_pad: [bool], ceil_mode: [bool]) -> Float
                    = "As its forward.";
            full    index   avg_pool2d(x: Float, kernel_size: [[usize; 2]], stride: [[usize; 2]], padding: [[usize; 2]], count_include_pad: [bool], ceil_mode: [bool]) -> Float
                    = "A mean: adding up 4096 ones in f16 gives 2048.";
            full    index   avg_pool2d_backward(x: Float, grad: Float, kernel_size: [[usize; 2]], stride: [[usize; 2]], padding: [[usize; 2]], count_include_pad: [bool], ceil_mode: [bool]) -> Float
                    = "As its forward.";
            full    index   adaptive_avg_pool2d(x: Float, output_size: [[usize; 2]]) -> Float
                    = "A mean: adding up 4096 ones in f16 gives 2048.";
            full    index   adaptive_avg_pool2d_backward(x: Float, grad: Float) -> Float
                    = "As its forward.";
            full    index   adaptive_avg_pool1d(x: Float, output_size: [usize]) -> Float
                    = "A mean: adding up 4096 ones in f16 gives 2048.";
            full    index   adaptive_avg_pool1d_backward(x: Float, grad: Float) -> Float
                    = "As its forward.";
            keep    index   max_pool1d(x: Float, kernel_size: [usize], stride: [usize], padding: [usize], dilation: [usize], ceil_mode: [bool]) -> Float;
            promote index   max_pool1d_with_indices_backward(x: Float, kernel_size: [usize], stride: [usize], padding: [usize], dilation: [usize], ceil_mode: [bool], output_grad: Float, indices: Int) -> {MaxPool1dBackward x_grad: Float};
            keep    index   max_pool2d(x: Float, kernel_size: [[usize; 2]], stride: [[usize; 2]], padding: [[usize; 2]], dilation: [[usize; 2]], ceil_mode: [bool]) -> Float;
            promote index   max_pool2d_with_indices_backward(x: Float, kernel_size: [[usize; 2]], stride: [[usize; 2]], padding: [[usize; 2]], dilation: [[usize; 2]], ceil_mode: [bool], output_grad: Float, indices: Int) -> {MaxPool2dBackward x_grad: Float};
            full    index   interpolate(x: Float, output_size: [[usize; 2]], options: [InterpolateOptions]) -> Float
                    = "PyTorch's f32 list: weights of neighbouring pixels round to the same value in a low type.";
            full    index   interpolate_backward(x: Float, grad: Float, output_size: [[usize; 2]], options: [InterpolateOptions]) -> Float
                    = "As its forward.";
            lower   compute attention(query: Float, key: Float, value: Float, mask: BoolOpt, attn_bias: FloatOpt, options: [AttentionModuleOptions]) -> Float
                    = "Over an autodiff backend it is decomposed into this decorator's operations: two lowered matmuls and an f32 softmax.";
            full    norm    layer_norm(tensor: Float, gamma: Float, beta: FloatOpt, epsilon: [f64]) -> Float
                    = "A mean and a variance.";
            full    sort    ctc_loss(log_probs: Float, targets: Int, input_lengths: Int, target_lengths: Int, blank: [usize]) -> Float
                    = "A loss.";
            keep    pass    has_ctc_loss_backward() -> [bool];
            full    sort    ctc_loss_backward(log_probs: Float, targets: Int, input_lengths: Int, target_lengths: Int, grad_loss: Float, blank: [usize]) -> Float
                    = "As its forward.";
        }
    };
}
