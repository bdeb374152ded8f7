//! A node as scopes, budgets and the prefetch queue see it, whatever its backend and its recipe.

use std::sync::{Arc, Weak};

use crate::clock::Lineage;
use crate::op::OpInfo;
use crate::policy::{Policy, SavePolicy};
use crate::region::Region;
use crate::trace::Kind;

/// What is shown an input and a way to refer to it.
pub(crate) type VisitSource<'a> = dyn FnMut(&dyn AnyEntry, &dyn Fn() -> Arc<dyn AnyEntry>) + 'a;

/// A node of any backend.
pub(crate) trait AnyEntry: Send + Sync {
    /// What a policy does with the storage (for a view: with the tensor it is a view of), if there are handles of the node.
    fn save_policy(&self, policy: &Policy) -> Option<SavePolicy>;
    /// Bytes of its storage, a view's too.
    fn storage_bytes(&self) -> u64;
    fn info(&self) -> NodeInfo;
    /// What it is for.
    fn kind(&self) -> Kind;
    /// Drops the storage if it can come back. Returns the bytes that this frees.
    fn evict(&self) -> u64;
    /// In verify mode: replays what is about to be evicted, and compares.
    fn rehearse(self: Arc<Self>);
    /// Starts to move the storage to host memory. `own` is this node. Returns whether it did.
    fn offload(&self, own: Weak<dyn AnyEntry>) -> bool;
    /// What it is a view or a reshaped copy of, if it holds that tensor's storage and that tensor was evicted: it is made resident.
    fn restore_viewed(&self) -> Option<Arc<dyn AnyEntry>>;
    /// Whether the copy to the host is complete. If so, the recipe is dropped.
    fn has_arrived(&self) -> bool;
    /// Uploads the host copy before it is asked for, if it is complete. Returns whether it is on the device now.
    fn prefetch(&self) -> bool;
    /// Drops what was uploaded before it was asked for; the host copy stays.
    fn drop_prefetched(&self);
    /// Marks its storage as a candidate for eviction. The node that counts the storage's bytes, if it was not marked before.
    fn list(self: Arc<Self>) -> Option<Arc<dyn AnyEntry>>;
    /// Takes the mark of [`Self::list`] off the storage that this node counts.
    fn unlist(&self);
    /// The storage that this node counts, if it is resident and can come back.
    fn group(self: Arc<Self>) -> Option<Group>;
    /// If it is resident, drops its recipe and its host copy: the storage stays. Does nothing to what is not resident.
    fn settle(&self);
    /// Takes it out of the counters: it is state that outlives its step.
    fn retire(&self);
    /// A scope ends that it is a result of. It belongs to the scope around from then on, and gives up its recipe if there is none and no
    /// budget may evict it. What was made outside of the ended scope stays as it is. Returns the bytes of a storage of its own
    /// if the outer scope has to list it.
    fn leave(&self, ended: &Arc<Region>, outer: Option<&Arc<Region>>) -> Option<u64>;
    /// Shows the inputs that would have to come back first, each with a way to refer to it.
    fn sources(&self, visit: &mut VisitSource<'_>);
    /// Whether it is there during its uses only.
    fn is_delivered(&self) -> bool;
    /// What was remembered since it was evicted.
    fn chain_ns(&self) -> Option<f32>;
    /// Remembers the nanoseconds of the longest chain of evicted inputs that ends with it.
    fn remember_chain(&self, ns: f32);
    /// Estimated nanoseconds to run this node's recipe alone, or to upload it.
    fn cost_ns(&self) -> f32;
}

/// The state of a node at one time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeInfo {
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
    /// The storage is counted no more.
    pub retired: bool,
    pub op: &'static OpInfo,
    pub lineage: Lineage,
}

/// The resident tensors with one storage, which is freed when all of them are evicted.
pub(crate) struct Group {
    pub members: Vec<Arc<dyn AnyEntry>>,
    pub bytes: u64,
    /// Whether handles refer to any of them.
    pub has_users: bool,
    /// Whether one comes back only by all writes into it.
    pub overwrites: bool,
    /// Whether one is in use, or cannot come back.
    pub is_held: bool,
    /// The number of the operation that used any of them last.
    pub last_used: u64,
}

impl Group {
    /// Without members.
    pub fn new(bytes: u64) -> Self {
        Self {
            members: Vec::with_capacity(1),
            bytes,
            has_users: false,
            overwrites: false,
            is_held: false,
            last_used: 0,
        }
    }
}

/// Whether and how a tensor without storage can come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// It cannot: its storage stays as long as the node.
    Fixed,
    /// By its recipe.
    Recorded,
    /// By its recipe, which is never dropped: it stands for data elsewhere.
    Source,
    /// By its copy in host memory.
    Hosted,
}
