//! The decorator.
#![deny(clippy::missing_trait_methods)]

use core::convert::identity;
use core::marker::PhantomData;

use burn_backend::{AutodiffBackend, Backend, BackendTypes};
use burn_decorator::autodiff::TapeBackend;
use burn_decorator::types::*;
use burn_decorator::{fused, gradient, kind_type, map_operand, map_result};

use crate::{activation, attention, layer_norm, softmax, swiglu};

/// A backend that differentiates layer norm, softmax, log softmax and attention as one operation
/// each, and ReLU and the sigmoid from their results:
/// `Autocast<FusedBackward<Autodiff<Remat<Cuda>>>>`.
///
/// Burn's `Autodiff` composes norms, softmax and attention from elementwise operations, saves
/// intermediate results in f32, and runs none of the kernels that a backend has for the whole
/// operation. Here the backend's kernel runs, and what is saved is an operand or the result:
///
/// | operation | saved | by Burn's `Autodiff` |
/// |---|---|---|
/// | layer norm | its operand | two of its size |
/// | softmax, log softmax | its result | two of its size, and one |
/// | ReLU, sigmoid | the result | operand and result, where a linear layer follows |
/// | attention | query, key and value, with mask and bias | these, and three of `[batch, heads, queries, keys]` |
/// | [`rms_norm`](crate::rms_norm()) | its operand | two of its size |
/// | [`swiglu`](crate::swiglu()) | its two operands | four of their size |
///
/// Attention takes a block of queries at a time, with the keys that they may attend to, so the
/// scores of all pairs never exist; its probabilities are computed again in backward. Beyond Burn's
/// own, several heads of queries may share a head of keys and values: these have a divisor of the
/// query's heads. Results and gradients are those of `Autodiff` up to rounding; in a low type
/// softmax and means inside of attention and of gradients are computed in f32.
///
/// Over `Autodiff<_, BalancedCheckpointing>`, Burn's strategy that computes cheap operations again
/// in backward (Chen et al., arXiv 1604.06174), a GELU before a linear layer keeps its operand alone
/// too. A tensor that such an operation gave cannot be used after the backward pass of its graph:
/// detach it.
///
/// Put it directly outside of `Autodiff`. Its tensors are those of `Autodiff`, so it costs nothing.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::{Distribution, Tensor, activation::softmax};
/// use burn_fused::FusedBackward;
/// use burn_flex::Flex;
///
/// type B = FusedBackward<Autodiff<Flex>>;
///
/// let x = Tensor::<B, 2>::random([4, 8], Distribution::Default, &Default::default()).require_grad();
/// let gradients = softmax(x.clone(), 1).square().sum().backward();
/// assert!(x.grad(&gradients).is_some());
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct FusedBackward<A>(PhantomData<A>);

impl<A: TapeBackend> TapeBackend for FusedBackward<A> {}

impl<A: TapeBackend> BackendTypes for FusedBackward<A> {
    burn_decorator::forward_types!(A, float tensor: A::FloatTensorPrimitive);
}

impl<A: TapeBackend> Backend for FusedBackward<A> {
    burn_decorator::forward_device!(A, asked: fused::say_fused_backward);
    burn_decorator::forward_dtypes!(A);

    fn name(device: &Self::Device) -> String {
        format!("fused-backward<{}>", A::name(device))
    }
}

/// Methods that are those of `A`.
macro_rules! forward {
    ($($method:ident($($arg:ident: $type:ty),*) $(-> $ret:ty)?;)*) => {
        $(fn $method($($arg: $type),*) $(-> $ret)? {
            A::$method($($arg),*)
        })*
    };
}

impl<A: TapeBackend> AutodiffBackend for FusedBackward<A> {
    type InnerBackend = A::InnerBackend;
    type Gradients = A::Gradients;

    burn_decorator::forward_inner!(A);

    fn backward(loss: FloatTensor<Self>) -> Self::Gradients {
        gradient::backward(|| A::backward(loss))
    }

    forward! {
        grad(tensor: &FloatTensor<Self>, gradients: &Self::Gradients) -> Option<FloatTensor<Self::InnerBackend>>;
        grad_remove(tensor: &FloatTensor<Self>, gradients: &mut Self::Gradients) -> Option<FloatTensor<Self::InnerBackend>>;
        grad_replace(tensor: &FloatTensor<Self>, gradients: &mut Self::Gradients, gradient: FloatTensor<Self::InnerBackend>);
        inner(tensor: FloatTensor<Self>) -> FloatTensor<Self::InnerBackend>;
        from_inner(tensor: FloatTensor<Self::InnerBackend>) -> FloatTensor<Self>;
    }
}

/// One method.
macro_rules! method {
    ($module:ident: $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            $module::$op::<A>($($arg),*)
        }
    };
    (relu $($row:tt)*) => { method! { activation: relu $($row)* } };
    (sigmoid $($row:tt)*) => { method! { activation: sigmoid $($row)* } };
    (softmax $($row:tt)*) => { method! { softmax: softmax $($row)* } };
    (log_softmax $($row:tt)*) => { method! { softmax: log_softmax $($row)* } };
    (softmin $($row:tt)*) => { method! { softmax: softmin $($row)* } };
    (layer_norm $($row:tt)*) => { method! { layer_norm: layer_norm $($row)* } };
    (attention $($row:tt)*) => { method! { attention: attention $($row)* } };
    (float_atan2($lhs:ident: $of_lhs:tt, $rhs:ident: $of_rhs:tt) -> $ret:tt) => {
        fn float_atan2($lhs: kind_type!($of_lhs), $rhs: kind_type!($of_rhs)) -> kind_type!($ret) {
            if fused::is_asked_for::<fused::SwiGlu>() {
                return swiglu::recorded::<A>($lhs, $rhs);
            }
            A::float_atan2($lhs, $rhs)
        }
    };
    ($op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        #[inline]
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            map_result!($ret A::$op($(map_operand!($kind $arg, identity)),*), identity)
        }
    };
}

/// One trait.
macro_rules! implement {
    ($trait:ident $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<A: TapeBackend> $trait<Self> for FusedBackward<A> {
            $(method! { $op($($arg: $kind),*) -> $ret })*
        }
    };
}

burn_decorator::every_ops!(implement);
