//! Whether attention is one operation on autodiff's tape.
//!
//! Burn's autodiff composes attention from operations of its inner backend, which a decorator above
//! autodiff cannot reach: autocast would lose its f32 softmax. So a decorator above autodiff
//! composes attention itself, unless a decorator between them says that it differentiates attention
//! as one operation, in `Backend::ad_enabled`, which every decorator passes on to the backend
//! inside of it.
//!
//! ```
//! use burn_decorator::fused;
//!
//! assert!(fused::differentiates_attention(|| {
//!     fused::say_attention(); // a decorator's `ad_enabled`
//!     true
//! }));
//! assert!(!fused::differentiates_attention(|| true));
//! ```

use crate::carried::{carry, with};

/// The answer so far.
struct DifferentiatesAttention(bool);

/// Whether `attention` is one operation of a backend with autodiff, with its softmax in at least
/// f32. `ad_enabled` calls `Backend::ad_enabled` of that backend.
pub fn differentiates_attention(ad_enabled: impl FnOnce() -> bool) -> bool {
    let (ad_enabled, answer) = carry(DifferentiatesAttention(false), ad_enabled);
    answer.is_some_and(|answer| answer.0) && ad_enabled
}

/// Says so, if somebody asks.
#[inline]
pub fn say_attention() {
    with(|answer: &mut DifferentiatesAttention| answer.0 = true);
}
