//! LibTorch without [`Mended`](crate) is refused.

use std::any::TypeId;
use std::cell::Cell;

use burn_backend::Backend;

thread_local! {
    /// The last backend that was asked about and is not LibTorch alone.
    static PASSED: Cell<Option<TypeId>> = const { Cell::new(None) };
}

/// Panics if the backend is burn-tch's LibTorch without `burn_decorator::tch::Mended` around it.
/// burn-tch 0.21.0 writes into tensors that share their memory with the operand of a transpose, so
/// that with decorators, which keep more tensors, results are wrong in silence.
///
/// Costs a comparison after the first time.
///
/// ```
/// fn first_use<B: burn_backend::Backend>(device: &B::Device) {
///     burn_decorator::ensure_mended::<B>(device);
/// }
/// ```
///
/// # Panics
///
/// With what to write in its place.
#[inline]
pub fn ensure_mended<B: Backend>(device: &B::Device) {
    let backend = TypeId::of::<B>();
    if PASSED.get() != Some(backend) {
        let name = B::name(device);
        assert!(
            is_mended(&name),
            "{name} computes wrong results under decorators of tensors, because burn-tch 0.21.0 overwrites tensors that share memory: \
             put `burn_decorator::tch::Mended` around `LibTorch`, as in `Autocast<Autodiff<Remat<Mended<LibTorch>>>>` \
             (feature `tch` of burn-decorator, docs/libtorch.md)"
        );
        PASSED.set(Some(backend));
    }
}

/// By the backend's name, for no library names the backend itself.
fn is_mended(name: &str) -> bool {
    !name.contains("libtorch") || name.contains("mended<libtorch")
}

#[cfg(test)]
mod tests {
    use super::is_mended;

    #[test]
    fn only_libtorch_alone_is_not_mended() {
        for name in [
            "flex",
            "fusion<cubecl<cuda>>",
            "remat<mended<libtorch<cpu>>>",
        ] {
            assert!(is_mended(name), "{name}");
        }
        for name in ["libtorch<cpu>", "autodiff<remat<libtorch<cuda>>>"] {
            assert!(!is_mended(name), "{name}");
        }
    }
}
