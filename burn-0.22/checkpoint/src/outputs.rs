//! Finding the tensors that a scope returns.
//!
//! A scope keeps its results. It finds them by asking each for its shape, a question that reaches
//! the tensor of [`Remat`](crate::Remat) through burn-dispatch and every decorator above it.

use std::cell::Cell;
use std::sync::Arc;

use crate::node::entry::AnyEntry;
use crate::record::context;

/// What a scope may return.
pub trait Outputs {
    /// Asks every tensor for its shape, and says so by [`touched`].
    fn touch(&self);
}

impl Outputs for () {
    fn touch(&self) {}
}

thread_local! {
    static TOUCHED: Cell<usize> = const { Cell::new(0) };
}

/// One more tensor was asked for its shape.
pub fn touched() {
    TOUCHED.set(TOUCHED.get() + 1);
}

/// Runs a function that touches results. Returns the number of tensors among them, and the managed
/// ones.
pub(crate) fn collect(touch: impl FnOnce()) -> (usize, Vec<Arc<dyn AnyEntry>>) {
    TOUCHED.set(0);
    let managed = context::collecting(touch);
    (TOUCHED.get(), managed)
}
