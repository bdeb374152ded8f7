//! The bytes of a storage, counted while it is resident.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::budget::memory::MemoryStats;

/// Counts the bytes of a storage on its device while it is resident: by each tensor with this
/// storage that says so, at most until this is dropped. A node has one for a storage of its own, a
/// gradient that is no node has one, and so has a parameter that was uploaded before its use.
pub(crate) struct CountedBytes {
    pub memory: Arc<MemoryStats>,
    pub bytes: u64,
    /// How many tensors with this storage are resident.
    residents: AtomicU32,
    /// Whether it outlives its step, and is counted no more.
    is_retired: AtomicBool,
    /// With what others it is retired, if not by itself.
    marked: Option<Marked>,
    /// How often such storages of the budget were retired before.
    retirements: u32,
}

/// Storages that outlive their step together: the gradients of a backward pass, or its constants,
/// that are no nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Marked {
    Gradient,
    /// It is new in backward, or computed from such a tensor without a recipe.
    Constant,
}

impl CountedBytes {
    /// Of a storage that is not resident yet.
    #[inline]
    pub fn new(memory: Arc<MemoryStats>, bytes: u64) -> Self {
        Self {
            memory,
            bytes,
            residents: AtomicU32::new(0),
            is_retired: AtomicBool::new(false),
            marked: None,
            retirements: 0,
        }
    }

    /// Of a storage that is resident until this is dropped.
    pub fn resident(memory: Arc<MemoryStats>, bytes: u64) -> Self {
        let counted = Self::new(memory, bytes);
        counted.add();
        counted
    }

    /// As [`Self::resident`], of a gradient or a constant, which is retired with all others of its
    /// budget; `None` without a budget.
    pub fn marked(memory: Arc<MemoryStats>, bytes: u64, marked: Marked) -> Option<Self> {
        let retirements = memory.budget()?.marked(marked).lock().add(bytes);
        let mut counted = Self::resident(memory, bytes);
        counted.marked = Some(marked);
        counted.retirements = retirements;
        Some(counted)
    }

    /// One more tensor with this storage is resident.
    #[inline]
    pub fn add(&self) {
        if self.residents.fetch_add(1, Ordering::AcqRel) == 0 {
            self.memory.counts.add(self.bytes);
        }
    }

    /// One tensor with this storage is no longer resident. Returns the bytes that this frees.
    #[inline]
    pub fn remove(&self) -> u64 {
        if self.residents.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.memory.counts.remove(self.bytes);
            self.bytes
        } else {
            0
        }
    }

    /// How many tensors with this storage are resident; one more once it is retired.
    pub fn residents(&self) -> u32 {
        self.residents.load(Ordering::Acquire)
    }

    pub fn is_retired(&self) -> bool {
        self.is_retired.load(Ordering::Acquire)
    }

    /// The storage outlives its step: it is counted no more. Returns whether it was.
    pub fn retire(&self) -> bool {
        if self.is_retired.swap(true, Ordering::AcqRel) {
            return false;
        }
        // One more than the number of residents: the count does not reach 0 again, so the storage
        // is not counted again.
        let was_counted = self.residents.fetch_add(1, Ordering::AcqRel) > 0;
        if was_counted {
            self.memory.counts.remove(self.bytes);
        }
        was_counted
    }
}

impl Drop for CountedBytes {
    #[inline]
    fn drop(&mut self) {
        if *self.residents.get_mut() == 0 || *self.is_retired.get_mut() {
            return;
        }
        let counts = match (self.marked, self.memory.budget()) {
            (Some(marked), Some(budget)) => {
                let mut marked = budget.marked(marked).lock();
                marked.remove(self.bytes, self.retirements)
            }
            _ => true,
        };
        if counts {
            self.memory.counts.remove(self.bytes);
        }
    }
}

/// Bytes of the storages of a budget that are marked alike.
#[derive(Default)]
pub(crate) struct MarkedBytes {
    pub bytes: u64,
    retirements: u32,
}

impl MarkedBytes {
    /// Adds a storage. Returns how often such storages were retired before.
    #[inline]
    fn add(&mut self, bytes: u64) -> u32 {
        self.bytes += bytes;
        self.retirements
    }

    /// Removes a storage that was added after so many retirements. Returns whether it still counts.
    #[inline]
    fn remove(&mut self, bytes: u64, retirements: u32) -> bool {
        let counts = self.retirements == retirements;
        if counts {
            self.bytes -= bytes;
        }
        counts
    }

    /// All are state from now on: none counts any more. Returns their bytes.
    pub fn retire(&mut self) -> u64 {
        self.retirements = self.retirements.wrapping_add(1);
        std::mem::take(&mut self.bytes)
    }
}
