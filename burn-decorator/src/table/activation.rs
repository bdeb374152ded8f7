//! Activation functions: `ActivationOps`.

/// Hands every row of [`ActivationOps`](burn_backend::ops::ActivationOps) to a macro; see [the
/// crate's documentation](crate).
#[macro_export]
macro_rules! activation_ops {
    ($callback:ident) => {
        $crate::rows_of_release! {
            $callback ActivationOps
            keep    cheap   leaky_relu(tensor: Float, negative_slope: [Scalar]) -> Float;
            keep    cheap   relu(tensor: Float) -> Float;
            promote cheap   relu_backward(output: Float, grad: Float) -> Float;
            keep    math    gelu(tensor: Float) -> Float
                    = "Bounded slope; in the type of its input, as in PyTorch.";
            lower   cheap   prelu(tensor: Float, alpha: Float) -> Float
                    = "PyTorch's lower list.";
            promote math    gelu_backward(x: Float, grad: Float) -> Float;
            keep    math    sigmoid(tensor: Float) -> Float
                    = "Bounded; in the type of its input, as in PyTorch.";
            promote math    sigmoid_backward(output: Float, grad: Float) -> Float;
            keep    cheap   hard_sigmoid(tensor: Float, alpha: [Scalar], beta: [Scalar]) -> Float;
            full    math    log_sigmoid(tensor: Float) -> Float
                    = "A logarithm; binary cross entropy is made of it.";
            full    norm    softmax(tensor: Float, dim: [usize]) -> Float
                    = "Exponentials and a sum.";
            full    norm    log_softmax(tensor: Float, dim: [usize]) -> Float
                    = "Exponentials, a sum and a logarithm; every classification loss.";
            full    norm    softmin(tensor: Float, dim: [usize]) -> Float
                    = "A softmax of the negated input.";
            full    math    log_sigmoid_backward(x: Float, grad: Float) -> Float
                    = "As its forward.";
        }
    };
}
