//! A rank's own copy of state that clones share.
//!
//! Handles such as a loss scaler or a counter of updates are shared between their clones: the
//! user's handle, the optimizer, the scheduler and a metric see the same values. Where ranks are
//! threads of one program, each rank needs its own. A strategy copies what a rank trains with
//! inside of [`copy_for_rank`]; there, a clone of a [`Shared`] value has its own value, and all
//! clones of the same value made in one call share the new one, as in Python's `copy.deepcopy`. An
//! optimizer and a scheduler that shared a counter share the copy of it.
//!
//! This works through types with private fields, such as a `Learner`, because it needs no bound but
//! `Clone`.
//!
//! ```
//! use burn_decorator::ranks::{ForRank, Shared, copy_for_rank};
//! use std::sync::atomic::{AtomicU64, Ordering};
//!
//! struct Steps(AtomicU64);
//!
//! impl ForRank for Steps {
//!     fn for_rank(&self) -> Self {
//!         Self(AtomicU64::new(self.0.load(Ordering::Relaxed)))
//!     }
//! }
//!
//! let optimizer = Shared::new(Steps(AtomicU64::new(3)));
//! let scheduler = optimizer.clone();
//! let (other_optimizer, other_scheduler) = copy_for_rank(|| (optimizer.clone(), scheduler.clone()));
//! other_optimizer.0.store(4, Ordering::Relaxed);
//! assert_eq!(other_scheduler.0.load(Ordering::Relaxed), 4);
//! assert_eq!(scheduler.0.load(Ordering::Relaxed), 3);
//! ```

use core::any::Any;
use core::fmt;
use core::ops::Deref;
use std::collections::HashMap;
use std::sync::Arc;

use crate::carried::{carry, is_carried, with};

/// The copies of one [`copy_for_rank`], by the addresses of their originals.
#[derive(Default)]
struct Copies(HashMap<usize, Box<dyn Any>>);

/// State that clones share, and that can be copied for a rank.
pub trait ForRank {
    /// A copy with the same settings and values that shares no mutable state.
    fn for_rank(&self) -> Self;
}

/// Runs `copy`, in which clones of [`Shared`] values have values of their own. Call it on the
/// thread of the rank that gets the copy: a value may belong to a thread, such as a loss scaler.
/// The originals must live until `copy` returns.
pub fn copy_for_rank<R>(copy: impl FnOnce() -> R) -> R {
    carry(Copies::default(), copy).0
}

/// Whether this thread is inside of [`copy_for_rank`].
pub fn is_copying() -> bool {
    is_carried::<Copies>()
}

/// An `Arc` whose clones share its value, except clones made in [`copy_for_rank`].
pub struct Shared<T>(Arc<T>);

impl<T> Shared<T> {
    /// The first of its clones.
    pub fn new(value: T) -> Self {
        Self(Arc::new(value))
    }

    /// The `Arc` inside.
    pub fn as_arc(&self) -> &Arc<T> {
        &self.0
    }
}

impl<T: ForRank + 'static> Clone for Shared<T> {
    fn clone(&self) -> Self {
        if !is_copying() {
            return Self(self.0.clone());
        }
        let address = Arc::as_ptr(&self.0).addr();
        let copied = with(|copies: &mut Copies| {
            let copy = copies.0.get(&address)?;
            copy.downcast_ref::<Arc<T>>().cloned()
        });
        // Not while the copies are read: the value may itself have shared parts.
        Self(copied.flatten().unwrap_or_else(|| {
            let copy = Arc::new(self.0.for_rank());
            with(|copies: &mut Copies| copies.0.insert(address, Box::new(copy.clone())));
            copy
        }))
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Default> Default for Shared<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: fmt::Debug> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A closure in an `Arc`. A clone made in [`copy_for_rank`] has a clone of the closure, whose
/// [`Shared`] captures are then the rank's.
pub struct SharedFn<A, R>(Arc<dyn CloneFn<A, R>>);

trait CloneFn<A, R>: Fn(A) -> R + Send + Sync {
    fn to_arc(&self) -> Arc<dyn CloneFn<A, R>>;
}

impl<A, R, F: Fn(A) -> R + Clone + Send + Sync + 'static> CloneFn<A, R> for F {
    fn to_arc(&self) -> Arc<dyn CloneFn<A, R>> {
        Arc::new(self.clone())
    }
}

impl<A, R> SharedFn<A, R> {
    /// Of one argument.
    pub fn new(function: impl Fn(A) -> R + Clone + Send + Sync + 'static) -> Self {
        Self(Arc::new(function))
    }

    /// Calls the closure.
    pub fn call(&self, argument: A) -> R {
        (self.0)(argument)
    }
}

impl<A, R> Clone for SharedFn<A, R> {
    fn clone(&self) -> Self {
        Self(match is_copying() {
            true => self.0.to_arc(),
            false => self.0.clone(),
        })
    }
}

impl<A, R> fmt::Debug for SharedFn<A, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedFn").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[derive(Debug, Default)]
    struct Count(AtomicU32);

    impl ForRank for Count {
        fn for_rank(&self) -> Self {
            Self(AtomicU32::new(self.get()))
        }
    }

    impl Count {
        fn get(&self) -> u32 {
            self.0.load(Ordering::Relaxed)
        }

        fn add(&self, count: u32) {
            self.0.fetch_add(count, Ordering::Relaxed);
        }
    }

    #[test]
    fn each_copy_has_its_own_value_in_all_its_parts() {
        let count = Shared::new(Count::default());
        let handle = count.clone();
        handle.add(5);
        assert_eq!(count.get(), 5);
        let read = SharedFn::new(move |()| handle.get());

        let copy = || copy_for_rank(|| (count.clone(), read.clone(), count.clone()));
        let (first, second) = (copy(), copy());
        first.0.add(1);
        second.2.add(2);
        for ((of_rank, read, again), expected) in [(first, 6), (second, 7)] {
            assert_eq!((of_rank.get(), again.get()), (expected, expected));
            assert_eq!((read.call(()), read.clone().call(())), (expected, expected));
        }
        assert_eq!((count.get(), read.call(())), (5, 5));
    }

    #[test]
    fn the_scope_ends_with_a_panic_too() {
        let result = std::panic::catch_unwind(|| copy_for_rank(|| panic!("in the copy")));
        assert!(result.is_err() && !is_copying());
    }
}
