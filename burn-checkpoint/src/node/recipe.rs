//! Recipes: how a tensor comes back.
//!
//! A recipe refers to its inputs by [`Source`]s, which are not counted as users: a tensor that only
//! recipes refer to has no storage, unless it cannot come back.

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock, Weak};

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, DType, Shape, TensorData};
use burn_decorator::{in_shape, upload};

use crate::host::ahead::{Ahead, UploadPlace, Version};
use crate::host::request::Request;
use crate::node::Node;
use crate::node::content::Content;
use crate::node::gradient::Gradient;
use crate::node::kind::{Kind, SAME_KIND, Value};
use crate::node::source::Source;
use crate::record;
use crate::record::op::OpInfo;
use crate::record::work::Work;

/// How a tensor comes back. One vtable for each operation, so that the code of nodes is compiled
/// once for a backend.
pub(crate) trait Recipe<B: Backend>: Send + Sync {
    /// Visits the managed inputs.
    fn inputs(&self, visit: &mut dyn FnMut(&Source<B>));
    /// Computes the result. Every input is resident.
    fn run(&self) -> Value<B>;
    /// Whether it runs an operation, rather than taking one of the results that another node holds.
    fn computes(&self) -> bool {
        true
    }
    /// Visits the other results of the operation, which come back with this one at no cost.
    fn siblings(&self, _visit: &mut dyn FnMut(Arc<Node<B>>)) {}
    /// The elements, if the recipe uploads them.
    fn data(&self) -> Option<TensorData> {
        None
    }
    /// Its place in the order of uploads, if it is in one.
    fn place(&self) -> Option<UploadPlace> {
        None
    }
    /// The recipe of the same tensor in another type, with what it is a view of, if its elements
    /// can be requested in that type.
    fn in_type(&self, _dtype: DType) -> Option<InType<B>> {
        None
    }
}

/// The recipe of a tensor in another type.
pub(crate) struct InType<B: Backend> {
    /// What the tensor is a view of.
    pub viewed: Option<Source<B>>,
    pub recipe: Arc<dyn Recipe<B>>,
}

/// The recipe of a row of the table: one closure, which visits the inputs if it gets a visitor, and
/// else computes the result.
impl<B, F> Recipe<B> for F
where
    B: Backend,
    F: Fn(Option<&mut dyn FnMut(&Source<B>)>) -> Value<B> + Send + Sync + 'static,
{
    fn inputs(&self, visit: &mut dyn FnMut(&Source<B>)) {
        // With a visitor the closure returns no tensor: there is nothing to drop.
        std::mem::forget(self(Some(visit)));
    }

    fn run(&self) -> Value<B> {
        self(None)
    }
}

/// The recipe of a row of the table.
#[inline]
pub(crate) fn recipe<B, F>(closure: F) -> Arc<dyn Recipe<B>>
where
    B: Backend,
    F: Fn(Option<&mut dyn FnMut(&Source<B>)>) -> Value<B> + Send + Sync + 'static,
{
    Arc::new(closure)
}

/// One of the several results of an operation.
#[derive(Clone)]
pub(crate) struct Part<B: Backend> {
    /// The node that runs the operation and holds all of its results while it is locked.
    pub whole: Source<B>,
    pub index: usize,
    /// The nodes of all results of the operation, once they are made.
    pub siblings: Arc<OnceLock<Vec<Weak<Node<B>>>>>,
}

impl<B: Backend> Recipe<B> for Part<B> {
    fn computes(&self) -> bool {
        false
    }

    fn siblings(&self, visit: &mut dyn FnMut(Arc<Node<B>>)) {
        let nodes = self.siblings.get().into_iter().flatten();
        nodes.filter_map(Weak::upgrade).for_each(visit);
    }

    fn inputs(&self, visit: &mut dyn FnMut(&Source<B>)) {
        visit(&self.whole);
    }

    fn run(&self) -> Value<B> {
        match self.whole.node().state().content.value() {
            Some(Value::Many(parts)) => parts[self.index].clone(),
            _ => unreachable!("an operation with several results was replayed for one of them"),
        }
    }
}

/// The recipe of a tensor whose elements a function returns at each use.
pub(crate) struct Upload<B: Backend> {
    pub request: Request,
    pub device: Device<B>,
}

impl<B: Backend> Recipe<B> for Upload<B> {
    fn inputs(&self, _visit: &mut dyn FnMut(&Source<B>)) {}

    fn run(&self) -> Value<B> {
        let (request, device) = (&self.request, &self.device);
        Value::Float(match &request.place {
            Some(place) => place.deliver::<B>(request, device),
            None => upload::<B>(request.data(), device),
        })
    }

