//! References of recipes to nodes.

use std::sync::Arc;

use burn_backend::Backend;

use crate::node::{Node, drops};

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
            drops::release_node(node);
        }
    }
}
