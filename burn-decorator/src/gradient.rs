//! Facts about gradients that backends and parts of an update of different crates share on the
//! thread that trains.
//!
//! Burn's traits have no argument for them: that data from the host is a gradient, which pass of a
//! step runs, and which ranks decide together about gradients.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::carried::{carry, is_carried};
use crate::cell::Scope;

thread_local! {
    static PASS: Cell<Option<Running>> = const { Cell::new(None) };
    static RANKS: RefCell<Vec<Weak<dyn Ranks>>> = const { RefCell::new(Vec::new()) };
    static ON_HOST: RefCell<Vec<Weak<dyn Any + Send + Sync>>> = const { RefCell::new(Vec::new()) };
}

/// Data from the host is a gradient.
struct Loading;

/// Runs `load`, in which tensors from host data are gradients or sums of gradients: a backend that
/// treats gradients differently from activations, such as autocast, then marks them like gradients
/// that backward computes.
///
/// ```
/// use burn_decorator::gradient::{is_loading, load};
///
/// assert!(load(is_loading) && !is_loading());
/// ```
pub fn load<R>(load: impl FnOnce() -> R) -> R {
    carry(Loading, load).0
}

/// Whether the caller is inside [`load`], where tensors from host data are gradients.
#[inline]
pub fn is_loading() -> bool {
    is_carried::<Loading>()
}

/// The pass of a training step that a thread is in, as told by the code that runs it. A forward pass
/// is told by nobody: it is what runs outside of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Autodiff computes gradients.
    Backward,
    /// An optimizer, or a layer around one, reads gradients.
    Update,
}

/// The pass that a thread is in.
#[derive(Clone, Copy)]
enum Running {
    /// The backward pass with this number.
    Backward(u64),
    Update,
}

/// The number of backward passes of the process that were told so far.
static BACKWARD_PASSES: AtomicU64 = AtomicU64::new(0);

/// Runs `backward`, the backward pass of autodiff. Every decorator of a backend with autodiff calls
/// it, so that those below need not guess where a backward pass begins and ends.
///
/// ```
/// use burn_decorator::gradient::{Pass, backward, pass};
///
/// assert_eq!(backward(pass), Some(Pass::Backward));
/// assert_eq!(pass(), None);
/// ```
pub fn backward<R>(backward: impl FnOnce() -> R) -> R {
    // One pass is told by each decorator of its backend.
    let number =
        backward_number().unwrap_or_else(|| BACKWARD_PASSES.fetch_add(1, Ordering::Relaxed));
    let _backward = Scope::enter(&PASS, Some(Running::Backward(number)));
    backward()
}

/// The innermost pass that the caller is inside of: [`backward`] or [`update`].
#[inline]
pub fn pass() -> Option<Pass> {
    PASS.get().map(|running| match running {
        Running::Backward(_) => Pass::Backward,
        Running::Update => Pass::Update,
    })
}

/// The number of the [`backward`] pass that the caller is inside of, by which it is told from the
/// pass before; calls of `backward` inside of another are one pass.
///
/// ```
/// use burn_decorator::gradient::{backward, backward_number};
///
/// let first = backward(|| backward(backward_number));
/// assert!(first.is_some() && first != backward(backward_number));
/// assert_eq!(backward_number(), None);
/// ```
#[inline]
pub fn backward_number() -> Option<u64> {
    match PASS.get()? {
        Running::Backward(number) => Some(number),
        Running::Update => None,
    }
}

/// Runs `update`, the step of an optimizer or of a layer around one, which may read gradients.
/// Whoever reads a gradient of one rank outside of an update, such as a training loop that sums its
/// squares, is warned by a backend whose gradients are sharded over ranks.
///
/// ```
/// use burn_decorator::gradient::{is_updating, update};
///
/// assert!(update(is_updating) && !is_updating());
/// ```
pub fn update<R>(update: impl FnOnce() -> R) -> R {
    let _update = Scope::enter(&PASS, Some(Running::Update));
    update()
}

/// Whether the caller is inside of [`update`].
#[inline]
pub fn is_updating() -> bool {
    pass() == Some(Pass::Update)
}

/// Ranks that train one model. A gradient may be non-finite on some of them only.
pub trait Ranks: Send + Sync {
    /// The union of the ranks' lists, sorted, the same on all of them. A collective: all ranks call
    /// it.
    fn union(&self, names: Vec<String>) -> Vec<String>;
}

/// Makes this thread decide together with `ranks`, until they are dropped or replaced. The training
/// holds the `Arc`, so after the training the thread decides with the ranks from before, or alone.
pub fn decide_with(ranks: Weak<dyn Ranks>) {
    RANKS.with_borrow_mut(|all| {
        all.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&ranks));
        all.push(ranks);
    });
}

/// The names of the parameters with a non-finite gradient on any rank, from those of this rank. A
/// decorator that skips a step or drops a micro-batch because of them calls it once for each
/// decision, even if this rank found none. Costs nothing without ranks.
pub fn non_finite_on_any_rank(own: Vec<String>) -> Vec<String> {
    let ranks = RANKS.with_borrow(|all| all.iter().rev().find_map(Weak::upgrade));
    match ranks {
        Some(ranks) => ranks.union(own),
        None => own,
    }
}

/// Says that gradients of this thread are in host memory while `owner` lives. A decision about them
/// then waits for no device, and one on the device would upload them.
pub fn keep_on_host(owner: Weak<dyn Any + Send + Sync>) {
    ON_HOST.with_borrow_mut(|all| {
        all.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&owner));
        all.push(owner);
    });
}

/// Whether a decision about gradients has to be made on the host: [`non_finite_on_any_rank`] asks
/// other ranks, or the gradients are [there](keep_on_host).
pub fn decide_on_host() -> bool {
    RANKS.with_borrow(|all| all.iter().any(|ranks| ranks.strong_count() > 0))
        || ON_HOST.with_borrow(|all| all.iter().any(|owner| owner.strong_count() > 0))
}
