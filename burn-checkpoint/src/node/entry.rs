//! A node as scopes, budgets and the prefetch queue see it, whatever its backend and its recipe.

use std::sync::Arc;

use crate::host::ahead::UploadPlace;
use crate::observe::trace::Kind;
use crate::record::op::OpInfo;
use crate::record::step::{Lineage, Step};
use crate::scope::policy::{Policy, SavePolicy};
use crate::scope::region::Region;
use crate::scope::units::Unit;

/// A node of any backend.
pub(crate) trait AnyEntry: Send + Sync {
    /// What a policy does with the storage (for a view: with that of the tensor it is a view of);
    /// `None` if the node has no handles.
    fn save_policy(&self, policy: &Policy) -> Option<SavePolicy>;
    fn info(&self) -> NodeInfo;
    /// What it is for.
    fn kind(&self) -> Kind;
    /// Drops the storage if it can come back.
    fn evict(&self);
    /// Starts to move the storage to host memory, and drops the recipe. Returns whether it did.
    fn offload(self: Arc<Self>) -> bool;
    /// Returns the tensor that this is a view of, made resident, if this node holds its storage and
    /// it was evicted.
    fn restore_viewed(&self) -> Option<Arc<dyn AnyEntry>>;
    /// Uploads the host copy before its use, if it is complete. Returns whether it is on the device
    /// now.
    fn prefetch(&self) -> bool;
    /// Marks its storage as a candidate for eviction. Returns the node that counts the storage's
    /// bytes, if it was not marked before.
    fn list(self: Arc<Self>) -> Option<Arc<dyn AnyEntry>>;
    /// Removes the mark of [`Self::list`] from the storage that this node counts.
    fn unlist(&self);
    /// The storage that this node counts, if it is resident and can come back.
    fn group(self: Arc<Self>) -> Option<Group>;
    /// If the node is resident, drops its recipe and its host copy: the storage stays. Otherwise
    /// does nothing.
    fn settle(&self);
    /// Brings the node back and settles it.
    fn settle_back(self: Arc<Self>);
    /// Takes it out of the counters: it is state that outlives its step.
    fn retire(&self);
    /// Called at the end of the scope whose result this node is. Moves the node to the outer scope;
    /// if there is none, drops its recipe, unless a budget may evict it. A node made outside of the
    /// ended scope does not change. Returns the bytes of the node's own storage if the outer scope
    /// has to list it.
    fn leave(&self, ended: &Arc<Region>, outer: Option<&Arc<Region>>) -> Option<u64>;
    /// Adds the inputs that have to come back before this node can be replayed, without those that
    /// this search, by its number, has seen.
    fn sources(&self, search: u32, evicted: &mut Vec<Arc<dyn AnyEntry>>);
    /// Whether the scope that evicts it is this one.
    fn is_of_region(&self, region: &Arc<Region>) -> bool;
    /// Has this scope evict it, that of the next unit.
    fn move_to(&self, next: &Arc<Region>);
    /// The managed tensors that it is computed from, if it has a recipe.
    fn inputs(&self) -> Vec<Arc<dyn AnyEntry>>;
    /// Whether it is a parameter of a unit.
    fn is_of_unit(&self, unit: &Arc<Unit>) -> bool;
    /// The unit that it is a parameter of.
    fn unit(&self) -> Option<Arc<Unit>>;
    /// Puts a parameter that is delivered into a unit. Returns whether it is delivered.
    fn put_in_unit(&self, unit: &Arc<Unit>) -> bool;
    /// The place of a delivered tensor in the order of uploads, if it is in one.
    fn upload_place(&self) -> Option<UploadPlace>;
    /// Estimated nanoseconds to run this node's recipe alone, or to upload it.
    fn cost_ns(&self) -> f32;
}

/// The state of a node at one time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeInfo {
    pub origin: Origin,
    pub resident: bool,
    pub locked: bool,
    /// Whether the storage is the tensor's own: then a copy of it can move to the host.
    pub owns_storage: bool,
    pub users: u32,
    pub last_used: u64,
    /// The address of the node that counts the storage's bytes.
    pub owner: usize,
    /// Bytes of the storage; for a view those of the shared storage.
    pub owner_bytes: u64,
    /// The storage is counted no more.
    pub retired: bool,
    pub op: &'static OpInfo,
    /// The number of the operation that made it among those of its unit; 0 if there is none.
    pub operation: u32,
    pub lineage: Lineage,
    /// When it was made.
    pub step: Step,
    pub is_float: bool,
    /// Its place among the results of its budget.
    pub place: u64,
}

impl NodeInfo {
    /// Whether it was made in an earlier part of this step, or before it.
    pub fn is_before(&self, step: Step) -> bool {
        self.step.number < step.number || self.step.phase != step.phase
    }
}

/// The resident tensors with one storage, which is freed when all of them are evicted.
#[derive(Default)]
pub(crate) struct Group {
    pub members: Vec<Arc<dyn AnyEntry>>,
    pub bytes: u64,
    /// Whether handles refer to any of them.
    pub has_users: bool,
    /// Whether a member comes back only by all writes into the storage.
    pub overwrites: bool,
    /// How often a member was brought back, at most.
    pub restores: u32,
    /// Whether a member is in use, or cannot come back.
    pub is_held: bool,
    /// The number of the operation that used any of them last.
    pub last_used: u64,
}

/// Whether and how a tensor without storage can come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// It cannot: its storage stays as long as the node.
    Kept,
    /// By its recipe.
    Recorded,
    /// By its recipe, which is never dropped, for each use: it is delivered.
    Delivered,
    /// By its copy in host memory.
    Hosted,
}
