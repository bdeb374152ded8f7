//! The parameters that this thread's operations look out for.
//!
//! A thread is a rank: its leaves are noted here by the optimizer that shards them, whenever it makes new ones.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use burn_backend::tensor::FloatTensor;

use super::tape::Tape;
use crate::host::HostRead;
use crate::reduce::GradientReducer;

thread_local! {
    /// How deep the graph is, if there is anything to look out for.
    static DEPTH: Cell<Option<usize>> = const { Cell::new(None) };
    static LEAVES: RefCell<Leaves> = RefCell::default();
    /// The node of the last leaf that was asked whether it requires gradients.
    static ASKED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// By node.
type Leaves = HashMap<u64, Leaf>;

struct Leaf {
    /// Weak: an optimizer that is gone is forgotten, with its group.
    reducer: Weak<GradientReducer>,
    parameter: usize,
    /// The uses in graphs that are alive.
    uses: Weak<Use>,
    /// How deep the graph was at the first of them: backward comes to the deepest operations first.
    depth: usize,
}

/// An optimizer's exchange of gradients, on the thread of its rank.
#[derive(Clone, Debug)]
pub struct Attachment {
    reducer: Arc<GradientReducer>,
}

impl Attachment {
    pub(crate) fn reducer(&self) -> &Arc<GradientReducer> {
        &self.reducer
    }

    /// Whether the pass that is under way takes this parameter's gradient out of the graph.
    pub(super) fn takes(&self, parameter: usize) -> bool {
        self.reducer.takes(parameter)
    }

    /// Gives a complete gradient away; `None` if there is none.
    pub(super) fn submit(&self, parameter: usize, gradient: Option<HostRead>) {
        self.reducer.submit(parameter, gradient);
    }

    /// The parameters that the pass still waits for, with their nodes.
    pub(super) fn outstanding(&self) -> Vec<(usize, u64)> {
        let leaves = self.leaves().into_iter();
        leaves
            .filter(|(parameter, _)| self.takes(*parameter))
            .collect()
    }

    /// This thread's parameters, with their nodes.
    pub(super) fn leaves(&self) -> Vec<(usize, u64)> {
        LEAVES.with_borrow(|leaves| {
            let own = leaves.iter().filter(|(_, leaf)| self.owns(leaf));
            let mut own: Vec<_> = own.map(|(node, leaf)| (leaf.parameter, *node)).collect();
            own.sort_unstable();
            own
        })
    }

    /// Submits that there is no gradient for parameters that no graph uses: what follows them need not wait.
    pub(super) fn submit_unused(&self) {
        let unused: Vec<_> = LEAVES.with_borrow(|leaves| {
            let own = leaves.values().filter(|leaf| self.owns(leaf));
            own.filter(|leaf| leaf.uses.strong_count() == 0)
                .map(|leaf| leaf.parameter)
                .collect()
        });
        for parameter in unused
            .into_iter()
            .filter(|&parameter| self.takes(parameter))
        {
            self.submit(parameter, None);
        }
    }

    /// The parameters that a graph uses, in the order in which backward completes their gradients.
    pub(super) fn arrival_order(&self) -> Vec<usize> {
        LEAVES.with_borrow(|leaves| {
            let used = leaves
                .values()
                .filter(|leaf| self.owns(leaf) && leaf.uses.strong_count() > 0);
            let mut order: Vec<_> = used.map(|leaf| (leaf.depth, leaf.parameter)).collect();
            order.sort_unstable_by(|a, b| b.cmp(a));
            order.into_iter().map(|(_, parameter)| parameter).collect()
        })
    }

    fn owns(&self, leaf: &Leaf) -> bool {
        Arc::as_ptr(&self.reducer) == leaf.reducer.as_ptr()
    }
}

/// The uses of a parameter in a graph: its hooks hold it, the last one to run ends it.
#[derive(Debug)]
pub struct Use {
    pub(super) attachment: Attachment,
    pub(super) parameter: usize,
}

/// From now on this thread looks out for these leaves of `exchange`, given by their nodes in the order of parameters, and
/// for no others of it.
pub(crate) fn attach(reducer: &Arc<GradientReducer>, nodes: &[Option<u64>]) {
    let attachment = Attachment {
        reducer: reducer.clone(),
    };
    LEAVES.with_borrow_mut(|leaves| {
        leaves.retain(|_, leaf| leaf.reducer.strong_count() > 0 && !attachment.owns(leaf));
        for (parameter, node) in nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            let leaf = Leaf {
                reducer: Arc::downgrade(reducer),
                parameter,
                uses: Weak::new(),
                depth: 0,
            };
            leaves.insert(*node, leaf);
        }
        DEPTH.set((!leaves.is_empty()).then_some(0));
    });
}

