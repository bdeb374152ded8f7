//! Whether this program's burn-dispatch is the decorated one.

use std::marker::PhantomData;

use burn_amp::Autocast;

struct Probe<T>(PhantomData<T>);

/// The answer for any type; [`Probe`]'s own, which comes first, is for the decorators.
#[allow(dead_code, reason = "a build has one of the two answers")]
trait Stock {
    const DECORATED: bool = false;
}

impl<T> Stock for Probe<T> {}

#[allow(dead_code, reason = "a build has one of the two answers")]
impl<B> Probe<Autocast<B>> {
    const DECORATED: bool = true;
}

/// Whether the program was built with the decorated burn-dispatch: known when it is compiled.
///
/// It was not if the workspace has no `[patch.crates-io]` for burn-dispatch, if that stands in the
/// manifest of a member, where cargo ignores it, or if cargo dropped it with the warning "patch
/// `burn-dispatch` was not used in the crate graph", which it does when the versions differ.
pub const fn is_on() -> bool {
    Probe::<burn_dispatch::Dispatch>::DECORATED
}

/// Panics, with what to do, in a program without the decorators.
#[track_caller]
pub(crate) fn ensure() {
    assert!(
        is_on(),
        "this program runs on Burn's own burn-dispatch: nothing would be recomputed or cast. Put `[patch.crates-io] burn-dispatch = {{ path = \
         .. }}` into the Cargo.toml at the root of the workspace, not into that of a member, and look for cargo's warning \"patch \
         `burn-dispatch` was not used in the crate graph\": the version must be the one in Cargo.lock, 0.22.1; `cargo update -p burn-dispatch` \
         takes the patch up"
    );
}
