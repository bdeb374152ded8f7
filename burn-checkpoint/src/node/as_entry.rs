//! What scopes, budgets and the prefetch queue do with a node.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn_backend::Backend;

use crate::host::ahead::UploadPlace;
use crate::node::budgeted::Budgeted;
use crate::node::content::{Content, Home, Moved};
use crate::node::entry::{AnyEntry, Group, NodeInfo, Origin};
use crate::node::replay;
use crate::node::{Node, Storage, Vacated};
use crate::observe::trace::{EventKind, Kind};
use crate::record::cost::upload_ns;
use crate::record::flags;
use crate::scope::policy::{OpCall, Policy, SavePolicy};
use crate::scope::region::Region;
use crate::scope::units::{self, Unit};

impl<B: Backend> AnyEntry for Node<B> {
    fn save_policy(&self, policy: &Policy) -> Option<SavePolicy> {
        let owner = self.owner();
        let meta = &owner.meta;
        let call = OpCall {
            op: meta.op,
            number: meta.call,
            shape: &meta.shape,
            dtype: meta.dtype,
            bytes: owner.bytes(),
        };
        (self.users() > 0).then(|| policy.save_policy(&call))
    }

    fn info(&self) -> NodeInfo {
        let state = self.state();
        let owner = self.owner();
        let budgeted = self.budgeted.as_ref();
        NodeInfo {
            origin: state.content.origin(),
            resident: state.content.is_resident(),
            locked: state.locks > 0,
            owns_storage: self.own_bytes() > 0,
            users: self.users(),
            last_used: budgeted.map_or(0, Budgeted::last_used),
            owner: std::ptr::from_ref(owner) as usize,
            owner_bytes: owner.bytes(),
            retired: self.counted().is_retired(),
            op: self.meta.op,
            operation: state.home.operation(),
            lineage: self.lineage(),
            step: self.step(),
            is_float: self.meta.dtype.is_float(),
            place: budgeted.map_or(0, |own| own.place),
        }
    }

    fn kind(&self) -> Kind {
        Self::kind(self)
    }

    fn is_of_region(&self, region: &Arc<Region>) -> bool {
        let state = self.state();
        let own = state.home.region();
        own.is_some_and(|own| Arc::ptr_eq(own, region))
    }

    fn move_to(&self, next: &Arc<Region>) {
        if let Home::Scope { region, operation } = &mut self.state().home {
            *operation = units::adopted(*operation);
            *region = next.clone();
        }
    }

    fn inputs(&self) -> Vec<Arc<dyn AnyEntry>> {
        let mut inputs: Vec<Arc<dyn AnyEntry>> = Vec::new();
        if let Some(recipe) = self.recipe() {
            recipe.inputs(&mut |source| inputs.push(source.node().clone()));
        }
        inputs
    }

    fn is_of_unit(&self, unit: &Arc<Unit>) -> bool {
        let state = self.state();
        let own = state.home.unit();
        own.is_some_and(|own| Arc::ptr_eq(own, unit))
    }

    fn unit(&self) -> Option<Arc<Unit>> {
        self.state().home.unit().cloned()
    }

    fn put_in_unit(&self, unit: &Arc<Unit>) -> bool {
        if self.meta.is_delivered {
            self.state().home = Home::Unit(unit.clone());
        }
        self.meta.is_delivered
    }

    fn upload_place(&self) -> Option<UploadPlace> {
        self.recipe()?.place()
    }

    fn evict(&self) {
        let vacated = self.vacate(&mut self.state());
        let Some(Vacated { value, freed_bytes }) = vacated else {
            return;
        };
        drop(value);
        self.memory().counts.count(|stats| {
            stats.evicted_bytes += freed_bytes;
            stats.evicted_operations += 1;
        });
        self.emit(EventKind::Evict, freed_bytes);
    }

    fn offload(self: Arc<Self>) -> bool {
        let mut state = self.state();
        if state.locks > 0 {
            return false;
        }
        let Some(Moved { value, recipe }) = state.content.move_to_host() else {
            return false;
        };
        self.counted().remove();
        let memory = self.memory();
        memory
            .prefetch
            .add(self.meta.id, Arc::downgrade(&self) as _);
        drop(state);
        drop(value);
        let bytes = self.bytes();
        memory.counts.count(|stats| stats.offloaded_bytes += bytes);
        self.emit(EventKind::Offload, bytes);
        // After the event: what the recipe alone refers to is freed.
        drop(recipe);
        true
    }

    fn restore_viewed(&self) -> Option<Arc<dyn AnyEntry>> {
        let viewed = match &mut self.state().content {
            Content::Recorded(recorded) => *recorded.viewed.take()?,
            _ => return None,
        };
        let Storage::Shared { owner, .. } = &self.storage else {
            return None;
        };
        let owner = owner.node();
        let mut state = owner.state();
        if !state.content.is_recorded() || state.content.is_resident() {
            return None;
        }
        state.content.came_back(viewed);
        owner.counted().add();
        drop(state);
        Some(owner.clone())
    }

    fn prefetch(&self) -> bool {
        let mut state = self.state();
        let Content::Hosted { value: None, copy } = &mut state.content else {
            return false;
        };
        if copy.ahead.is_some() {
            return true;
        }
        // Uploads only data that has arrived, so it does not wait.
        if !copy.prefetch(&self.meta.device) {
            return false;
        }
        self.counted().add();
        drop(state);
        self.uploaded();
        true
    }

