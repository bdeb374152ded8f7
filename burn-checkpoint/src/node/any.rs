//! What scopes and budgets see of a node, whatever its backend.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use burn_backend::Backend;

use super::{Entry, Lineage, Node, Origin, Storage, vacate};
use crate::budget::Place;
use crate::host::{HostCopy, UPLOAD_NS_PER_BYTE};
use crate::op::OpInfo;
use crate::recipe::{Input, Recipe};
use crate::scope::Scope;
use crate::trace::EventKind;
use crate::{replay, verify};

/// A node of any backend, as scopes and budgets see it.
pub(crate) trait AnyEntry: Send + Sync {
    /// The operation that made its storage, if there are handles of it: a view is asked for as what it is a view of.
    fn used(&self) -> Option<&'static OpInfo>;
    /// Bytes of its storage, a view's too.
    fn storage_bytes(&self) -> u64;
    /// What a score needs to know.
    fn facts(&self) -> Facts;
    /// Drops the storage if it can come back. Returns the bytes that this frees.
    fn evict(&self) -> u64;
    /// In verify mode: replays what is about to be evicted, and compares.
    fn rehearse(self: Arc<Self>);
    /// Starts to move the storage to host memory. `own` is this node. Returns whether it did.
    fn offload(&self, own: Weak<dyn AnyEntry>) -> bool;
    /// What it is a view or a reshaped copy of, if it holds that tensor's storage and that tensor has been evicted: it is resident again.
    fn restore_viewed(&self) -> Option<Arc<dyn AnyEntry>>;
    /// Whether what is on its way to the host is there: then the recipe goes.
    fn has_arrived(&self) -> bool;
    /// Uploads what is on the host before it is asked for, if it has arrived there. Returns whether it is ahead now.
    fn go_ahead(&self) -> bool;
    /// Gives up what was uploaded before it was asked for; it is on the host still.
    fn fall_back(&self);
    /// Takes it out of what may be evicted.
    fn unlist(&self);
    /// If it is resident, drops what it could come back by: the storage stays. Nothing happens to what is not.
    fn settle(&self);
    /// Takes it out of the counters: it is state that outlives its step.
    fn retire(&self);
    /// A scope ends that it is a result of: it belongs to the scope around from then on, and gives up its recipe if there is none and
    /// no budget may evict it. What was not made in the scope that ends only passes through it, and stays as it is.
    fn leave(self: Arc<Self>, ended: &Arc<Scope>, outer: Option<&Arc<Scope>>);
    /// Shows the nodes that a replay starts from, and whether each is resident; not those that can never go.
    fn sources(&self, visit: &mut dyn FnMut(&Arc<dyn AnyEntry>, bool));
    /// Where its budget keeps what it costs.
    fn place(&self) -> &Place;
    /// Estimated cost to run this node's recipe alone, or to upload it.
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

impl<B: Backend, R: Recipe<B>> AnyEntry for Node<B, R> {
    fn used(&self) -> Option<&'static OpInfo> {
        (self.head.users() > 0).then(|| self.head.owner().op)
    }

