//! What is known of a tensor for good, and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, Shape};

use crate::budget::Place;
use crate::ledger::Ledger;
use crate::op::OpInfo;
use crate::recipe::Source;
use crate::trace::{self, EventKind};
use crate::verify;

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
    /// Whether its budget has it among what may be evicted.
    pub listed: AtomicBool,
    /// Where its budget keeps what it costs while it is evicted.
    pub place: Place,
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

/// Bytes of a tensor's elements.
#[inline]
pub(crate) fn bytes(elements: usize, dtype: DType) -> u64 {
    elements as u64 * dtype.size() as u64
}

impl<B: Backend> Head<B> {
    /// A tensor with a storage of its own, made outside of budgets.
    #[inline]
    pub fn new(
        op: &'static OpInfo,
        id: u64,
        shape: Shape,
        dtype: DType,
        device: Device<B>,
        ledger: Arc<Ledger>,
    ) -> Self {
        Self {
            op,
            id,
            bytes: bytes(shape.num_elements(), dtype),
            shape,
            dtype,
            device,
            contiguous: true,
            row_major: true,
            group: None,
            residents: AtomicU32::new(0),
            listed: AtomicBool::new(false),
            place: Place::default(),
            retired: AtomicBool::new(false),
            users: AtomicU32::new(0),
            ledger,
            cost_ns: 0.0,
            step: 0,
            lineage: Lineage::Activation,
        }
    }

    /// The node that counts the bytes of the storage.
    #[inline]
    pub fn owner(&self) -> &Head<B> {
        match &self.group {
            Some(group) => group.node().head(),
            None => self,
        }
    }

    /// Bytes of a storage that is no other tensor's.
    #[inline]
    pub fn own_bytes(&self) -> u64 {
        match self.group {
            Some(_) => 0,
            None => self.bytes,
        }
    }

    /// Counts storage that has come.
    #[inline]
    pub fn came(&self) {
        let owner = self.owner();
        if owner.residents.fetch_add(1, Ordering::AcqRel) == 0 {
            // Views may be made under other budgets, or by other threads.
            owner.ledger.add(owner.bytes);
        }
    }

    /// Counts storage that has come back. A replay that only compares may bring tensors back on several devices: no peak shows it.
    pub fn came_back(&self) {
        if !verify::is_rehearsing() {
            return self.came();
        }
        let owner = self.owner();
        if owner.residents.fetch_add(1, Ordering::AcqRel) == 0 {
            owner.ledger.add_unseen(owner.bytes);
        }
    }

    /// Counts storage that has gone. Returns the bytes this frees.
    #[inline]
    pub fn went(&self) -> u64 {
        let owner = self.owner();
        if owner.residents.fetch_sub(1, Ordering::AcqRel) == 1 {
            owner.ledger.remove(owner.bytes);
            owner.bytes
        } else {
            0
        }
    }

    /// Tells the counters of storage that has come from the host.
    pub fn uploaded(&self) {
        self.ledger.uploaded(self.bytes);
        self.emit(|op, node| EventKind::Upload { op, node }, self.bytes);
    }

    #[inline]
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
