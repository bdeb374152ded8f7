//! A node: the record of a managed tensor. Its [`TensorMeta`] never changes; its [`State`] holds
//! the storage, which may be evicted; its [`Recipe`] brings the storage back. Recipes refer to
//! nodes by a [`Source`].
//!
//! - `handle.rs`: the tensor of `Remat`, which refers to a node or has the inner backend's tensor.
//! - `recipe.rs`: recipes. `replay.rs`: bringing a node back.
//! - `entry.rs`: a node as scopes and budgets see it, of any backend; `as_entry.rs`: what they do
//!   with it.
//! - `gradient.rs`: gradients, which are no nodes.
//! - `kind.rs` and `extent.rs`: tensors of the inner backend, and their size. `unwound.rs`: what
//!   panics drop.

mod as_entry;
pub(crate) mod entry;
pub(crate) mod extent;
pub(crate) mod gradient;
pub(crate) mod handle;
pub(crate) mod kind;
pub(crate) mod recipe;
pub(crate) mod replay;
pub(crate) mod unwound;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::panicking;

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, Shape, TensorData};
use burn_decorator::cell::Scope;
use parking_lot::{Mutex, MutexGuard};

use crate::budget::memory::MemoryStats;
use crate::error::OpResult;
use crate::host::ahead::UploadPlace;
use crate::host::host_copy::HostCopy;
use crate::node::entry::{AnyEntry, Origin};
use crate::node::extent::Extent;
use crate::node::kind::Value;
use crate::observe::trace::{self, EventKind, Traced};
use crate::observe::verify;
use crate::record::clock::{Lineage, Step};
use crate::record::op::OpInfo;
use crate::scope::region::Region;

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

/// What the tensor is a view of, and its recipe.
pub(crate) type InType<B> = (Option<Source<B>>, Arc<dyn Recipe<B>>);

/// The record of a managed tensor.
pub(crate) struct Node<B: Backend> {
    pub meta: TensorMeta<B>,
    pub state: Mutex<State<B>>,
}

impl<B: Backend> Node<B> {
    #[inline]
    pub fn new(
        meta: TensorMeta<B>,
        storage: Storage<B>,
        origin: Origin,
        region: Option<Arc<Region>>,
        recipe: Option<Arc<dyn Recipe<B>>>,
    ) -> Self {
        let state = State {
            storage,
            recipe,
            origin,
            locks: 0,
            hand_over: false,
            region,
            feeds_inner_scope: false,
            branch_point: false,
            last_used: meta.id,
            restores: 0,
            views: Vec::new(),
            checksum: None,
            copy: None,
            viewed: None,
        };
        let state = Mutex::new(state);
        Self { meta, state }
    }

    #[inline]
    pub fn state(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock()
    }

    /// The recipe, for calls that may run code of the user, during which the node must not be
    /// locked: that code may search for what to evict.
    pub fn recipe(&self) -> Option<Arc<dyn Recipe<B>>> {
        self.state().recipe.clone()
    }
}

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

/// The properties of a tensor that never change, and the counters of its storage.
pub(crate) struct TensorMeta<B: Backend> {
    /// The operation that made the tensor.
    pub op: &'static OpInfo,
    /// Its number on the thread that made it, in the order of operations.
    pub id: u64,
    /// Which call of the operation it is in its scope.
    pub call: u32,
    pub shape: Shape,
    pub dtype: DType,
    pub extent: Extent,
    pub device: Device<B>,
    /// Bytes of the storage if it is the tensor's own, 0 if it is that of an unmanaged tensor.
    pub bytes: u64,
    /// Of the node that runs an operation with several results: the bytes of all of these.
    pub parts_bytes: u64,
    /// Whether a reshape of it is a view.
    pub contiguous: bool,
    /// Whether its elements are sure to lie in the order that its shape says, as they do when they
    /// come back from the host.
    pub row_major: bool,
    /// Whether the storage exists during uses only: the elements are delivered, or computed from
    /// delivered ones alone. Its origin is [`Origin::Delivered`].
    pub is_delivered: bool,
    /// Whether the operation wrote into its operand's storage: it comes back only by all writes
    /// before it too.
    pub overwrites: bool,
    /// The tensor whose storage this one shares.
    pub group: Option<Source<B>>,
    /// How many tensors that share this one's storage are resident, itself included.
    pub residents: AtomicU32,
    /// Whether its storage is in a budget's list of what may be evicted.
    pub listed: AtomicBool,
    /// The number of the last search that saw it.
    pub search: AtomicU64,
    /// Whether its bytes are no longer counted.
    pub retired: AtomicBool,
    /// Its place among the results of its budget, from 1; 0 if it has none.
    pub place: u64,
    /// How many handles there are; recipes are not counted.
    pub users: AtomicU32,
    pub memory: Arc<MemoryStats>,
    /// Estimated nanoseconds to run the operation again.
    pub cost_ns: f32,
    /// When it was made, under a budget.
    pub step: Step,
    pub lineage: Lineage,
}

