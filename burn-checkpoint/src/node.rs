//! A managed tensor: what is known of it for good, and its storage, which comes and goes.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, Shape};
use parking_lot::{Mutex, MutexGuard};

use crate::host::HostCopy;
use crate::kind::Value;
use crate::ledger::Ledger;
use crate::op::OpInfo;
use crate::recipe::{Input, Recipe, Source};
use crate::scope::Scope;
use crate::trace::EventKind;
use crate::{trace, verify};

/// What never changes.
pub(crate) struct Head<B: Backend> {
    /// The operation that made the tensor.
    pub op: &'static OpInfo,
    /// Its number on the thread that made it, in the order of operations.
    pub id: u64,
    pub shape: Shape,
    pub dtype: DType,
    pub device: Device<B>,
    /// Bytes of the storage if it is the tensor's own, 0 if it is that of an unmanaged tensor.
    pub bytes: u64,
    /// Whether a reshape of it is a view.
    pub contiguous: bool,
    /// Whether its elements are sure to lie in the order that its shape says, as they do when they come back from the host.
    pub row_major: bool,
    /// The tensor whose storage this one shares.
    pub group: Option<Source<B>>,
    /// How many tensors that share this one's storage are resident, itself included.
    pub residents: AtomicU32,
    /// Whether its bytes are no longer counted.
    pub retired: AtomicBool,
    /// How many handles there are; recipes are not counted.
    pub users: AtomicU32,
    pub ledger: Arc<Ledger>,
    /// Estimated nanoseconds to run the operation again.
    pub cost_ns: f32,
    /// The step of the thread's budget in which it was made.
    pub step: u64,
    /// Whether it descends from the seed of that step's backward pass.
    pub lineage: Lineage,
}

/// What a tensor was computed from, under a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lineage {
    Activation,
    Gradient,
}

/// Whether and how a tensor without storage can come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// It cannot: its storage stays as long as the node.
    Fixed,
    /// By its recipe.
    Recorded,
    /// By its recipe, which is kept whatever happens: it stands for data elsewhere.
    Source,
}

/// What changes.
pub(crate) struct State<B: Backend> {
    pub storage: Storage<B>,
    pub origin: Origin,
    /// Replays under way that need the storage.
    pub locks: u32,
    /// The next load is the last one of a replay and may have the storage itself.
    pub hand_over: bool,
    /// The scope that evicts it: replays for tensors of other scopes do not keep it.
    pub scope: Option<Arc<Scope>>,
    /// Whether a scope inside of that one has used it: it is what that scope is replayed from, whether it has users or not.
    pub feeds_inner_scope: bool,
    /// The thread's operation count at the last use.
    pub last_used: u64,
    /// What the storage held when it was dropped, in verify mode.
    pub witness: Option<u64>,
}

pub(crate) enum Storage<B: Backend> {
    Resident(Value<B>),
    Evicted,
    Host(HostCopy<B>),
}

impl<B: Backend> State<B> {
    pub fn is_resident(&self) -> bool {
        matches!(self.storage, Storage::Resident(_))
    }
}

/// A node with its recipe.
pub(crate) struct Node<B: Backend, R> {
    pub head: Head<B>,
    pub state: Mutex<State<B>>,
    pub recipe: Mutex<Option<R>>,
}

