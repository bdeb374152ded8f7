//! Gradients. They are not computed again, so they are no nodes: a handle holds the tensor itself, and its budget counts the bytes.

use std::sync::Arc;

use parking_lot::Mutex;

use super::limiter::Budget;
use crate::clock::{Phase, Step};

/// The bytes of a gradient, counted by the budget that it was made under until all handles of it and of its views are dropped, or its step is
/// over.
#[derive(Clone)]
pub struct Gradient {
    counted: Arc<Counted>,
    /// Whether a reshape of it is a view.
    pub(crate) is_contiguous: bool,
}

struct Counted {
    bytes: u64,
    /// The step in whose backward pass it was made.
    step: u64,
    /// How often gradients were retired before.
    retired: u64,
    budget: Arc<Budget>,
}

impl Gradient {
    /// Counts the bytes of a new storage.
    #[inline]
    pub(crate) fn new(budget: Arc<Budget>, bytes: u64, step: Step, is_contiguous: bool) -> Self {
        budget.counts.add(bytes);
        let counted = Arc::new(Counted {
            bytes,
            step: step.number,
            retired: budget.gradients.add(bytes),
            budget,
        });
        Self {
            counted,
            is_contiguous,
        }
    }

    /// A view of it.
    #[inline]
    pub(crate) fn view(&self, is_contiguous: bool) -> Self {
        Self {
            counted: self.counted.clone(),
            is_contiguous,
        }
    }

    /// Whether what is computed from it in this step is a gradient too.
    #[inline]
    pub(crate) fn is_of(&self, step: Step) -> bool {
        step.phase == Phase::Backward && step.number == self.counted.step
    }

    /// Bytes of its storage.
    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.counted.bytes
    }

    /// Whether this is the only handle of its storage.
    #[inline]
    pub(crate) fn is_last(&self) -> bool {
        Arc::strong_count(&self.counted) == 1
    }
}

impl Drop for Counted {
    #[inline]
    fn drop(&mut self) {
        if self.budget.gradients.remove(self.bytes, self.retired) {
            self.budget.counts.remove(self.bytes);
        }
    }
}

/// The gradients of a budget that count.
#[derive(Default)]
pub(super) struct Gradients(Mutex<Live>);

#[derive(Clone, Copy, Default)]
struct Live {
    bytes: u64,
    retired: u64,
}

impl Gradients {
    /// Adds a storage. Returns how often gradients were retired before.
    #[inline]
    fn add(&self, bytes: u64) -> u64 {
        let mut live = self.0.lock();
        live.bytes += bytes;
        live.retired
    }

    /// Removes a storage that was added after so many retirements. Returns whether it still counts.
    #[inline]
    fn remove(&self, bytes: u64, retired: u64) -> bool {
        let mut live = self.0.lock();
        let counts = live.retired == retired;
        if counts {
            live.bytes -= bytes;
        }
        counts
    }

    pub fn bytes(&self) -> u64 {
        self.0.lock().bytes
    }

    /// Gradients are state from now on: none of them counts any more. Returns their bytes.
    pub fn retire(&self) -> u64 {
        let mut live = self.0.lock();
        live.retired += 1;
        std::mem::take(&mut live.bytes)
    }
}
