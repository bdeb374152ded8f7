//! Operations that are one on autodiff's tape, and those of them that Burn's traits lack.
//!
//! Burn's autodiff composes attention and norms from operations of its inner backend, which a
//! decorator above autodiff cannot reach: autocast would lose attention's f32 softmax. So whoever
//! is above autodiff composes them itself, unless a decorator between them says, in
//! `Backend::ad_enabled`, that it differentiates each as one operation. Every decorator passes that
//! call on to the backend inside of it.
//!
//! ```
//! use burn_decorator::fused;
//!
//! assert!(fused::has_fused_backward(|| {
//!     fused::say_fused_backward(); // a decorator's `ad_enabled`
//!     true
//! }));
//! assert!(!fused::has_fused_backward(|| true));
//! ```
//!
//! An operation that Burn's traits lack is carried by the call of one that has the same operands,
//! so that decorators in between treat its operands and its result as those of that one. It is one
//! that no decorator calls by itself, or computes again from its operands: `float_mul` is no such
//! one, because autocast keeps a product's factors for operations in f32.

use crate::carried::{carry, take, with};

/// The answer so far.
struct HasFusedBackward(bool);

/// Whether attention, softmax and norms are one operation each of a backend with autodiff, with
/// sums in at least f32. `ad_enabled` calls `Backend::ad_enabled` of that backend.
pub fn has_fused_backward(ad_enabled: impl FnOnce() -> bool) -> bool {
    let (ad_enabled, answer) = carry(HasFusedBackward(false), ad_enabled);
    answer.is_some_and(|answer| answer.0) && ad_enabled
}

/// Says so, if somebody asks.
#[inline]
pub fn say_fused_backward() {
    with(|answer: &mut HasFusedBackward| answer.0 = true);
}

/// `tensor / sqrt(mean(tensor²) + epsilon) * gamma`, carried by `layer_norm` without beta.
#[derive(Debug)]
pub struct RmsNorm;

/// `silu(lhs) * rhs`, carried by `float_atan2` of operands of the same shape: promoted as a product
/// is.
#[derive(Debug)]
pub struct SwiGlu;

/// The result of `call`, if the operation `carried` was computed in place of the one that it calls;
/// `None` where nobody knows it, and the result is of the called one.
///
/// ```
/// use burn_decorator::fused::{self, SwiGlu};
///
/// let known = fused::compute(SwiGlu, || fused::is_asked_for::<SwiGlu>()); // a decorator's `float_atan2`
/// assert_eq!(known, Some(true));
/// assert_eq!(fused::compute(SwiGlu, || 3), None);
/// assert!(!fused::is_asked_for::<SwiGlu>()); // an angle
/// ```
pub fn compute<O: 'static, R>(carried: O, call: impl FnOnce() -> R) -> Option<R> {
    let (result, left) = carry(carried, call);
    left.is_none().then_some(result)
}

/// Whether the call is for the operation `O`, which whoever asks computes. Costs the read of one
/// cell where it is not.
#[inline]
pub fn is_asked_for<O: 'static>() -> bool {
    take::<O>().is_some()
}
