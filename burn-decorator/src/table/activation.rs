//! Activation functions: `ActivationOps`, 14 rows.

/// Hands every row of [`ActivationOps`](burn_backend::ops::ActivationOps) to a macro; see [the crate's documentation](crate).
#[macro_export]
macro_rules! activation_ops {
    ($callback:ident) => {
        $callback! {
            ActivationOps
            keep    leaky_relu(tensor: Float, negative_slope: [Scalar]) -> Float;
            keep    relu(tensor: Float) -> Float;
            promote relu_backward(output: Float, grad: Float) -> Float;
            keep    gelu(tensor: Float) -> Float
                    = "Bounded slope; in the type of its input, as in PyTorch.";
            lower   prelu(tensor: Float, alpha: Float) -> Float
                    = "PyTorch's lower list.";
            promote gelu_backward(x: Float, grad: Float) -> Float;
            keep    sigmoid(tensor: Float) -> Float
                    = "Bounded; in the type of its input, as in PyTorch.";
            promote sigmoid_backward(output: Float, grad: Float) -> Float;
            keep    hard_sigmoid(tensor: Float, alpha: [Scalar], beta: [Scalar]) -> Float;
            full    log_sigmoid(tensor: Float) -> Float
                    = "A logarithm; binary cross entropy is made of it.";
            full    softmax(tensor: Float, dim: [usize]) -> Float
                    = "Exponentials and a sum.";
            full    log_softmax(tensor: Float, dim: [usize]) -> Float
                    = "Exponentials, a sum and a logarithm; every classification loss.";
            full    softmin(tensor: Float, dim: [usize]) -> Float
                    = "A softmax of the negated input.";
            full    log_sigmoid_backward(x: Float, grad: Float) -> Float
                    = "As its forward.";
        }
    };
}
