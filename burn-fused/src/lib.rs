//! Operations with a backward of their own, for any backend of Burn: norms, softmax, attention and
//! SwiGLU that keep less on autodiff's tape, and the loss of a large vocabulary without its logits.
//!
//! ```
//! use burn::backend::Autodiff;
//! use burn::tensor::{Distribution, Tensor, activation::softmax};
//! use burn_flex::Flex;
//! use burn_fused::FusedBackward;
//!
//! type B = FusedBackward<Autodiff<Flex>>; // was: Autodiff<Flex>
//!
//! let x = Tensor::<B, 2>::random([4, 8], Distribution::Default, &Default::default()).require_grad();
//! let gradients = softmax(x.clone(), 1).square().sum().backward(); // keeps softmax's result alone
//! assert!(x.grad(&gradients).is_some());
//! ```
//!
//! | where | what |
//! |---|---|
//! | `backend` | [`FusedBackward`], made from burn-decorator's table of operations |
//! | `layer_norm`, `softmax`, `attention` | these operations of Burn with their gradients |
//! | `activation` | ReLU and the sigmoid |
//! | `from_result` | operations whose gradient follows from their result |
//! | `rms_norm`, `swiglu` | [`rms_norm()`], [`swiglu()`] and [`silu()`], which Burn composes |
//! | `linear_cross_entropy` | [`linear_cross_entropy()`] and its module [`LinearCrossEntropyLoss`] |
//! | `rows`, `precision` | sums over rows; casts between the operands' type and f32 |

mod activation;
mod attention;
mod backend;
mod from_result;
mod layer_norm;
mod linear_cross_entropy;
mod precision;
mod rms_norm;
mod rows;
mod softmax;
mod swiglu;

pub use backend::FusedBackward;
pub use linear_cross_entropy::{
    Chunk, LinearCrossEntropy, LinearCrossEntropyLoss, LinearCrossEntropyLossConfig, OutOfRange,
    TargetOutOfRange, Targets, linear_cross_entropy,
};
pub use rms_norm::rms_norm;
pub use swiglu::{silu, swiglu};
