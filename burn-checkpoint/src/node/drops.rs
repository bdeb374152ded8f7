//! Drops that wait: that of a node while another one is dropped, so that no drop recurses, and
//! those of a panic.
//!
//! burn-fusion never frees a tensor that is dropped while its thread panics. So tensors that an
//! unwinding thread drops are kept here, until the thread drops the next tensor without a panic,
//! the device is synchronised, or the counters are read.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::panicking;

use burn_decorator::cell::{Scope, rare};

/// Whether any value has ever waited for the end of a panic. Read first, at each drop, because a
/// static is read faster than a thread-local.
static EVER: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether a node is being dropped.
    static DROPPING: Cell<bool> = const { Cell::new(false) };
    /// Nodes to drop after the one that is being dropped.
    static NODES: RefCell<Vec<Arc<dyn Any>>> = const { RefCell::new(Vec::new()) };
    /// What to drop after a panic.
    static WAITING: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
    /// Whether anything is in `WAITING`.
    static ANY: Cell<bool> = const { Cell::new(false) };
}

/// Drops what may be the last reference to a node: now, after the node that is being dropped, or
/// after the panic that this thread is in.
pub(crate) fn release_node(node: Arc<dyn Any>) {
    if panicking() {
        return release(node);
    }
    if DROPPING.get() {
        let mut node = Some(node);
        // While a thread ends its queue may be gone: the node is then dropped at once.
        let _ = NODES.try_with(|nodes| nodes.borrow_mut().extend(node.take()));
        return;
    }
    let _dropping = Scope::enter(&DROPPING, true);
    let mut next = Some(node);
    while let Some(node) = next {
        drop(node);
        let queued = NODES.try_with(|nodes| nodes.borrow_mut().pop());
        next = queued.ok().flatten();
    }
}

/// Drops a value now, or after the panic that this thread is in, at the latest when the thread
/// ends.
pub(crate) fn release<T: 'static>(value: T) {
    if !panicking() {
        drop(value);
        return free();
    }
    let value: Box<dyn Any> = Box::new(value);
    // While the thread ends there is no list any more, and the value is dropped here.
    let _ = WAITING.try_with(|waiting| {
        waiting.borrow_mut().push(value);
        EVER.store(true, Ordering::Relaxed);
        ANY.set(true);
    });
}

/// Drops the values that wait on this thread after panics.
#[inline]
pub(crate) fn free() {
    if EVER.load(Ordering::Relaxed) && rare(&ANY) && !panicking() {
        free_all();
    }
}

#[cold]
fn free_all() {
    ANY.set(false);
    // Outside of the borrow: what is dropped may drop more. A thread that ends after a panic is
    // dropping the list itself.
    drop(WAITING.try_with(RefCell::take));
}

/// A tensor of the inner backend, never dropped during a panic.
pub struct Held<T: Send + 'static>(Option<T>);

impl<T: Send> Held<T> {
    /// Holds a tensor.
    #[inline]
    pub fn new(tensor: T) -> Self {
        Self(Some(tensor))
    }

    /// The tensor.
    #[inline]
    pub fn into_inner(mut self) -> T {
        self.0.take().expect("taken only here and in drop")
    }
}

impl<T: Send> Deref for Held<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.0.as_ref().expect("taken only with `self`")
    }
}

impl<T: Send> Drop for Held<T> {
    #[inline]
    fn drop(&mut self) {
        if panicking() {
            release(self.0.take());
        } else {
            free();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::resume_unwind;
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// Sends whether it is dropped in a panic, and frees what waits, as a handle does.
    struct Told(Sender<bool>);

    impl Drop for Told {
        fn drop(&mut self) {
            free();
            self.0.send(panicking()).expect("the test listens");
        }
    }

    /// What a thread that ends by a panic has left is dropped with the thread: the process goes on.
    #[test]
    fn a_thread_may_end_by_its_panic() {
        let (send, told) = channel();
        let unwinds = move || {
            let _held = [0, 1].map(|_| Held::new(Told(send.clone())));
            resume_unwind(Box::new(()));
        };
        assert!(std::thread::spawn(unwinds).join().is_err());
        assert_eq!(told.iter().collect::<Vec<_>>(), [false, false]);
    }
}