/// A node of backend `B`, whatever its recipe.
pub(crate) trait Entry<B: Backend>: AnyEntry {
    fn head(&self) -> &Head<B>;
    fn state(&self) -> MutexGuard<'_, State<B>>;
    /// Shows the recipe's inputs, none if it has no recipe.
    fn inputs(&self, visit: &mut dyn FnMut(Input<'_, B>));
    /// Runs the recipe; `None` if there is none.
    fn run(&self) -> Option<Value<B>>;
}

/// A node of any backend, as scopes and budgets see it.
pub(crate) trait AnyEntry: Send + Sync {
    /// What a score needs to know.
    fn facts(&self) -> Facts;
    /// Drops the storage if it can come back. Returns the bytes that this frees.
    fn evict(&self) -> u64;
    /// Starts to move the storage to host memory; `next` is to be uploaded once this one is asked for.
    fn offload(&self, next: Option<Weak<dyn AnyEntry>>) -> bool;
    /// Starts to upload what is on the host, ahead of its use.
    fn prefetch(&self);
    /// Makes it resident if it is not, and drops the recipe: the storage stays.
    fn settle(&self);
    /// Takes it out of the counters: it is state that outlives its step.
    fn retire(&self);
    /// Whether it was computed from gradients.
    fn lineage(&self) -> Lineage;
    /// Gives it to another scope.
    fn set_scope(&self, scope: Option<Arc<Scope>>);
    /// Shows the nodes that a replay would have to bring back first.
    fn evicted_inputs(&self, visit: &mut dyn FnMut(Arc<dyn AnyEntry>));
    /// Estimated cost to run this node's recipe alone.
    fn cost_ns(&self) -> f32;
}

/// What a node looks like from outside.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub op: &'static OpInfo,
    pub origin: Origin,
    pub resident: bool,
    pub locked: bool,
    /// The storage is that of another managed tensor, or of an unmanaged one.
    pub shared: bool,
    /// A copy on the host would come back with another order of elements, which a matmul may add up in another order.
    pub permuted: bool,
    pub users: u32,
    pub bytes: u64,
    pub last_used: u64,
    /// The address of the node that counts the storage's bytes.
    pub owner: usize,
    pub owner_bytes: u64,
    /// How many tensors with this storage are resident.
    pub residents: u32,
}

impl<B: Backend> Head<B> {
    /// The node that counts the bytes of the storage.
    fn owner(&self) -> &Head<B> {
        match &self.group {
            Some(group) => group.node().head(),
            None => self,
        }
    }

    /// Counts storage that has come.
    pub fn came(&self) {
        let owner = self.owner();
        if owner.residents.fetch_add(1, Ordering::AcqRel) == 0 {
            self.ledger.add(owner.bytes);
        }
    }

    /// Counts storage that has gone. Returns the bytes this frees.
    pub fn went(&self) -> u64 {
        let owner = self.owner();
        if owner.residents.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.ledger.remove(owner.bytes);
            owner.bytes
        } else {
            0
        }
    }

    pub fn users(&self) -> u32 {
        self.users.load(Ordering::Acquire)
    }

    pub fn emit(&self, kind: impl FnOnce(&'static str, u64) -> EventKind, bytes: u64) {
        if trace::is_on() {
            let device = self.ledger.device();
            trace::emit(
                kind(self.op.name, self.id),
                bytes,
                self.ledger.live(),
                Some(device),
            );
        }
    }
}

impl<B: Backend, R: Recipe<B>> Entry<B> for Node<B, R> {
    fn head(&self) -> &Head<B> {
        &self.head
    }

    fn state(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock()
    }

    fn inputs(&self, visit: &mut dyn FnMut(Input<'_, B>)) {
        if let Some(recipe) = &*self.recipe.lock() {
            recipe.inputs(visit);
        }
    }

    fn run(&self) -> Option<Value<B>> {
        self.recipe.lock().as_ref().map(Recipe::run)
    }
}

/// Takes the storage out of a node, if it can come back. The storage is to be dropped after the lock.
pub(crate) fn vacate<B: Backend>(head: &Head<B>, state: &mut State<B>) -> Option<(Value<B>, u64)> {
    if state.origin == Origin::Fixed || state.locks > 0 || !state.is_resident() {
        return None;
    }
    take_storage(head, state)
}

/// Takes the storage out of a node.
pub(crate) fn take_storage<B: Backend>(
    head: &Head<B>,
    state: &mut State<B>,
) -> Option<(Value<B>, u64)> {
    match std::mem::replace(&mut state.storage, Storage::Evicted) {
        Storage::Resident(value) => {
            state.witness = verify::witness(state.origin, &value);
            state.hand_over = false;
            Some((value, head.went()))
        }
        other => {
            state.storage = other;
            None
        }
    }
}

/// Forgets the recipe: from now on the storage stays.
pub(crate) fn strip<B: Backend, R: Recipe<B>>(node: &Node<B, R>) {
    let recipe = node.recipe.lock().take();
    drop(recipe);
}

impl<B: Backend, R: Recipe<B>> AnyEntry for Node<B, R> {
    fn facts(&self) -> Facts {
        let state = self.state.lock();
        let owner = self.head.owner();
        Facts {
            op: self.head.op,
            origin: state.origin,
            resident: state.is_resident(),
            locked: state.locks > 0,
            shared: self.head.group.is_some() || self.head.bytes == 0,
            permuted: !self.head.row_major,
            users: self.head.users(),
            bytes: self.head.bytes,
            last_used: state.last_used,
            owner: std::ptr::from_ref(owner) as usize,
            owner_bytes: owner.bytes,
            residents: owner.residents.load(Ordering::Acquire),
        }
    }

