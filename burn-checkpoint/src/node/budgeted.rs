//! What only a budget needs of a node.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use burn_backend::Backend;
use parking_lot::Mutex;

use crate::node::Node;
use crate::record::step::{Lineage, Step};

/// What only a budget needs of a node: absent in one that was made without a budget.
pub(crate) struct Budgeted<B: Backend> {
    /// Its place among the results of its budget, from 1; 0 if it has none.
    pub place: u64,
    /// When it was made.
    pub step: Step,
    pub lineage: Lineage,
    /// Estimated nanoseconds to run the operation again.
    pub cost_ns: f32,
    /// Of the node that runs an operation with several results: the bytes of all of these.
    pub parts_bytes: u64,
    /// Whether the operation wrote into its operand's storage: it comes back only by all writes
    /// before it too.
    pub overwrites: bool,
    /// Whether its storage is in the budget's list of what may be evicted.
    pub is_listed: AtomicBool,
    /// The number of the last search that saw it.
    pub search: AtomicU32,
    /// A branch point: several recipes start from it (a residual stream), or a scope does (the
    /// result of another scope). Its storage stays when its last handle is dropped.
    ///
    /// Autodiff may save nothing of a residual stream. What is evicted of a block could then be
    /// replayed only from the beginning of the model.
    pub is_branch_point: AtomicBool,
    /// The thread's operation count at the last use.
    pub last_used: AtomicU64,
    /// How often it was brought back.
    pub restores: AtomicU32,
    /// Other tensors with this storage.
    views: Mutex<Vec<Weak<Node<B>>>>,
}

impl<B: Backend> Budgeted<B> {
    /// Of a tensor with this number that is no result of the budget's own.
    #[inline]
    pub fn new(id: u64, step: Step, lineage: Lineage, cost_ns: f32) -> Self {
        Self {
            place: 0,
            step,
            lineage,
            cost_ns,
            parts_bytes: 0,
            overwrites: false,
            is_listed: AtomicBool::new(false),
            search: AtomicU32::new(0),
            is_branch_point: AtomicBool::new(false),
            last_used: AtomicU64::new(id),
            restores: AtomicU32::new(0),
            views: Mutex::new(Vec::new()),
        }
    }

    #[inline]
    pub fn is_branch_point(&self) -> bool {
        self.is_branch_point.load(Ordering::Relaxed)
    }

    pub fn last_used(&self) -> u64 {
        self.last_used.load(Ordering::Relaxed)
    }

    /// Marks the storage as listed. Returns whether it was not.
    pub fn list(&self) -> bool {
        !self.is_listed.swap(true, Ordering::Relaxed)
    }

    /// Marks the node as seen by this search. Returns whether it was not.
    pub fn is_new_to(&self, search: u32) -> bool {
        self.search.swap(search, Ordering::Relaxed) != search
    }

    /// Adds another tensor with this storage.
    pub fn add_view(&self, view: &Arc<Node<B>>) {
        let mut views = self.views.lock();
        if views.len() == views.capacity() {
            views.retain(|view| view.strong_count() > 0);
        }
        views.push(Arc::downgrade(view));
    }

    /// The other tensors with this storage.
    pub fn views(&self) -> Vec<Arc<Node<B>>> {
        self.views.lock().iter().filter_map(Weak::upgrade).collect()
    }
}
