//! Scopes and budgets.

use burn::tensor::Tensor;
use burn::tensor::kind::Basic;
use burn_checkpoint::{InstalledBudget, Policy, RematError};

use crate::on;

/// What a scope may return: tensors of any rank and kind, in tuples, `Vec` and `Option`. A tensor
/// that is forgotten is evicted with the rest and computed once more when it is used: only time is
/// lost.
pub trait Outputs {
    /// Asks every tensor for its shape.
    fn touch(&self);
}

impl<const D: usize, K: Basic> Outputs for Tensor<D, K> {
    fn touch(&self) {
        burn_checkpoint::touched();
        let _ = self.shape();
    }
}

impl<T: Outputs> Outputs for Vec<T> {
    fn touch(&self) {
        self.iter().for_each(Outputs::touch);
    }
}

impl<T: Outputs> Outputs for Option<T> {
    fn touch(&self) {
        self.iter().for_each(Outputs::touch);
    }
}

macro_rules! tuples {
    ($($name:ident)*) => {
        impl<$($name: Outputs),*> Outputs for ($($name,)*) {
            #[allow(non_snake_case, reason = "names of types")]
            fn touch(&self) {
                let ($($name,)*) = self;
                $($name.touch();)*
            }
        }
    };
}

tuples!();
tuples!(A B);
tuples!(A B C);
tuples!(A B C D);

/// The engine's trait for what this crate's trait knows.
struct Returned<R>(R);

impl<R: Outputs> burn_checkpoint::Outputs for Returned<R> {
    fn touch(&self) {
        self.0.touch();
    }
}

/// Runs `region` and drops what only backward will need of it; backward computes that once more,
/// bit for bit.
///
/// # Panics
///
/// Without the decorated burn-dispatch: see [`is_on`](crate::is_on).
pub fn checkpoint<R: Outputs>(region: impl FnOnce() -> R) -> R {
    checkpoint_with(Policy::Recompute, region)
}

/// [`checkpoint`] with another [`Policy`]: keep products, move to the host, or by operation.
///
/// # Panics
///
/// As [`checkpoint`].
pub fn checkpoint_with<R: Outputs>(policy: Policy, region: impl FnOnce() -> R) -> R {
    on::ensure();
    burn_checkpoint::checkpoint_with(policy, || Returned(region())).0
}

/// Drops the storage of tensors that can come back: those made in a scope that is open or under a
/// budget.
///
/// # Panics
///
/// As [`checkpoint`].
pub fn evict(tensors: impl Outputs) {
    on::ensure();
    burn_checkpoint::evict(&Returned(tensors));
}

/// A limit in bytes for what each thread keeps for backward; what goes beyond is evicted and
/// computed once more.
#[derive(Clone, Debug)]
pub struct MemoryBudget(burn_checkpoint::MemoryBudget);

impl MemoryBudget {
    /// A limit in bytes.
    pub fn bytes(limit: u64) -> Self {
        Self(burn_checkpoint::MemoryBudget::bytes(limit))
    }

    /// A fraction of what forward and backward take without a budget, measured in the first step;
    /// of what the whole step takes where the optimizer does not run in [`update`](crate::update).
    ///
    /// # Errors
    ///
    /// If `fraction` is not above 0 and at most 1.
    pub fn fraction(fraction: f64) -> Result<Self, RematError> {
        Ok(Self(burn_checkpoint::MemoryBudget::fraction(fraction)?))
    }

    /// Puts the budget in force on all threads until the guard is dropped.
    ///
    /// # Panics
    ///
    /// As [`checkpoint`].
    pub fn install(self) -> InstalledBudget {
        on::ensure();
        self.0.install()
    }
}
