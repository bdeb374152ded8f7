//! What scopes and budgets see of a node, whatever its backend.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use burn_backend::Backend;

use super::{Entry, Lineage, Node, Origin, Storage, about_to_go, vacate};
use crate::host::HostCopy;
use crate::op::OpInfo;
use crate::recipe::{Input, Recipe};
use crate::scope::Scope;
use crate::trace::EventKind;

/// A node of any backend, as scopes and budgets see it.
pub(crate) trait AnyEntry: Send + Sync {
    /// The operation that made it, if there are handles of it.
    fn used(&self) -> Option<&'static OpInfo>;
    /// What a score needs to know.
    fn facts(&self) -> Facts;
    /// Drops the storage if it can come back. Returns the bytes that this frees.
    fn evict(&self) -> u64;
    /// Starts to move the storage to host memory; `next` is to be uploaded once this one is asked for.
    fn offload(&self, next: Option<Weak<dyn AnyEntry>>) -> bool;
    /// Starts to upload what is on the host, ahead of its use.
    fn prefetch(&self);
    /// Takes it out of what may be evicted.
    fn unlist(&self);
    /// Drops the recipe of what is resident: its storage stays from now on. Nothing happens to what is not.
    fn settle(&self);
    /// Takes it out of the counters: it is state that outlives its step.
    fn retire(&self);
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
    /// The storage is counted no more.
    pub retired: bool,
    pub op: &'static OpInfo,
    pub lineage: Lineage,
}

/// Forgets the recipe: from now on the storage stays.
pub(crate) fn strip<B: Backend, R: Recipe<B>>(node: &Node<B, R>) {
    let recipe = node.recipe.lock().take();
    drop(recipe);
}

impl<B: Backend, R: Recipe<B>> AnyEntry for Node<B, R> {
    fn used(&self) -> Option<&'static OpInfo> {
        (self.head.users() > 0).then_some(self.head.op)
    }

    fn facts(&self) -> Facts {
        let state = self.state.lock();
        let owner = self.head.owner();
        Facts {
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
            retired: owner.retired.load(Ordering::Acquire),
            op: self.head.op,
            lineage: self.head.lineage,
        }
    }

    fn evict(&self) -> u64 {
        let vacated = vacate(&self.head, &mut self.state.lock());
        let Some((storage, bytes)) = vacated else {
            return 0;
        };
        drop(storage);
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
        let bytes = about_to_go(&self.head, &mut state);
        let storage = std::mem::replace(&mut state.storage, Storage::Host(Box::new(copy)));
        state.witness = None;
        if state.origin == Origin::Recorded {
            state.origin = Origin::Fixed;
        }
        drop(state);
        strip(self);
        drop(storage);
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

    fn unlist(&self) {
        self.head.listed.store(false, Ordering::Relaxed);
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
            owner.ledger.remove(owner.bytes);
        }
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
