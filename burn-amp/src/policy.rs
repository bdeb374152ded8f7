//! Which low type autocast uses, and where: by the type, by the thread, by the process.

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt::Debug;

use burn_backend::FloatDType;
use burn_decorator::cell::Scope;
use parking_lot::RwLock;

use crate::cast::{Arithmetic, Cast};

/// The classes that an [`AmpConfig`](crate::AmpConfig) replaces, by operation.
pub(crate) type Overrides = HashMap<&'static str, Cast>;

/// What autocast does at this moment: the value behind a [`Policy`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mode {
    pub(crate) arithmetic: Arithmetic,
    pub(crate) overrides: Option<&'static Overrides>,
}

impl Mode {
    /// No casts but the promotion of operands of different types.
    pub const OFF: Self = Self::of(Arithmetic::AsGiven);

    /// Low operands are raised to f32 by every operation that computes with them, and nothing is
    /// lowered.
    pub const F32: Self = Self::of(Arithmetic::F32);

    /// Operations of class [`Cast::Lower`] run in bf16.
    pub const BF16: Self = Self::of(Arithmetic::Low(FloatDType::BF16));

    /// Operations of class [`Cast::Lower`] run in f16.
    pub const F16: Self = Self::of(Arithmetic::Low(FloatDType::F16));

    const fn of(arithmetic: Arithmetic) -> Self {
        Self {
            arithmetic,
            overrides: None,
        }
    }

    /// The mode of policy `P` here: that of the [`autocast`] scope that this thread is in, else
    /// that of `P` itself. As `torch.is_autocast_enabled` and `torch.get_autocast_dtype`.
    #[inline]
    pub fn current<P: Policy>() -> Self {
        SCOPE.get().unwrap_or_else(P::mode)
    }

    /// The low type, `None` where nothing is lowered.
    pub fn low(self) -> Option<FloatDType> {
        match self.arithmetic {
            Arithmetic::Low(low) => Some(low),
            Arithmetic::AsGiven | Arithmetic::F32 => None,
        }
    }

    /// The class of an operation whose row says `row`.
    #[inline]
    pub(crate) fn class(self, op: &str, row: Cast) -> Cast {
        match self.overrides {
            None => row,
            Some(overrides) => overrides.get(op).copied().unwrap_or(row),
        }
    }
}

/// A mixed-precision policy, the second parameter of [`Autocast`](crate::Autocast).
pub trait Policy: Clone + Copy + Debug + Default + Send + Sync + 'static {
    /// The mode of a thread that is in no [`autocast`] scope.
    fn mode() -> Mode;

    /// The policy's name, as it appears in the backend's name.
    fn name() -> &'static str;
}

/// Matmuls and convolutions in bf16: f32's range, so no loss scaling is needed. The default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bf16;

/// Matmuls and convolutions in f16: more digits than bf16 and less range, so train it with a
/// [`GradScaler`](crate::GradScaler).
#[derive(Clone, Copy, Debug, Default)]
pub struct F16;

/// f32 arithmetic for a part of a model, as the scope `autocast::<F32, _>(|| ..)`: every operation
/// that computes raises its f16 and bf16 operands to f32 first, and nothing is lowered. [`Off`]
/// leaves low operands low.
#[derive(Clone, Copy, Debug, Default)]
pub struct F32;

/// No autocast: bit for bit the inner backend. As a scope it leaves low operands low, as
/// `torch.autocast(enabled=False)` does; [`F32`] raises them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Off;

/// What [`AmpConfig::install`](crate::AmpConfig::install) set for the process, [`Off`] until then.
///
/// Reaches every thread, also the Learner's workers and metric threads.
#[derive(Clone, Copy, Debug, Default)]
pub struct Configured;

macro_rules! policies {
    ($($policy:ident $name:literal $mode:expr;)*) => {
        $(impl Policy for $policy {
            #[inline]
            fn mode() -> Mode {
                $mode
            }

            fn name() -> &'static str {
                $name
            }
        })*
    };
}

policies! {
    Bf16 "bf16" Mode::BF16;
    F16 "f16" Mode::F16;
    F32 "f32" Mode::F32;
    Off "off" Mode::OFF;
    Configured "configured" *CONFIGURED.read();
}

static CONFIGURED: RwLock<Mode> = RwLock::new(Mode::OFF);

/// Sets what [`Configured`] means from now on.
pub(crate) fn configure(mode: Mode) {
    *CONFIGURED.write() = mode;
}

thread_local! {
    static SCOPE: Cell<Option<Mode>> = const { Cell::new(None) };
}

/// Runs `f` with policy `P` on this thread, whatever the backend's own policy is.
///
/// Scopes nest; the previous state comes back when `f` returns or panics. Other threads are not
/// affected: for those use the backend's type or [`Configured`]. As
/// `torch.autocast(dtype=..., enabled=...)`. Costs a few nanoseconds.
///
/// ```
/// use burn::tensor::{DType, Tensor};
/// use burn_amp::{Autocast, F16, F32, Off, autocast};
/// use burn_flex::Flex;
///
/// type B = Autocast<Flex>; // bf16
/// let x = Tensor::<B, 2>::ones([2, 2], &Default::default());
/// assert_eq!(x.clone().matmul(x.clone()).dtype(), DType::BF16);
/// autocast::<F16, _>(|| {
///     assert_eq!(x.clone().matmul(x.clone()).dtype(), DType::F16);
///     autocast::<Off, _>(|| assert_eq!(x.clone().matmul(x.clone()).dtype(), DType::F32));
///     assert_eq!(x.clone().matmul(x.clone()).dtype(), DType::F16);
/// });
/// // A part in f32, whatever arrives there: `Off` would multiply bf16 with bf16 in bf16.
/// let low = x.clone().matmul(x);
/// autocast::<F32, _>(|| assert_eq!((low.clone() * low.clone()).dtype(), DType::F32));
/// autocast::<Off, _>(|| assert_eq!((low.clone() * low.clone()).dtype(), DType::BF16));
/// ```
pub fn autocast<P: Policy, R>(f: impl FnOnce() -> R) -> R {
    let _scope = Scope::enter(&SCOPE, Some(P::mode()));
    f()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_nest_and_are_restored_on_panic() {
        assert_eq!(Mode::current::<Bf16>(), Mode::BF16);
        autocast::<F16, _>(|| {
            assert_eq!(Mode::current::<Bf16>(), Mode::F16);
            let panic = std::panic::catch_unwind(|| autocast::<Off, ()>(|| panic!("inside")));
            assert!(panic.is_err());
            assert_eq!(Mode::current::<Bf16>(), Mode::F16);
        });
        assert_eq!(Mode::current::<Bf16>(), Mode::BF16);
    }

    #[test]
    fn a_scope_is_this_threads_alone() {
        autocast::<F16, _>(|| {
            let other = std::thread::spawn(Mode::current::<Bf16>).join();
            assert_eq!(other.ok(), Some(Mode::BF16));
        });
    }
}
