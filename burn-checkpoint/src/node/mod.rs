//! A node: the record of a managed tensor. What its [`TensorMeta`] says never changes; its
//! [`Content`](content::Content) is the tensor and how it comes back: kept, by its recipe, from the
//! host. Recipes refer to nodes by a [`Source`].
//!
//! - `handle.rs`: the tensor of `Remat`, which refers to a node or has the inner backend's tensor.
//! - `meta.rs`, `content.rs` and `budgeted.rs`: what never changes, what does, and what only a
//!   budget needs.
//! - `recipe.rs`: recipes; `source.rs`: their references to nodes. `replay.rs`: bringing a node
//!   back.
//! - `entry.rs`: a node as scopes and budgets see it, of any backend; `as_entry.rs`: what they do
//!   with it.
//! - `gradient.rs`: gradients, which are no nodes.
//! - `kind.rs` and `extent.rs`: tensors of the inner backend, and their size. `drops.rs`: drops
//!   that wait.

mod as_entry;
pub(crate) mod budgeted;
pub(crate) mod content;
pub(crate) mod drops;
pub(crate) mod entry;
pub(crate) mod extent;
pub(crate) mod gradient;
pub(crate) mod handle;
pub(crate) mod kind;
pub(crate) mod meta;
pub(crate) mod recipe;
pub(crate) mod replay;
pub(crate) mod source;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use burn_backend::Backend;
use parking_lot::{Mutex, MutexGuard};

use crate::budget::Budget;
use crate::budget::counted::CountedBytes;
use crate::budget::memory::MemoryStats;
use crate::observe::trace::{self, EventKind, Traced};
use crate::record::step::{Lineage, Step};
use budgeted::Budgeted;
use content::State;
use kind::Value;
use meta::TensorMeta;
use recipe::Recipe;
use source::Source;

/// The record of a managed tensor.
pub(crate) struct Node<B: Backend> {
    pub meta: TensorMeta<B>,
    pub storage: Storage<B>,
    /// What only a budget needs.
    pub budgeted: Option<Budgeted<B>>,
    /// How many handles there are; recipes are not counted.
    users: AtomicU32,
    state: Mutex<State<B>>,
}

/// Whose storage a node's tensor has.
pub(crate) enum Storage<B: Backend> {
    /// Its own; of 0 bytes if it is that of an unmanaged tensor.
    Own(CountedBytes),
    /// That of another node, whose storage is its own. A view may be made under another budget, or
    /// by another thread.
    Shared {
        owner: Source<B>,
        memory: Arc<MemoryStats>,
    },
}

impl<B: Backend> Storage<B> {
    /// That of a node, or of the one whose storage this one has.
    pub fn shared(node: Source<B>, memory: Arc<MemoryStats>) -> Self {
        let owner = match &node.node().storage {
            Self::Own(_) => None,
            Self::Shared { owner, .. } => Some(owner.clone()),
        };
        let owner = owner.unwrap_or(node);
        Self::Shared { owner, memory }
    }
}

impl<B: Backend> Node<B> {
    /// A node with so many handles.
    #[inline]
    pub fn new(
        meta: TensorMeta<B>,
        storage: Storage<B>,
        budgeted: Option<Budgeted<B>>,
        users: u32,
        state: State<B>,
    ) -> Self {
        Self {
            meta,
            storage,
            budgeted,
            users: AtomicU32::new(users),
            state: Mutex::new(state),
        }
    }

    #[inline]
    pub fn state(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock()
    }

    /// The recipe, for calls that may run code of the user, during which the node must not be
    /// locked: that code may search for what to evict.
    pub fn recipe(&self) -> Option<Arc<dyn Recipe<B>>> {
        self.state().content.recipe().cloned()
    }

    #[inline]
    pub fn users(&self) -> u32 {
        self.users.load(Ordering::Acquire)
    }

    /// The counters of its device, of the thread that made it.
    #[inline]
    pub fn memory(&self) -> &Arc<MemoryStats> {
        match &self.storage {
            Storage::Own(counted) => &counted.memory,
            Storage::Shared { memory, .. } => memory,
        }
    }

    /// The budget that it was made under.
    #[inline]
    pub fn budget(&self) -> Option<&Arc<Budget>> {
        self.memory().budget()
    }

    /// The node whose storage it has.
    #[inline]
    pub fn owner(&self) -> &Self {
        match &self.storage {
            Storage::Own(_) => self,
            Storage::Shared { owner, .. } => owner.node(),
        }
    }

    /// What counts the bytes of its storage.
    #[inline]
    pub fn counted(&self) -> &CountedBytes {
        match &self.owner().storage {
            Storage::Own(counted) => counted,
            Storage::Shared { .. } => unreachable!("a view refers to a node with its own storage"),
        }
    }

