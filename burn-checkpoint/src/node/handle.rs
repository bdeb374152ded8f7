//! The tensor of [`Remat`](crate::Remat).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::panicking;

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, Shape, TensorData, TensorMetadata};

use crate::host::request::Named;
use crate::node::Node;
use crate::node::content::{Home, State};
use crate::node::drops::{self, Held};
use crate::node::gradient::Gradient;
use crate::node::kind::{Kind, SAME_KIND};
use crate::node::recipe::{Saved, SavedLeaf, SavedValue};
use crate::node::replay;
use crate::node::source::Source;
use crate::record;
use crate::record::Call;
use crate::record::context;
use crate::record::step::{Lineage, Read, Step};
use crate::scope::units::Unit;

/// A tensor of [`Remat`](crate::Remat): the inner backend's, or a managed one, whose storage may be
/// evicted and brought back.
pub enum Handle<B: Backend, K: Kind<B>> {
    /// The inner backend's tensor, with its mark if it is a gradient or a constant of backward
    /// under a budget.
    Resident(Held<K::Primitive>, Option<Gradient>),
    /// A tensor that was made in a scope, or under a budget if it has no mark.
    Managed(Managed<B>),
}

/// A user's reference to a managed tensor.
///
/// When the last reference is dropped, the storage is dropped at once if the tensor can come back;
/// the recipe stays for other recipes that refer to the node.
pub struct Managed<B: Backend>(Source<B>);

impl<B: Backend> Managed<B> {
    /// A further reference.
    pub(crate) fn new(source: Source<B>) -> Self {
        source.node().users.fetch_add(1, Ordering::Relaxed);
        Self(source)
    }

    /// The reference that a node was made with: it is counted already.
    #[inline]
    pub(crate) fn first(source: Source<B>) -> Self {
        Self(source)
    }

    #[inline]
    pub(crate) fn node(&self) -> &Arc<Node<B>> {
        self.0.node()
    }

    pub(crate) fn source(&self) -> Source<B> {
        self.0.clone()
    }

    /// A clone of the storage, or the storage itself: with `consumes` if this is the last
    /// reference, and if the tensor is delivered and neither an operation that is being recorded
    /// nor a replay has locked it.
    fn load<K: Kind<B>>(&self, consumes: bool) -> K::Primitive {
        let node = self.node();
        loop {
            let mut state = node.state();
            if let Home::Scope { region, operation } = &state.home
                && let Some(unit) = &region.unit
            {
                unit.note_use(*operation);
            }
            let goes = if node.meta.is_delivered {
                state.locks == 0
            } else {
                consumes && state.content.is_resident() && self.is_last(&state)
            };
            if let Some(value) = state.content.value()
                && !goes
            {
                return K::peek(value).expect(SAME_KIND).clone();
            }
            if let Some(value) = node.take_value(&mut state) {
                return K::unwrap(value).expect(SAME_KIND);
            }
            drop(state);
            replay::bring_back([node.clone()]);
        }
    }

    /// Whether nothing else needs the storage. A buffer's only owner may write into it, so the last
    /// user gets the storage itself.
    fn is_last(&self, state: &State<B>) -> bool {
        let node = self.node();
        let recipes = Arc::strong_count(node) - 1;
        let wanted = state.content.is_kept() && recipes > 0;
        node.users() == 1 && state.locks == 0 && !wanted && !node.outlasts_handles(state, recipes)
    }
}

impl<B: Backend> Clone for Managed<B> {
    fn clone(&self) -> Self {
        Self::new(self.source())
    }
}

impl<B: Backend> Drop for Managed<B> {
    fn drop(&mut self) {
        if panicking() {
            if let Some(source) = self.0.take() {
                drops::release(Self(source));
            }
            return;
        }
        drops::free();
        let node = self.node();
        // With the last reference of all the node itself is dropped, and its storage with it.
        if node.users.fetch_sub(1, Ordering::AcqRel) != 1 || Arc::strong_count(node) == 1 {
            return;
        }
        let mut state = node.state();
        if node.outlasts_handles(&state, Arc::strong_count(node) - 1) {
            return;
        }
        let vacated = node.vacate(&mut state);
        drop(state);
        node.release(vacated);
    }
}

impl<B: Backend, K: Kind<B>> Handle<B, K> {
    /// A handle of the inner backend's tensor.
    #[inline]
    pub fn resident(tensor: K::Primitive) -> Self {
        Self::Resident(Held::new(tensor), None)
    }

    /// The inner backend's tensor. Brings it back if it is not resident.
    ///
    /// # Panics
    ///
    /// If it cannot be brought back: an operation of the inner backend, an upload or a delivery
    /// failed, which the next use tries again; or its copy could not be read, and then no use
    /// succeeds.
    #[inline]
    pub fn into_inner(self) -> K::Primitive {
        match self {
            Self::Resident(tensor, _) => tensor.into_inner(),
            Self::Managed(managed) => managed.load::<K>(true),
        }
    }