impl<B: Backend> TensorMeta<B> {
    /// A tensor with a storage of its own, made outside of budgets.
    #[inline]
    pub fn new(
        op: &'static OpInfo,
        id: u64,
        shape: Shape,
        dtype: DType,
        extent: Extent,
        device: Device<B>,
        memory: Arc<MemoryStats>,
    ) -> Self {
        Self {
            op,
            id,
            call: 0,
            bytes: extent.bytes,
            extent,
            shape,
            dtype,
            device,
            parts_bytes: 0,
            contiguous: true,
            row_major: true,
            is_delivered: false,
            overwrites: false,
            group: None,
            residents: AtomicU32::new(0),
            listed: AtomicBool::new(false),
            search: AtomicU64::new(0),
            retired: AtomicBool::new(false),
            place: 0,
            users: AtomicU32::new(0),
            memory,
            cost_ns: 0.0,
            step: Step::FIRST,
            lineage: Lineage::Activation,
        }
    }

    /// The node that counts the bytes of the storage.
    #[inline]
    pub fn owner(&self) -> &TensorMeta<B> {
        match &self.group {
            Some(group) => &group.node().meta,
            None => self,
        }
    }

    /// Bytes of the storage if it is the tensor's own, else 0.
    #[inline]
    pub fn own_bytes(&self) -> u64 {
        match self.group {
            Some(_) => 0,
            None => self.bytes,
        }
    }

    /// Counts a storage that is resident from now on.
    #[inline]
    pub fn storage_added(&self) {
        let owner = self.owner();
        if owner.residents.fetch_add(1, Ordering::AcqRel) == 0 {
            // Views may be made under other budgets, or by other threads.
            owner.memory.counts.add(owner.bytes);
        }
    }

    /// Counts a storage that is no longer resident. Returns the bytes that this frees.
    #[inline]
    pub fn storage_removed(&self) -> u64 {
        let owner = self.owner();
        if owner.residents.fetch_sub(1, Ordering::AcqRel) == 1 {
            owner.memory.counts.remove(owner.bytes);
            owner.bytes
        } else {
            0
        }
    }

    /// Reports bytes that are freed; not those of a replay that only compares.
    #[inline]
    pub fn freed(&self, bytes: u64) {
        if !verify::is_rehearsing() {
            self.emit(EventKind::Free, bytes);
        }
    }

    /// Drops a storage that [`vacate`] returned, if it did, once the lock is released.
    #[inline]
    pub fn release(&self, vacated: Option<(Storage<B>, u64)>) {
        if let Some((storage, bytes)) = vacated {
            unwound::release(storage);
            self.freed(bytes);
        }
    }

    /// Counts a storage that was uploaded from the host.
    pub fn uploaded(&self) {
        let counts = &self.memory.counts;
        counts.count(|stats| stats.uploaded_bytes += self.bytes);
        self.emit(EventKind::Upload, self.bytes);
    }

    #[inline]
    pub fn users(&self) -> u32 {
        self.users.load(Ordering::Acquire)
    }

    /// The tensor as errors name it.
    pub fn result(&self) -> OpResult {
        OpResult {
            op: self.op.name,
            shape: self.shape.to_vec(),
            dtype: self.dtype,
            number: self.id,
        }
    }

    /// What the tensor is for.
    pub fn kind(&self) -> trace::Kind {
        match self.op.name {
            _ if self.lineage == Lineage::Gradient => trace::Kind::Gradient,
            name if name.ends_with("_random") || self.dtype.is_bool() => trace::Kind::Mask,
            name if name.ends_with("_from_data") => trace::Kind::Input,
            _ => trace::Kind::Activation,
        }
    }

    #[inline]
    pub fn emit(&self, kind: impl FnOnce(Traced) -> EventKind, bytes: u64) {
        if trace::is_on() {
            let (op, node) = (self.op.name, self.id);
            let device = self.memory.device;
            let kind = kind(Traced { op, node });
            trace::emit(kind, bytes, self.memory.counts.live(), Some(device));
        }
    }
}