    fn storage_bytes(&self) -> u64 {
        self.head.owner().bytes
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

    fn rehearse(self: Arc<Self>) {
        if verify::is_on() {
            let node: Arc<dyn Entry<B>> = self;
            replay::rehearse(&node);
        }
    }

    fn offload(&self, own: Weak<dyn AnyEntry>) -> bool {
        let mut state = self.state.lock();
        let Storage::Resident(value) = &state.storage else {
            return false;
        };
        if state.locks > 0 || state.origin == Origin::Source {
            return false;
        }
        if state.copy.is_none() {
            let Some(copy) = HostCopy::start(&self.head, value) else {
                return false;
            };
            state.copy = Some(Box::new(copy));
            state.origin = Origin::Hosted;
        }
        let bytes = self.head.bytes;
        let Some((storage, _)) = vacate(&self.head, &mut state) else {
            return false;
        };
        let Storage::Host(copy) = &mut state.storage else {
            return false;
        };
        let (place, arrived) = (copy.place, copy.has_arrived());
        let line = self.head.ledger.line();
        line.add(place, own, arrived);
        drop(state);
        drop(storage);
        if arrived {
            self.forget_recipe();
        }
        self.head.ledger.offloaded(bytes);
        self.head
            .emit(|op, node| EventKind::Offload { op, node }, bytes);
        line.look_at_arrivals();
        true
    }

    fn restore_viewed(&self) -> Option<Arc<dyn AnyEntry>> {
        let viewed = *self.state.lock().viewed.take()?;
        let owner = viewed.owner.node();
        let mut state = owner.state();
        if !matches!(state.storage, Storage::Evicted) || state.origin != Origin::Recorded {
            return None;
        }
        state.storage = Storage::Resident(viewed.value);
        state.witness = None;
        owner.head().came();
        drop(state);
        Some(owner.clone())
    }

    fn has_arrived(&self) -> bool {
        let arrived = match &mut self.state.lock().storage {
            Storage::Host(copy) => copy.has_arrived(),
            Storage::Resident(_) | Storage::Evicted => return true,
        };
        if arrived {
            self.forget_recipe();
        }
        arrived
    }

    fn go_ahead(&self) -> bool {
        let mut state = self.state.lock();
        let Storage::Host(copy) = &mut state.storage else {
            return false;
        };
        if copy.is_ahead() {
            return true;
        }
        // What has not arrived would have to be waited for.
        if !copy.go_ahead(&self.head.device) {
            return false;
        }
        self.head.came();
        drop(state);
        self.head.uploaded();
        true
    }

    fn fall_back(&self) {
        let mut state = self.state.lock();
        let Storage::Host(copy) = &mut state.storage else {
            return;
        };
        let Some(value) = copy.fall_back() else {
            return;
        };
        let bytes = self.head.went();
        drop(state);
        drop(value);
        self.head
            .emit(|op, node| EventKind::Free { op, node }, bytes);
    }

    fn unlist(&self) {
        self.head.listed.store(false, Ordering::Relaxed);
    }

    fn settle(&self) {
        let mut state = self.state.lock();
        let comes_back = matches!(state.origin, Origin::Recorded | Origin::Hosted);
        if comes_back && state.is_resident() {
            state.origin = Origin::Fixed;
            let unneeded = (state.copy.take(), state.viewed.take());
            drop(state);
            drop(unneeded);
            self.forget_recipe();
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

    fn leave(self: Arc<Self>, ended: &Arc<Scope>, outer: Option<&Arc<Scope>>) {
        let mut state = self.state.lock();
        if !matches!(&state.scope, Some(own) if Arc::ptr_eq(own, ended)) {
            return;
        }
        state.scope = outer.cloned();
        let viewed = state.viewed.take();
        let may_go = outer.is_none() && self.head.ledger.may_evict();
        // The scopes that follow are replayed from it, so it stays without handles too, until the budget needs its room.
        state.junction |= may_go && state.origin == Origin::Recorded;
        drop(state);
        drop(viewed);
        match outer {
            Some(outer) => {
                let bytes = self.head.own_bytes();
                let own: Arc<dyn AnyEntry> = self;
                outer.enlist(Arc::downgrade(&own), bytes);
            }
            None if may_go => {}
            None => self.settle(),
        }
    }

    fn sources(&self, visit: &mut dyn FnMut(&Arc<dyn AnyEntry>, bool)) {
        if self.state.lock().origin == Origin::Hosted {
            return;
        }
        self.inputs(&mut |input| {
            if let Input::Node(source) = input {
                let state = source.node().state();
                let (origin, resident) = (state.origin, state.is_resident());
                drop(state);
                if origin != Origin::Fixed {
                    let node: Arc<dyn AnyEntry> = source.node().clone();
                    visit(&node, resident);
                }
            }
        });
    }

    fn place(&self) -> &Place {
        &self.head.place
    }

    fn cost_ns(&self) -> f32 {
        match self.state.lock().origin {
            Origin::Hosted => self.head.bytes as f32 * UPLOAD_NS_PER_BYTE,
            Origin::Fixed | Origin::Recorded | Origin::Source => self.head.cost_ns,
        }
    }
}