    /// A clone of the inner backend's tensor. Brings it back if it is not resident.
    ///
    /// # Panics
    ///
    /// As [`Self::into_inner`].
    pub fn to_inner(&self) -> K::Primitive {
        match self {
            Self::Resident(tensor, _) => K::Primitive::clone(tensor),
            Self::Managed(managed) => managed.load::<K>(false),
        }
    }

    /// Where the tensor is, or comes back to.
    pub fn device(&self) -> Device<B> {
        match self {
            Self::Resident(tensor, _) => K::device(tensor),
            Self::Managed(managed) => managed.node().meta.device.clone(),
        }
    }

    /// The node of a managed tensor.
    fn node(&self) -> Option<&Arc<Node<B>>> {
        match self {
            Self::Resident(..) => None,
            Self::Managed(managed) => Some(managed.node()),
        }
    }

    /// What code that reads its device in this step reads that of.
    pub(crate) fn read(&self, step: Step) -> Read {
        let (is_passing, is_of_step) = match self {
            Self::Resident(_, None) => return Read::Other,
            Self::Resident(_, Some(mark)) => {
                let is_passing = !mark.is_constant() && mark.has_one_handle();
                (is_passing, mark.is_of(step))
            }
            Self::Managed(managed) => {
                let node = managed.node();
                let is_passing = node.lineage() == Lineage::Gradient && node.users() == 1;
                (is_passing, node.step().number == step.number)
            }
        };
        match (is_passing, is_of_step) {
            (true, true) => Read::Gradient,
            (true, false) => Read::State,
            (false, _) => Read::Other,
        }
    }

    /// The unit that it is a parameter of.
    pub(crate) fn unit(&self) -> Option<Arc<Unit>> {
        let node = self.node().filter(|node| node.meta.may_be_in_unit())?;
        node.state().home.unit().cloned()
    }

    /// Of a parameter of a unit: what it is called, and the unit.
    pub(crate) fn named(&self) -> Option<Named> {
        let unit = self.unit()?;
        Some(Named {
            path: self.node()?.meta.op,
            unit: Some(unit),
        })
    }

    /// Whether the storage exists during uses only.
    #[inline]
    pub(crate) fn is_delivered(&self) -> bool {
        self.node().is_some_and(|node| node.meta.is_delivered)
    }

    /// A delivered tensor in another type, if its elements can be requested in that type.
    pub(crate) fn in_type(&self, dtype: DType) -> Option<Self> {
        record::in_type(self.node()?, dtype).map(Self::Managed)
    }

    /// The elements of a tensor that is uploaded at each use.
    pub(crate) fn data(&self) -> Option<TensorData> {
        self.node()?.recipe()?.data()
    }

    /// The shape of a managed tensor, or while results are collected: a separate function, so that
    /// the usual path can be inlined.
    #[inline(never)]
    pub(crate) fn shape_apart(&self) -> Shape {
        if context::is_collecting() {
            context::collect(self.node().map(|node| node.clone() as _));
        }
        match self {
            Self::Resident(tensor, _) => tensor.shape(),
            Self::Managed(managed) => copy_of(&managed.node().meta.shape),
        }
    }

    /// Shows it to a call.
    #[inline]
    pub(crate) fn show(&self, call: &mut Call<B>) {
        match self {
            Self::Resident(tensor, gradient) => call.see_leaf::<K>(tensor, gradient.as_ref()),
            Self::Managed(managed) => call.see_node(&managed.0),
        }
    }

    pub(crate) fn save(&self) -> Saved<B, K> {
        Saved::new(match self {
            Self::Resident(tensor, gradient) => SavedValue::Leaf(Box::new(SavedLeaf {
                value: K::wrap(K::Primitive::clone(tensor)),
                _gradient: gradient.clone(),
            })),
            Self::Managed(managed) => SavedValue::Node(managed.source()),
        })
    }
}

/// A clone, without the iterator of `Shape::clone`: every operation reads shapes.
#[inline]
fn copy_of(shape: &Shape) -> Shape {
    match *shape.as_slice() {
        [a] => Shape::new([a]),
        [a, b] => Shape::new([a, b]),
        [a, b, c] => Shape::new([a, b, c]),
        [a, b, c, d] => Shape::new([a, b, c, d]),
        _ => shape.clone(),
    }
}

impl<B: Backend, K: Kind<B>> Clone for Handle<B, K> {
    #[inline]
    fn clone(&self) -> Self {
        match self {
            Self::Resident(tensor, gradient) => {
                Self::Resident(Held::new(K::Primitive::clone(tensor)), gradient.clone())
            }
            Self::Managed(managed) => Self::Managed(managed.clone()),
        }
    }
}

impl<B: Backend, K: Kind<B>> fmt::Debug for Handle<B, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Resident(tensor, _) => tensor.fmt(f),
            Self::Managed(managed) => managed.fmt(f),
        }
    }
}

impl<B: Backend> fmt::Debug for Managed<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let meta = &self.node().meta;
        f.debug_struct("Managed")
            .field("op", &meta.op.name)
            .field("shape", &meta.shape)
            .field("dtype", &meta.dtype)
            .field("resident", &self.node().state().content.is_resident())
            .finish()
    }
}
