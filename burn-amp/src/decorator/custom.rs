//! Operations of a user's own.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};

use super::backend::Autocast;
use super::tensor::AutocastTensor;
use crate::cast::{Cast, Operands};
use crate::policy::{Mode, Policy};

/// Runs an operation of your own on the inner backend as if it were a row of the table: its float
/// operands are cast to the type that `class` says under the policy of this thread, and the result
/// is marked as a gradient if an operand is.
///
/// For implementing a trait of your own, such as that of a fused kernel, for [`Autocast`]. As
/// PyTorch's `torch.amp.custom_fwd(cast_inputs=..)`: `Cast::Lower` for the low type, `Cast::Full`
/// for f32. Under [`F32`](crate::F32) low operands are raised whatever the class. Costs the casts,
/// and nothing where none are needed.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::{DType, Tensor, TensorPrimitive, backend::Backend};
/// use burn_amp::{Autocast, Cast, F32, Policy, autocast, custom_op};
/// use burn_backend::{ops::FloatTensorOps, tensor::FloatTensor};
/// use burn_flex::Flex;
///
/// /// What the model asks of its backend beyond Burn's operations.
/// trait FusedOps: Backend {
///     fn square_sum(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self>;
/// }
/// impl FusedOps for Autodiff<Flex> {
///     fn square_sum(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
///         let sum = Self::float_add(x, y); // your kernel
///         Self::float_mul(sum.clone(), sum)
///     }
/// }
/// impl<B: FusedOps, P: Policy> FusedOps for Autocast<B, P> {
///     fn square_sum(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
///         custom_op::<B, P, 2>(Cast::Lower, [x, y], |[x, y]| B::square_sum(x, y))
///     }
/// }
///
/// type B = Autocast<Autodiff<Flex>>; // bf16
/// let x = Tensor::<B, 1>::from_data([1.0, 2.0], &Default::default()).require_grad();
/// let square_sum = |x: &Tensor<B, 1>| {
///     let x = x.clone().into_primitive().tensor();
///     Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(B::square_sum(x.clone(), x)))
/// };
/// assert_eq!(square_sum(&x).dtype(), DType::BF16);
/// assert_eq!(autocast::<F32, _>(|| square_sum(&x)).dtype(), DType::F32);
/// let gradient = x.grad(&square_sum(&x).sum().backward()).unwrap(); // f32, as every gradient of an f32 leaf
/// gradient.into_data().assert_eq(&[8.0_f32, 16.0].into(), true);
/// ```
pub fn custom_op<B: Backend, P: Policy, const N: usize>(
    class: Cast,
    operands: [FloatTensor<Autocast<B, P>>; N],
    run: impl FnOnce([FloatTensor<B>; N]) -> FloatTensor<B>,
) -> FloatTensor<Autocast<B, P>> {
    let mut seen = Operands::default();
    for operand in &operands {
        seen.see(operand.tensor.dtype().into(), operand.lineage);
    }
    let target = seen.target(class, Mode::current::<P>().arithmetic);
    let result = run(operands.map(|operand| operand.brought::<B>(target)));
    AutocastTensor::result(result, seen.lineage())
}
