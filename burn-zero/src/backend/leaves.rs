//! The parameters that this thread's operations hook, and their uses.
//!
//! A thread is a rank: the optimizer that shards its leaves registers them here whenever it makes
//! new ones.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};

use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend};
use burn_decorator::autodiff::AutodiffTensor;

use super::placed::GradientPart;
use crate::reduce::GradientReducer;

thread_local! {
    /// The depth of the graph, if any leaf is to be hooked.
    static DEPTH: Cell<Option<usize>> = const { Cell::new(None) };
    static LEAVES: RefCell<Leaves> = RefCell::default();
    /// The place of the last tensor on which `float_is_require_grad` was called.
    static ASKED: Cell<Option<Place>> = const { Cell::new(None) };
}

/// A tensor's node in the autodiff graph, and its depth; `None` if it is not part of one.
type Place = (u64, Option<usize>);

/// The leaves to hook, by node.
type Leaves = HashMap<u64, Leaf>;

struct Leaf {
    /// Weak, so that a dropped optimizer is freed with its group.
    reducer: Weak<GradientReducer>,
    parameter: usize,
    /// The uses in graphs that are alive.
    uses: Weak<Use>,
    /// The depth of the graph at the first use: backward runs the deepest operations first.
    depth: usize,
}

impl Leaf {
    fn is_of(&self, reducer: &Arc<GradientReducer>) -> bool {
        Arc::as_ptr(reducer) == self.reducer.as_ptr()
    }

    fn is_used(&self) -> bool {
        self.uses.strong_count() > 0
    }

    /// `None` if its optimizer was dropped.
    fn begin_use(&mut self, depth: usize) -> Option<Arc<Use>> {
        if let Some(by) = self.uses.upgrade() {
            return Some(by);
        }
        if self.reducer.strong_count() == 0 {
            return None;
        }
        let by = Arc::new(Use {
            reducer: self.reducer.clone(),
            parameter: self.parameter,
        });
        self.uses = Arc::downgrade(&by);
        self.depth = depth;
        Some(by)
    }
}

/// The uses of a parameter in a graph. Each hook holds a reference; the last hook to run has the
/// complete gradient.
#[derive(Debug)]
pub struct Use {
    /// Weak, because autodiff frees a graph without a backward pass only in the next one.
    pub(super) reducer: Weak<GradientReducer>,
    pub(super) parameter: usize,
}

/// A parameter of a reducer on this thread.
pub(super) struct OwnLeaf {
    pub(super) parameter: usize,
    pub(super) node: u64,
    /// The depth of its first use in a graph that is alive, if any.
    pub(super) depth: Option<usize>,
}

/// A reducer's parameters on this thread, in their order.
pub(super) fn leaves(reducer: &Arc<GradientReducer>) -> Vec<OwnLeaf> {
    LEAVES.with_borrow(|leaves| {
        let own = leaves.iter().filter(|(_, leaf)| leaf.is_of(reducer));
        let own = own.map(|(&node, leaf)| OwnLeaf {
            parameter: leaf.parameter,
            node,
            depth: leaf.is_used().then_some(leaf.depth),
        });
        let mut own: Vec<_> = own.collect();
        own.sort_unstable_by_key(|leaf| leaf.parameter);
        own
    })
}

