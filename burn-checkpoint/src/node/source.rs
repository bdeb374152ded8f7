//! References of recipes to nodes.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::thread::panicking;

use burn_backend::Backend;
use burn_decorator::cell::Scope;

use crate::node::entry::AnyEntry;
use crate::node::{Node, unwound};

/// A recipe's reference to a node, which is not counted as a user.
///
/// Dropped without recursion: the last reference to a node at the end of a chain would otherwise
/// drop the whole chain on one stack.
#[derive(Clone)]
pub(crate) struct Source<B: Backend>(Option<Arc<Node<B>>>);

impl<B: Backend> Source<B> {
    pub fn new(node: Arc<Node<B>>) -> Self {
        Self(Some(node))
    }

    #[inline]
    pub fn node(&self) -> &Arc<Node<B>> {
        self.0.as_ref().expect("taken only in drop")
    }

    /// Takes the reference out, for a drop.
    pub fn take(&mut self) -> Option<Self> {
        self.0.take().map(Self::new)
    }
}

impl<B: Backend> Drop for Source<B> {
    #[inline]
    fn drop(&mut self) {
        if let Some(node) = self.0.take()
            && Arc::strong_count(&node) == 1
        {
            drop_later(node);
        }
    }
}

thread_local! {
    static DROPPING: Cell<bool> = const { Cell::new(false) };
    static DROPS: RefCell<Vec<Arc<dyn AnyEntry>>> = const { RefCell::new(Vec::new()) };
}

/// Drops what may be the last reference to a node: now, or after the one that is being dropped.
fn drop_later(node: Arc<dyn AnyEntry>) {
    if panicking() {
        return unwound::release(node);
    }
    if DROPPING.get() {
        let mut node = Some(node);
        // While a thread ends its queue may be gone: the node is then dropped at once.
        let _ = DROPS.try_with(|drops| drops.borrow_mut().extend(node.take()));
        return;
    }
    let _dropping = Scope::enter(&DROPPING, true);
    let mut next = Some(node);
    while let Some(node) = next {
        drop(node);
        let queued = DROPS.try_with(|drops| drops.borrow_mut().pop());
        next = queued.ok().flatten();
    }
}