    fn evict(&self) -> u64 {
        let vacated = vacate(&self.head, &mut self.state.lock());
        let Some((value, bytes)) = vacated else {
            return 0;
        };
        drop(value);
        self.head.ledger.evicted(bytes);
        self.head
            .emit(|op, node| EventKind::Evict { op, node }, bytes);
        bytes
    }

    fn offload(&self, next: Option<Weak<dyn AnyEntry>>) -> bool {
        let mut state = self.state.lock();
        let Storage::Resident(value) = &state.storage else {
            return false;
        };
        let Some(copy) = HostCopy::start(value.clone(), next) else {
            return false;
        };
        if state.locks > 0 {
            return false;
        }
        let taken = take_storage(&self.head, &mut state);
        state.storage = Storage::Host(copy);
        state.witness = None;
        if state.origin == Origin::Recorded {
            state.origin = Origin::Fixed;
        }
        drop(state);
        strip(self);
        let bytes = taken.map_or(0, |(_, bytes)| bytes);
        self.head.ledger.offloaded(bytes);
        self.head
            .emit(|op, node| EventKind::Offload { op, node }, bytes);
        true
    }

    fn prefetch(&self) {
        let mut state = self.state.lock();
        let Storage::Host(copy) = &mut state.storage else {
            return;
        };
        // What is not there yet would have to be waited for.
        if let Some(value) = copy.upload(&self.head.device) {
            self.head.came();
            state.storage = Storage::Resident(value);
            drop(state);
            self.head.ledger.uploaded(self.head.bytes);
            self.head
                .emit(|op, node| EventKind::Upload { op, node }, self.head.bytes);
        }
    }

    fn settle(&self) {
        let mut state = self.state.lock();
        if state.origin == Origin::Recorded && state.is_resident() {
            state.origin = Origin::Fixed;
            drop(state);
            strip(self);
        }
    }

    fn retire(&self) {
        let owner = self.head.owner();
        if owner.retired.swap(true, Ordering::AcqRel) {
            return;
        }
        // One resident more than there are: the storage is never seen to come or go again.
        if owner.residents.fetch_add(1, Ordering::AcqRel) > 0 {
            self.head.ledger.remove(owner.bytes);
        }
    }

    fn lineage(&self) -> Lineage {
        self.head.lineage
    }

    fn set_scope(&self, scope: Option<Arc<Scope>>) {
        self.state.lock().scope = scope;
    }

    fn evicted_inputs(&self, visit: &mut dyn FnMut(Arc<dyn AnyEntry>)) {
        self.inputs(&mut |input| {
            if let Input::Node(source) = input
                && !source.node().state().is_resident()
            {
                visit(source.node().clone());
            }
        });
    }

    fn cost_ns(&self) -> f32 {
        self.head.cost_ns
    }
}

impl<B: Backend, R> Drop for Node<B, R> {
    fn drop(&mut self) {
        if self.state.get_mut().is_resident() {
            let bytes = self.head.went();
            self.head
                .emit(|op, node| EventKind::Free { op, node }, bytes);
        }
    }
}
