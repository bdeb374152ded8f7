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

use std::cell::Cell;

thread_local! {
    /// The answer so far, while somebody asks.
    static ANSWER: Cell<Option<bool>> = const { Cell::new(None) };
}

/// Whether `attention` is one operation of a backend with autodiff, with its softmax in at least
/// f32. `ad_enabled` calls `Backend::ad_enabled` of that backend.
pub fn differentiates_attention(ad_enabled: impl FnOnce() -> bool) -> bool {
    ANSWER.set(Some(false));
    let ad_enabled = ad_enabled();
    ANSWER.take() == Some(true) && ad_enabled
}

/// Says so, if somebody asks.
#[inline]
pub fn say_attention() {
    if ANSWER.get().is_some() {
        ANSWER.set(Some(true));
    }
}
