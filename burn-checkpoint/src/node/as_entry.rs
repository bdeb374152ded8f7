//! What scopes, budgets and the prefetch queue do with a node.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use burn_backend::Backend;

use crate::host::ahead::UploadPlace;
use crate::host::host_copy::HostCopy;
use crate::node::entry::{AnyEntry, Group, NodeInfo, Origin};
use crate::node::replay;
use crate::node::{Node, Source, Storage, vacate};
use crate::observe::trace::{EventKind, Kind};
use crate::record::clock;
use crate::record::cost::upload_ns;
use crate::scope::policy::{OpCall, Policy, SavePolicy};
use crate::scope::region::Region;

impl<B: Backend> Drop for Node<B> {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        if state.occupies_device() {
            let bytes = self.meta.storage_removed();
            self.meta.freed(bytes);
        }
        if let Storage::Host(_) = &state.storage {
            self.meta.memory.prefetch.forget(self.meta.id);
        }
        if let Some(budget) = self.meta.memory.budget() {
            budget.forget(self.meta.place);
        }
    }
}

impl<B: Backend> AnyEntry for Node<B> {
    fn save_policy(&self, policy: &Policy) -> Option<SavePolicy> {
        let owner = self.meta.owner();
        let call = OpCall {
            op: owner.op,
            number: owner.call,
            shape: &owner.shape,
            dtype: owner.dtype,
            bytes: owner.bytes,
        };
        (self.meta.users() > 0).then(|| policy.save_policy(&call))
    }

    fn info(&self) -> NodeInfo {
        let state = self.state.lock();
        let owner = self.meta.owner();
        NodeInfo {
            origin: state.origin,
            resident: state.is_resident(),
            locked: state.locks > 0,
            can_move: self.meta.own_bytes() > 0 && self.meta.row_major,
            users: self.meta.users(),
            last_used: state.last_used,
            owner: std::ptr::from_ref(owner) as usize,
            owner_bytes: owner.bytes,
            retired: owner.retired.load(Ordering::Acquire),
            op: self.meta.op,
            lineage: self.meta.lineage,
            step: self.meta.step,
            is_float: self.meta.dtype.is_float(),
            place: self.meta.place,
        }
    }

    fn kind(&self) -> Kind {
        self.meta.kind()
    }

    fn upload_place(&self) -> Option<UploadPlace> {
        self.recipe()?.place()
    }

    fn evict(&self) {
        let vacated = vacate(&self.meta, &mut self.state.lock());
        let Some((storage, bytes)) = vacated else {
            return;
        };
        drop(storage);
        self.meta.memory.counts.count(|stats| {
            stats.evicted_bytes += bytes;
            stats.evicted_operations += 1;
        });
        self.meta.emit(EventKind::Evict, bytes);
    }

    fn rehearse(self: Arc<Self>) {
        replay::rehearse(&self);
    }

    fn offload(self: Arc<Self>) -> bool {
        let mut state = self.state.lock();
        let Storage::Resident(value) = &state.storage else {
            return false;
        };
        if state.locks > 0 || state.origin == Origin::Delivered {
            return false;
        }
        if state.copy.is_none() {
            let Some(copy) = HostCopy::start(value) else {
                return false;
            };
            state.copy = Some(Box::new(copy));
            state.origin = Origin::Hosted;
        }
        let bytes = self.meta.bytes;
        let vacated = vacate(&self.meta, &mut state);
        let recipe = state.recipe.take();
        let own = Arc::downgrade(&self);
        self.meta.memory.prefetch.add(self.meta.id, own);
        drop(state);
        drop(vacated);
        let counts = &self.meta.memory.counts;
        counts.count(|stats| stats.offloaded_bytes += bytes);
        self.meta.emit(EventKind::Offload, bytes);
        // After the event: what the recipe alone refers to is freed.
        drop(recipe);
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
        state.checksum = None;
        owner.meta.storage_added();
        drop(state);
        Some(owner.clone())
    }

    fn prefetch(&self) -> bool {
        let mut state = self.state.lock();
        let Storage::Host(copy) = &mut state.storage else {
            return false;
        };
        if copy.ahead.is_some() {
            return true;
        }
        // Uploads only data that has arrived, so it does not wait.
        if !copy.prefetch(&self.meta.device) {
            return false;
        }
        self.meta.storage_added();
        drop(state);
        self.meta.uploaded();
        true
    }

    fn list(self: Arc<Self>) -> Option<Arc<dyn AnyEntry>> {
        let owner = self.meta.group.as_ref().map_or(&self, Source::node);
        let is_new = owner.meta.bytes > 0 && !owner.meta.listed.swap(true, Ordering::Relaxed);
        is_new.then(|| owner.clone() as _)
    }