    fn place(&self) -> Option<UploadPlace> {
        self.request.place.clone()
    }

    fn data(&self) -> Option<TensorData> {
        Some(self.request.data())
    }

    fn in_type(&self, dtype: DType) -> Option<InType<B>> {
        let (request, device) = (self.request.in_type(dtype)?, self.device.clone());
        Some(InType {
            viewed: None,
            recipe: Arc::new(Self { request, device }),
        })
    }
}

impl<B: Backend> Version for Upload<B> {
    fn begin(&self, dtype: DType) -> Option<Ahead> {
        Ahead::begin::<B>(&self.request, dtype, &self.device)
    }
}

/// The recipe of a view or cast of a delivered tensor, computed when it is used.
pub(crate) struct OnUse<B: Backend, F> {
    pub op: &'static OpInfo,
    pub input: SavedValue<B>,
    /// The result's shape, if it has the input's elements in their order.
    pub reshaped: Option<Shape>,
    pub run: Arc<F>,
}

impl<B: Backend, F> Recipe<B> for OnUse<B, F>
where
    F: Fn(FloatTensor<B>) -> FloatTensor<B> + Send + Sync + 'static,
{
    fn inputs(&self, visit: &mut dyn FnMut(&Source<B>)) {
        self.input.sources(visit);
    }

    fn run(&self) -> Value<B> {
        Value::Float((self.run)(self.input.load().float()))
    }

    fn data(&self) -> Option<TensorData> {
        let SavedValue::Node(input) = &self.input else {
            return None;
        };
        let shape = self.reshaped.clone()?;
        Some(in_shape(input.node().recipe()?.data()?, shape))
    }

    fn in_type(&self, dtype: DType) -> Option<InType<B>> {
        // The cast of a view equals the view of the cast, and the cast is delivered in this type.
        let viewed = match &self.input {
            SavedValue::Node(viewed) if self.op.work == Work::View => viewed,
            _ => return None,
        };
        let viewed = record::in_type(viewed.node(), dtype)?;
        let recipe = Self {
            op: self.op,
            input: SavedValue::Node(viewed.source()),
            reshaped: self.reshaped.clone(),
            run: self.run.clone(),
        };
        Some(InType {
            viewed: Some(viewed.source()),
            recipe: Arc::new(recipe),
        })
    }
}

/// An operand of any kind as a recipe keeps it.
pub(crate) enum SavedValue<B: Backend> {
    /// Boxed: most operands are nodes, and a recipe is allocated for each operation.
    Leaf(Box<SavedLeaf<B>>),
    Node(Source<B>),
    Many(Vec<Self>),
    Absent,
}

/// An operand that is no node.
pub(crate) struct SavedLeaf<B: Backend> {
    pub value: Value<B>,
    /// Its mark, if it is a gradient: its bytes count as long as the recipe.
    pub _gradient: Option<Gradient>,
}

impl<B: Backend> SavedValue<B> {
    pub fn sources(&self, visit: &mut dyn FnMut(&Source<B>)) {
        match self {
            Self::Node(source) => visit(source),
            Self::Many(xs) => xs.iter().for_each(|x| x.sources(visit)),
            Self::Leaf(_) | Self::Absent => {}
        }
    }

    /// The operand, for a recipe that runs: its node is resident.
    pub fn load(&self) -> Value<B> {
        let source = match self {
            Self::Leaf(leaf) => return leaf.value.clone(),
            Self::Node(source) => source,
            Self::Many(xs) => return Value::Many(xs.iter().map(Self::load).collect()),
            Self::Absent => return Value::Absent,
        };
        let node = source.node();
        let mut state = node.state();
        let is_handed_over = match &state.content {
            Content::Recorded(recorded) => recorded.hand_over && state.locks == 1,
            _ => false,
        };
        let value = if is_handed_over {
            node.take_value(&mut state)
        } else {
            state.content.value().cloned()
        };
        value.expect("a replay brings back inputs before it runs a recipe")
    }
}

/// A tensor operand of a known kind as a recipe keeps it.
pub(crate) struct Saved<B: Backend, K: Kind<B>> {
    pub value: SavedValue<B>,
    kind: PhantomData<K>,
}

impl<B: Backend, K: Kind<B>> Saved<B, K> {
    pub fn new(value: SavedValue<B>) -> Self {
        let kind = PhantomData;
        Self { value, kind }
    }

    pub fn sources(&self, visit: &mut dyn FnMut(&Source<B>)) {
        self.value.sources(visit);
    }

    /// The tensor, for a recipe that runs.
    pub fn load(&self) -> K::Primitive {
        K::unwrap(self.value.load()).expect(SAME_KIND)
    }
}