/// The exchanges that take part in a backward pass of this thread, in the order in which they were made: the same on every
/// rank. If there are several, those whose parameters a graph uses.
pub(super) fn attachments() -> Vec<Attachment> {
    if DEPTH.get().is_none() {
        return Vec::new();
    }
    LEAVES.with_borrow(|leaves| {
        let mut found: Vec<(Attachment, bool)> = Vec::new();
        for leaf in leaves.values() {
            let used = leaf.uses.strong_count() > 0;
            if let Some((_, any)) = found.iter_mut().find(|(other, _)| other.owns(leaf)) {
                *any |= used;
            } else if let Some(reducer) = leaf.reducer.upgrade() {
                found.push((Attachment { reducer }, used));
            }
        }
        let only = found.len() == 1;
        found.retain(|(_, used)| only || *used);
        found.sort_by_key(|(attachment, _)| attachment.reducer.number());
        found
            .into_iter()
            .map(|(attachment, _)| attachment)
            .collect()
    })
}

/// A graph was consumed: the next one starts anew.
pub(super) fn forget_depth() {
    if DEPTH.get().is_some() {
        DEPTH.set(Some(0));
    }
}

/// How deep the graph is that an operation adds to; nothing where there is nothing to look out for.
#[derive(Clone, Copy)]
pub(super) struct Depth(Option<usize>);

impl Depth {
    /// As deep as the last operations of this thread.
    #[inline]
    pub(super) fn now() -> Self {
        Self(DEPTH.get())
    }

    /// At least as deep as an operand.
    #[inline]
    pub(super) fn see<A: Tape>(&mut self, operand: &FloatTensor<A>) {
        if let Some(depth) = &mut self.0 {
            *depth = A::depth(operand).unwrap_or(0).max(*depth);
        }
    }

    /// Notes a result.
    #[inline]
    pub(super) fn leave<A: Tape>(self, result: FloatTensor<A>) -> FloatTensor<A> {
        if self.0.is_some()
            && let Some(depth) = A::depth(&result)
        {
            DEPTH.set(DEPTH.get().max(Some(depth)));
        }
        result
    }
}

/// An operand on its way into an operation that is recorded.
#[inline]
pub(super) fn enter<A: Tape>(operand: FloatTensor<A>, depth: Depth) -> FloatTensor<A> {
    match depth.0 {
        Some(depth) if A::depth(&operand) == Some(0) => hook::<A>(operand, depth),
        _ => operand,
    }
}

/// A leaf that requires gradients, hooked if it is one to look out for.
fn hook<A: Tape>(leaf: FloatTensor<A>, depth: usize) -> FloatTensor<A> {
    let by = LEAVES.with_borrow_mut(|leaves| {
        let leaf = leaves.get_mut(&A::node(&leaf))?;
        if let Some(by) = leaf.uses.upgrade() {
            return Some(by);
        }
        let by = Arc::new(Use {
            attachment: Attachment {
                reducer: leaf.reducer.upgrade()?,
            },
            parameter: leaf.parameter,
        });
        leaf.uses = Arc::downgrade(&by);
        leaf.depth = depth;
        Some(by)
    });
    match by {
        // Deeper than the end of the tape, which is an operation on a leaf.
        Some(by) => A::hook(leaf, depth.max(1), by),
        None => leaf,
    }
}

/// Remembers who was asked: decorators that hide their tensors pass the question on.
#[inline]
pub(super) fn ask<A: Tape>(tensor: &FloatTensor<A>) {
    ASKED.set(Some(A::node(tensor)));
}

/// The node of the leaf behind a tensor, which `ask` asks whether it requires gradients; `None` if its backend is not
/// a [`Sharded`](super::Sharded) one.
pub(crate) fn node_behind(ask: impl FnOnce()) -> Option<u64> {
    ASKED.set(None);
    ask();
    ASKED.take()
}