    fn unlist(&self) {
        self.meta.listed.store(false, Ordering::Relaxed);
    }

    fn group(self: Arc<Self>) -> Option<Group> {
        let mut group = Group {
            members: Vec::with_capacity(1),
            bytes: self.meta.bytes,
            ..Group::default()
        };
        let now = clock::now();
        let state = self.state();
        let views: Vec<_> = state.views.iter().filter_map(Weak::upgrade).collect();
        drop(state);
        for node in std::iter::once(self.clone()).chain(views) {
            let state = node.state();
            if !state.is_resident() {
                continue;
            }
            if !state.comes_back() && Arc::ptr_eq(&node, &self) {
                return None;
            }
            group.has_users |= node.meta.users() > 0;
            group.overwrites |= node.meta.overwrites;
            group.restores = group.restores.max(state.restores);
            group.is_held |= !state.comes_back() || state.locks > 0 || state.last_used == now;
            group.last_used = group.last_used.max(state.last_used);
            drop(state);
            group.members.push(node);
        }
        // Views that no budget counts keep the storage too.
        let residents = self.meta.residents.load(Ordering::Acquire) as usize;
        group.is_held |= group.members.len() != residents;
        (residents > 0 && !group.members.is_empty()).then_some(group)
    }

    fn settle(&self) {
        let mut state = self.state.lock();
        if state.comes_back() && state.is_resident() {
            state.origin = Origin::Fixed;
            let unneeded = (state.copy.take(), state.viewed.take(), state.recipe.take());
            drop(state);
            drop(unneeded);
        }
        if let Some(owner) = &self.meta.group {
            forget_if_only_viewed(owner.node());
        }
    }

    fn settle_back(self: Arc<Self>) {
        replay::bring_back([self.clone()]);
        self.settle();
    }

    fn retire(&self) {
        let owner = self.meta.owner();
        if owner.retired.swap(true, Ordering::AcqRel) {
            return;
        }
        // One more than the number of residents: the count does not reach 0 again, so the storage
        // is not counted again.
        if owner.residents.fetch_add(1, Ordering::AcqRel) > 0 {
            owner.memory.counts.remove(owner.bytes);
            owner.emit(EventKind::Retire, owner.bytes);
        }
    }

    fn leave(&self, ended: &Arc<Region>, outer: Option<&Arc<Region>>) -> Option<u64> {
        let mut state = self.state.lock();
        if !matches!(&state.region, Some(own) if Arc::ptr_eq(own, ended)) {
            return None;
        }
        state.region = outer.cloned();
        let viewed = state.viewed.take();
        let may_go = outer.is_none() && self.meta.memory.may_evict();
        // The scopes that follow are replayed from it, so it stays without handles too, until the
        // budget needs its room.
        state.branch_point |= may_go && state.origin == Origin::Recorded;
        drop(state);
        drop(viewed);
        if outer.is_none() && !may_go {
            self.settle();
        }
        outer.map(|_| self.meta.own_bytes())
    }

    fn sources(&self, search: u64, evicted: &mut Vec<Arc<dyn AnyEntry>>) {
        // What moved to the host has none.
        let state = self.state();
        let Some(recipe) = &state.recipe else {
            return;
        };
        // Locks inputs while the node is locked. Nothing locks an input first, so no two threads
        // wait for each other.
        recipe.inputs(&mut |source| {
            let node = source.node();
            let state = node.state();
            let comes_back = !state.is_resident() && state.origin != Origin::Fixed;
            drop(state);
            if comes_back && node.meta.search.swap(search, Ordering::Relaxed) != search {
                evicted.push(node.clone());
            }
        });
    }

    fn cost_ns(&self) -> f32 {
        match (self.state.lock().origin, self.meta.memory.budget()) {
            (Origin::Hosted, None) => 0.0,
            (Origin::Hosted, Some(budget)) => {
                upload_ns(budget.settings.device.as_ref(), self.meta.bytes)
            }
            _ => self.meta.cost_ns,
        }
    }
}

/// Drops the recipe of a tensor that nothing can bring back any more: it has no handles, and only
/// its views refer to it, by which their bytes are counted.
fn forget_if_only_viewed<B: Backend>(owner: &Arc<Node<B>>) {
    let mut state = owner.state.lock();
    let views = state.views.iter().filter(|view| view.strong_count() > 0);
    if owner.meta.users() > 0
        || Arc::strong_count(owner) > views.count()
        || state.origin != Origin::Recorded
    {
        return;
    }
    state.origin = Origin::Fixed;
    let recipe = state.recipe.take();
    drop(state);
    drop(recipe);
}