/// The part of a node that changes.
pub(crate) struct State<B: Backend> {
    pub storage: Storage<B>,
    /// How the storage comes back. Dropped outside of the lock, for its inputs may be dropped with
    /// it.
    pub recipe: Option<Arc<dyn Recipe<B>>>,
    pub origin: Origin,
    /// Replays under way that need the storage.
    pub locks: u32,
    /// The next load is the last one of a replay and may take the storage itself.
    pub hand_over: bool,
    /// The scope that evicts it: replays for tensors of other scopes do not keep it resident.
    pub region: Option<Arc<Region>>,
    /// Whether a scope inside of `region` has used it: the inner scope is replayed from it, so a
    /// replay keeps it even without users.
    pub feeds_inner_scope: bool,
    /// A branch point: several recipes start from it (a residual stream), or a scope does (the
    /// result of another scope). Under a budget its storage stays when its last handle is dropped.
    pub branch_point: bool,
    /// The thread's operation count at the last use.
    pub last_used: u64,
    /// How often it was brought back.
    pub restores: u32,
    /// Other tensors with this storage.
    pub views: Vec<Weak<Node<B>>>,
    /// The checksum of the storage when it was dropped, in verify mode.
    pub checksum: Option<u64>,
    /// The host copy of a resident storage that may be evicted again.
    pub copy: Option<Box<HostCopy<B>>>,
    /// For a view or a reshaped copy in a scope that may offload: the tensor it is a view of.
    pub viewed: Option<Box<Viewed<B>>>,
}

/// A tensor that others are views of, and its storage, which may have been dropped with that
/// tensor's last handle. The elements of a view may lie in another order than its shape's, those of
/// this storage do not.
#[derive(Clone)]
pub(crate) struct Viewed<B: Backend> {
    pub owner: Source<B>,
    pub value: Value<B>,
}

pub(crate) enum Storage<B: Backend> {
    Resident(Value<B>),
    Evicted,
    /// Boxed, for it is larger than a tensor.
    Host(Box<HostCopy<B>>),
}

impl<B: Backend> State<B> {
    /// Whether the storage stays when the last handle is dropped: that of a branch point does.
    ///
    /// Autodiff may save nothing of a residual stream. What is evicted of a block could then be
    /// replayed only from the beginning of the model.
    #[inline]
    pub fn outlasts_handles(&mut self, meta: &TensorMeta<B>, recipes: usize) -> bool {
        if !self.branch_point
            && recipes > 1
            && self.origin == Origin::Recorded
            && self.region.is_none()
        {
            self.branch_point = meta
                .memory
                .budget()
                .is_some_and(|budget| budget.keeps_branch_points());
        }
        self.branch_point
    }

    /// Whether an eviction makes sense: the storage can come back, and does not exist during its
    /// uses only.
    #[inline]
    pub fn comes_back(&self) -> bool {
        matches!(self.origin, Origin::Recorded | Origin::Hosted)
    }

    /// Adds another tensor with this storage.
    pub fn add_view(&mut self, view: &Arc<Node<B>>) {
        if self.views.len() == self.views.capacity() {
            self.views.retain(|view| view.strong_count() > 0);
        }
        self.views.push(Arc::downgrade(view));
    }

    #[inline]
    pub fn is_resident(&self) -> bool {
        matches!(self.storage, Storage::Resident(_))
    }

    /// Whether it occupies device memory: resident, or uploaded before its use.
    pub fn occupies_device(&self) -> bool {
        match &self.storage {
            Storage::Resident(_) => true,
            Storage::Evicted => false,
            Storage::Host(copy) => copy.ahead.is_some(),
        }
    }

    /// What the storage becomes when it is dropped or taken: its host copy, if there is one.
    fn gone(&mut self) -> Storage<B> {
        self.copy.take().map_or(Storage::Evicted, Storage::Host)
    }
}

/// Takes the storage out of a node, if it can come back, and returns it with the bytes that this
/// frees. The caller drops the storage after releasing the lock, by [`TensorMeta::release`] unless
/// it counts an eviction.
#[inline]
pub(crate) fn vacate<B: Backend>(
    meta: &TensorMeta<B>,
    state: &mut State<B>,
) -> Option<(Storage<B>, u64)> {
    if state.origin == Origin::Fixed || state.locks > 0 || !state.is_resident() {
        return None;
    }
    let bytes = about_to_go(meta, state);
    let gone = state.gone();
    Some((std::mem::replace(&mut state.storage, gone), bytes))
}

/// Takes the storage out of a node for the caller to use.
#[inline]
pub(crate) fn take_value<B: Backend>(
    meta: &TensorMeta<B>,
    state: &mut State<B>,
) -> Option<Value<B>> {
    if !state.is_resident() {
        return None;
    }
    let bytes = about_to_go(meta, state);
    meta.freed(bytes);
    let gone = state.gone();
    match std::mem::replace(&mut state.storage, gone) {
        Storage::Resident(value) => Some(value),
        Storage::Evicted | Storage::Host(_) => None,
    }
}

/// Updates counters and checksum for a storage that is about to be taken. Returns the bytes that
/// this frees.
#[inline]
fn about_to_go<B: Backend>(meta: &TensorMeta<B>, state: &mut State<B>) -> u64 {
    if let Storage::Resident(value) = &state.storage {
        state.checksum = match state.origin {
            Origin::Recorded => verify::checksum(value),
            _ => None,
        };
    }
    state.hand_over = false;
    state.viewed = None;
    meta.storage_removed()
}