    /// Bytes of the tensor; 0 if it shares an unmanaged one's storage.
    #[inline]
    pub fn bytes(&self) -> u64 {
        match &self.storage {
            Storage::Own(counted) => counted.bytes,
            Storage::Shared { .. } => self.meta.extent.bytes,
        }
    }

    /// Bytes of the storage if it is the tensor's own, else 0.
    #[inline]
    pub fn own_bytes(&self) -> u64 {
        match &self.storage {
            Storage::Own(counted) => counted.bytes,
            Storage::Shared { .. } => 0,
        }
    }

    /// When it was made, under a budget.
    #[inline]
    pub fn step(&self) -> Step {
        self.budgeted.as_ref().map_or(Step::FIRST, |own| own.step)
    }

    #[inline]
    pub fn lineage(&self) -> Lineage {
        let own = self.budgeted.as_ref();
        own.map_or(Lineage::Activation, |own| own.lineage)
    }

    /// Whether its storage stays without handles, because several recipes or a scope start from it.
    #[inline]
    pub fn is_branch_point(&self) -> bool {
        let own = self.budgeted.as_ref();
        own.is_some_and(Budgeted::is_branch_point)
    }

    /// Whether the storage stays when the last handle is dropped, given the number of recipes that
    /// refer to the node: that of a branch point does.
    #[inline]
    pub fn outlasts_handles(&self, state: &State<B>, recipes: usize) -> bool {
        let Some(own) = &self.budgeted else {
            return false;
        };
        if !own.is_branch_point()
            && recipes > 1
            && state.content.is_recorded()
            && state.home.region().is_none()
            && self
                .budget()
                .is_some_and(|budget| budget.keeps_branch_points())
        {
            own.is_branch_point.store(true, Ordering::Relaxed);
        }
        own.is_branch_point()
    }

    /// Takes the storage out of a node, if it can come back, and returns it with the bytes that
    /// this frees. The caller drops it after releasing the lock, by [`Self::release`] unless it
    /// counts an eviction.
    #[inline]
    pub fn vacate(&self, state: &mut State<B>) -> Option<Vacated<B>> {
        if state.content.is_kept() || state.locks > 0 {
            return None;
        }
        let value = state.content.take()?;
        let freed_bytes = self.counted().remove();
        Some(Vacated { value, freed_bytes })
    }

    /// Takes the storage out of a node for the caller to use.
    #[inline]
    pub fn take_value(&self, state: &mut State<B>) -> Option<Value<B>> {
        let value = state.content.take()?;
        self.emit(EventKind::Free, self.counted().remove());
        Some(value)
    }

    /// Drops a storage that [`Self::vacate`] returned, if it did, once the lock is released.
    #[inline]
    pub fn release(&self, vacated: Option<Vacated<B>>) {
        if let Some(Vacated { value, freed_bytes }) = vacated {
            drops::release(value);
            self.emit(EventKind::Free, freed_bytes);
        }
    }

    /// Counts a storage that was uploaded from the host.
    pub fn uploaded(&self) {
        let bytes = self.bytes();
        let counts = &self.memory().counts;
        counts.count(|stats| stats.uploaded_bytes += bytes);
        self.emit(EventKind::Upload, bytes);
    }

    /// Counts that it was brought back.
    pub fn was_restored(&self) {
        if let Some(own) = &self.budgeted {
            own.restores.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What the tensor is for.
    pub fn kind(&self) -> trace::Kind {
        match self.meta.op.name {
            _ if self.lineage() == Lineage::Gradient => trace::Kind::Gradient,
            name if name.ends_with("_random") || self.meta.dtype.is_bool() => trace::Kind::Mask,
            name if name.ends_with("_from_data") => trace::Kind::Input,
            _ => trace::Kind::Activation,
        }
    }

    #[inline]
    pub fn emit(&self, kind: impl FnOnce(Traced) -> EventKind, bytes: u64) {
        if trace::is_on() {
            let memory = self.memory();
            let kind = kind(Traced {
                op: self.meta.op.name,
                node: self.meta.id,
            });
            trace::emit(kind, bytes, memory.counts.live(), Some(memory.device));
        }
    }
}

/// A storage that was taken out of its node.
pub(crate) struct Vacated<B: Backend> {
    pub value: Value<B>,
    /// Bytes that this frees once it is dropped.
    pub freed_bytes: u64,
}

impl<B: Backend> Drop for Node<B> {
    fn drop(&mut self) {
        let content = &self.state.get_mut().content;
        let (occupies_device, is_on_host) = (content.occupies_device(), content.is_on_host());
        if occupies_device {
            let bytes = self.counted().remove();
            self.emit(EventKind::Free, bytes);
        }
        if is_on_host {
            self.memory().prefetch.forget(self.meta.id);
        }
        if let (Some(budget), Some(own)) = (self.budget(), &self.budgeted) {
            budget.forget(own.place);
        }
    }
}
