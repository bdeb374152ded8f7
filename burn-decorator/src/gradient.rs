//! What backends and optimizer decorators of different crates have to know about gradients, on the thread that trains.
//!
//! Two facts, each a value of the thread, because Burn's traits leave no argument to pass them in: that data from the host is a
//! gradient, and which ranks take a decision about gradients together.

use std::cell::{Cell, RefCell};
use std::sync::Weak;

thread_local! {
    static LOADING: Cell<bool> = const { Cell::new(false) };
    static RANKS: RefCell<Vec<Weak<dyn Ranks>>> = const { RefCell::new(Vec::new()) };
}

/// Runs `load`, whose tensors from host data are gradients or sums of them: a backend that treats gradients in another way than
/// activations, such as autocast, marks them as it marks those that backward computes.
///
/// ```
/// use burn_decorator::gradient::{is_loading, load};
///
/// assert!(load(is_loading) && !is_loading());
/// ```
pub fn load<R>(load: impl FnOnce() -> R) -> R {
    /// Restores the value also where `load` panics.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            LOADING.set(self.0);
        }
    }
    let _restore = Restore(LOADING.replace(true));
    load()
}

/// Whether host data that becomes a tensor now is a gradient: inside of [`load`].
#[inline]
pub fn is_loading() -> bool {
    LOADING.get()
}

/// Ranks that train one model, each of which may meet a non-finite gradient that the others do not.
pub trait Ranks: Send + Sync {
    /// The union of the ranks' lists, sorted, the same on all of them. A collective: all ranks call it.
    fn union(&self, names: Vec<String>) -> Vec<String>;
}

/// From now on decisions of this thread are taken together with `ranks`, as long as they live, or until others are named. The
/// training holds the `Arc`: when it is over the thread decides alone again.
pub fn decide_with(ranks: Weak<dyn Ranks>) {
    RANKS.with_borrow_mut(|all| {
        all.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&ranks));
        all.push(ranks);
    });
}

/// The names of the parameters with a non-finite gradient on any rank, from those of this rank. Who skips a step or drops a
/// micro-batch because of them calls it once for the decision, also if this rank found none; without ranks it costs nothing.
pub fn non_finite_on_any_rank(own: Vec<String>) -> Vec<String> {
    let ranks = RANKS.with_borrow(|all| all.iter().rev().find_map(Weak::upgrade));
    match ranks {
        Some(ranks) => ranks.union(own),
        None => own,
    }
}