    fn list(self: Arc<Self>) -> Option<Arc<dyn AnyEntry>> {
        let owner = match &self.storage {
            Storage::Own(_) => &self,
            Storage::Shared { owner, .. } => owner.node(),
        };
        let is_new = owner.bytes() > 0 && owner.budgeted.as_ref().is_some_and(Budgeted::list);
        is_new.then(|| owner.clone() as _)
    }

    fn unlist(&self) {
        if let Some(own) = &self.budgeted {
            own.is_listed.store(false, Ordering::Relaxed);
        }
    }

    fn group(self: Arc<Self>) -> Option<Group> {
        let mut group = Group {
            members: Vec::with_capacity(1),
            bytes: self.bytes(),
            ..Group::default()
        };
        let now = flags::now();
        let views = self.budgeted.as_ref()?.views();
        for node in std::iter::once(self.clone()).chain(views) {
            let Some(own) = &node.budgeted else {
                continue;
            };
            let state = node.state();
            if !state.content.is_resident() {
                continue;
            }
            let comes_back = state.content.comes_back();
            if !comes_back && Arc::ptr_eq(&node, &self) {
                return None;
            }
            let last_used = own.last_used();
            group.has_users |= node.users() > 0;
            group.overwrites |= own.overwrites;
            group.restores = group.restores.max(own.restores.load(Ordering::Relaxed));
            group.is_held |= !comes_back || state.locks > 0 || last_used == now;
            group.last_used = group.last_used.max(last_used);
            drop(state);
            group.members.push(node);
        }
        // Views that no budget counts keep the storage too.
        let residents = self.counted().residents() as usize;
        group.is_held |= group.members.len() != residents;
        (residents > 0 && !group.members.is_empty()).then_some(group)
    }

    fn settle(&self) {
        // Dropped once the node is not locked.
        let unneeded = self.state().content.keep();
        drop(unneeded);
        if let Storage::Shared { owner, .. } = &self.storage {
            forget_if_only_viewed(owner.node());
        }
    }

    fn settle_back(self: Arc<Self>) {
        replay::bring_back([self.clone()]);
        self.settle();
    }

    fn retire(&self) {
        let owner = self.owner();
        if owner.budgeted.is_some() && self.counted().retire() {
            owner.emit(EventKind::Retire, owner.bytes());
        }
    }

    fn leave(&self, ended: &Arc<Region>, outer: Option<&Arc<Region>>) -> Option<u64> {
        let mut state = self.state();
        if !state
            .home
            .region()
            .is_some_and(|own| Arc::ptr_eq(own, ended))
        {
            return None;
        }
        // No operation of the scope around has made it.
        state.home = Home::of_result(outer.cloned(), 0);
        let is_recorded = state.content.is_recorded();
        let viewed = match &mut state.content {
            Content::Recorded(recorded) => recorded.viewed.take(),
            _ => None,
        };
        let may_go = outer.is_none() && self.memory().may_evict();
        if may_go
            && is_recorded
            && let Some(own) = &self.budgeted
        {
            // The scopes that follow are replayed from it, so it stays without handles too, until
            // the budget needs its room.
            own.is_branch_point.store(true, Ordering::Relaxed);
        }
        drop(state);
        drop(viewed);
        if outer.is_none() && !may_go {
            self.settle();
        }
        outer.map(|_| self.own_bytes())
    }

    fn sources(&self, search: u32, evicted: &mut Vec<Arc<dyn AnyEntry>>) {
        // What moved to the host has none.
        let state = self.state();
        let Some(recipe) = state.content.recipe() else {
            return;
        };
        // Locks inputs while the node is locked. Nothing locks an input first, so no two threads
        // wait for each other.
        recipe.inputs(&mut |source| {
            let node = source.node();
            let state = node.state();
            let comes_back = !state.content.is_resident() && !state.content.is_kept();
            drop(state);
            // What was made without a budget has no known cost.
            if comes_back
                && let Some(own) = &node.budgeted
                && own.is_new_to(search)
            {
                evicted.push(node.clone());
            }
        });
    }

    fn cost_ns(&self) -> f32 {
        let is_hosted = self.state().content.origin() == Origin::Hosted;
        match (&self.budgeted, self.budget()) {
            (Some(_), Some(budget)) if is_hosted => {
                upload_ns(budget.settings.device.as_ref(), self.bytes())
            }
            (Some(own), _) => own.cost_ns,
            (None, _) => 0.0,
        }
    }
}

/// Drops the recipe of a tensor that nothing can bring back any more: it has no handles, and only
/// its views refer to it, by which their bytes are counted.
fn forget_if_only_viewed<B: Backend>(owner: &Arc<Node<B>>) {
    let Some(own) = &owner.budgeted else {
        return;
    };
    let views = own.views().len();
    let mut state = owner.state();
    if owner.users() > 0 || Arc::strong_count(owner) > views || !state.content.is_recorded() {
        return;
    }
    let unneeded = match state.content.keep() {
        Some(unneeded) => unneeded,
        None => std::mem::replace(&mut state.content, Content::Gone),
    };
    // Its inputs may be dropped with it.
    drop(state);
    drop(unneeded);
}