/// From now on this thread hooks exactly these leaves of `reducer`, given by their nodes in the
/// order of parameters.
pub(crate) fn attach(reducer: &Arc<GradientReducer>, nodes: &[Option<u64>]) {
    LEAVES.with_borrow_mut(|leaves| {
        leaves.retain(|_, leaf| leaf.reducer.strong_count() > 0 && !leaf.is_of(reducer));
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

/// Whether a reducer that an optimizer steps with, other than `own`, hooks the leaf of this node on
/// this thread.
pub(crate) fn is_taken(node: u64, own: Option<&Arc<GradientReducer>>) -> bool {
    LEAVES.with_borrow(|leaves| {
        let leaf = leaves.get(&node);
        let leaf = leaf.filter(|leaf| !own.is_some_and(|own| leaf.is_of(own)));
        let reducer = leaf.and_then(|leaf| leaf.reducer.upgrade());
        reducer.is_some_and(|reducer| reducer.is_owned())
    })
}

/// The reducers that take gradients during a backward pass of this thread, in order of
/// construction, which is the same on every rank. If there are several, only those whose parameters
/// a graph uses.
pub(super) fn reducers() -> Vec<Arc<GradientReducer>> {
    if DEPTH.get().is_none() {
        return Vec::new();
    }
    LEAVES.with_borrow(|leaves| {
        let mut found = BTreeMap::new();
        for leaf in leaves.values() {
            if let Some(reducer) = leaf.reducer.upgrade() {
                let known = found.entry(reducer.number).or_insert((reducer, false));
                known.1 |= leaf.is_used();
            }
        }
        let only = found.len() == 1;
        let found = found.into_values().filter(|(_, used)| only || *used);
        let reducers = found.map(|(reducer, _)| reducer);
        reducers.filter(|it| it.takes_in_backward()).collect()
    })
}

/// Resets the depth after a graph was consumed.
pub(super) fn forget_depth() {
    if DEPTH.get().is_some() {
        DEPTH.set(Some(0));
    }
}

/// The depth of the graph at an operation; `None` if no leaf is to be hooked.
#[derive(Clone, Copy)]
pub(super) struct Depth(Option<usize>);

impl Depth {
    /// The depth of this thread's last operations.
    #[inline]
    pub(super) fn now() -> Self {
        Self(DEPTH.get())
    }

    /// Raises the depth to that of an operand.
    #[inline]
    pub(super) fn see<B: Backend>(&mut self, operand: &AutodiffTensor<B>) {
        if let Some(depth) = &mut self.0 {
            *depth = self::depth(operand).unwrap_or(0).max(*depth);
        }
    }

    /// Notes the depth of a result.
    #[inline]
    pub(super) fn leave<B: Backend>(self, result: AutodiffTensor<B>) -> AutodiffTensor<B> {
        if self.0.is_some()
            && let Some(depth) = depth(&result)
        {
            DEPTH.set(DEPTH.get().max(Some(depth)));
        }
        result
    }
}

/// The use of an operand, and the depth of the graph, if it is a registered leaf.
#[inline]
pub(super) fn begin_use<B: Backend>(
    operand: &AutodiffTensor<B>,
    at: Depth,
) -> Option<(Arc<Use>, usize)> {
    let depth = at.0.filter(|_| depth(operand) == Some(0))?;
    let by = LEAVES.with_borrow_mut(|leaves| leaves.get_mut(&node(operand))?.begin_use(depth))?;
    Some((by, depth))
}

/// Remembers the tensor that was queried: decorators that hide their tensors forward the query to
/// this backend.
#[inline]
pub(super) fn ask<B: Backend>(tensor: &AutodiffTensor<B>) {
    ASKED.set(Some(place(tensor)));
}

/// Whether the tensor's backend has a [`Sharded`](super::Sharded) in it, which can hook the leaf.
pub(crate) fn is_hooked<B: Backend>(tensor: &FloatTensor<B>) -> bool {
    place_behind::<B>(tensor).is_some()
}

/// The number of a tensor's node in the autodiff graph. Two tensors with one number have the same
/// elements. `None` if the backend does not expose it: it is neither `Autodiff` nor has a
/// [`Sharded`](super::Sharded) in it.
pub(crate) fn leaf_node<B: AutodiffBackend>(tensor: &FloatTensor<B>) -> Option<u64> {
    exposed_place::<B>(tensor).map(|(node, _)| node)
}

/// Makes a leaf of a tensor that was computed from a leaf: its gradient would reach no optimizer.
/// In Burn 0.21 the initial value of a parameter with an `init_mapper` is such a tensor: the weight
/// of a layer with `LinearLayout::Col`. Burn 0.22 makes a leaf of it. A tensor stays as it is if
/// the backend does not expose its node.
pub(crate) fn trained_leaf<B: AutodiffBackend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    match exposed_place::<B>(&tensor) {
        Some((_, Some(1..))) => B::float_set_require_grad(B::float_detach(tensor), true),
        _ => tensor,
    }
}

fn exposed_place<B: AutodiffBackend>(tensor: &FloatTensor<B>) -> Option<Place> {
    place_behind::<B>(tensor).or_else(|| {
        let tensor: &dyn Any = tensor;
        let tensor = tensor.downcast_ref::<AutodiffTensor<B::InnerBackend>>()?;
        Some(place(tensor))
    })
}

/// The depth of a tensor in its graph; `None` if it is not part of one.
pub(super) fn depth<B: Backend>(tensor: &AutodiffTensor<B>) -> Option<usize> {
    (!tensor.node.requirement.is_none()).then_some(tensor.node.order)
}

/// What this rank has of the gradient of a leaf that has not left the graph in backward; `None` for
/// one that no ranks reduce.
pub(super) fn part_of<B: Backend>(leaf: &AutodiffTensor<B>) -> Option<GradientPart> {
    LEAVES.with_borrow(|leaves| {
        let reducer = leaves.get(&node(leaf))?.reducer.upgrade()?;
        (reducer.group().world_size() > 1).then_some(GradientPart::OwnBatch)
    })
}

/// The number of a tensor's node.
pub(super) fn node<B: Backend>(tensor: &AutodiffTensor<B>) -> u64 {
    tensor.node.id.value
}

fn place<B: Backend>(tensor: &AutodiffTensor<B>) -> Place {
    (node(tensor), depth(tensor))
}

/// The place of the tensor inside a tensor: `float_is_require_grad` reaches it through all
/// decorators, and `ask` stores its place.
fn place_behind<B: Backend>(tensor: &FloatTensor<B>) -> Option<Place> {
    ASKED.set(None);
    B::float_is_require_grad(tensor);
    ASKED.take()
}
