//! Gradients, and constants that backward makes, such as the zeros that gradients are added to.
//! They are not computed again, so most are no nodes: a handle has the tensor itself, and the
//! budget counts the bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::budget::counted::{CountedBytes, Marked};
use crate::budget::memory::MemoryStats;
use crate::node::extent::Extent;
use crate::record::step::{Lineage, Phase, Step};

/// The mark of a tensor that was computed from gradients under a budget: a gradient, and after its
/// step a parameter or state of an optimizer. Also that of a constant of backward. The bytes of the
/// storage count until all handles of it and of its views are dropped: those of a gradient at most
/// until the next forward pass begins, those of a constant until the training loop ends the step.
#[derive(Clone)]
pub struct Gradient(Arc<Mark>);

struct Mark {
    /// The step in whose backward pass it was made; `None` if it was computed from state.
    step: Option<u64>,
    /// Whether it is new there, or computed from such a tensor without a recipe. What is computed
    /// from it need not be a gradient.
    is_constant: bool,
    /// Whether a reshape of it is a view.
    is_contiguous: bool,
    /// How many views of it there are.
    views: AtomicUsize,
    extent: Extent,
    counted: Counted,
}

/// Where the bytes of a storage are counted.
enum Counted {
    /// Here.
    Here { _bytes: CountedBytes },
    /// By the tensor that this is a view of.
    By(Gradient),
}

impl Gradient {
    /// Counts the bytes of a new storage: of a gradient, of state, or of a constant, which has the
    /// lineage of activations. `None` without a budget.
    pub(crate) fn new(
        memory: Arc<MemoryStats>,
        extent: Extent,
        step: Step,
        lineage: Lineage,
        is_contiguous: bool,
    ) -> Option<Self> {
        let is_constant = lineage == Lineage::Activation;
        let marked = if is_constant {
            Marked::Constant
        } else {
            Marked::Gradient
        };
        let counted = Counted::Here {
            _bytes: CountedBytes::marked(memory, extent.bytes, marked)?,
        };
        Some(Self(Arc::new(Mark {
            step: (lineage != Lineage::State).then_some(step.number),
            is_constant,
            is_contiguous,
            views: AtomicUsize::new(0),
            extent,
            counted,
        })))
    }

    /// A view of it.
    pub(crate) fn view(&self, extent: Extent, is_contiguous: bool) -> Self {
        let owner = match &self.0.counted {
            Counted::Here { .. } => self,
            Counted::By(owner) => owner,
        };
        owner.0.views.fetch_add(1, Ordering::Relaxed);
        let counted = Counted::By(owner.clone());
        Self(Arc::new(Mark {
            step: self.0.step,
            is_constant: self.0.is_constant,
            is_contiguous,
            views: AtomicUsize::new(0),
            extent,
            counted,
        }))
    }

    /// Whether it was made in this backward pass.
    #[inline]
    pub(crate) fn is_of(&self, step: Step) -> bool {
        step.phase != Phase::Forward && Some(step.number) == self.0.step
    }

    #[inline]
    pub(crate) fn is_constant(&self) -> bool {
        self.0.is_constant
    }

    /// Whether a reshape of it is a view.
    #[inline]
    pub(crate) fn is_contiguous(&self) -> bool {
        self.0.is_contiguous
    }

    /// Bytes of a storage of its own, else 0.
    #[inline]
    pub(crate) fn own_bytes(&self) -> u64 {
        match self.0.counted {
            Counted::Here { .. } => self.0.extent.bytes,
            Counted::By(_) => 0,
        }
    }

    #[inline]
    pub(crate) fn extent(&self) -> Extent {
        self.0.extent
    }

    /// Whether nothing else refers to it: no handle, no view, no recipe.
    #[inline]
    pub(crate) fn is_last(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// Whether nothing but views refers to it besides this handle.
    #[inline]
    pub(crate) fn has_one_handle(&self) -> bool {
        Arc::strong_count(&self.0) == 1 + self.0.views.load(Ordering::Relaxed)
    }
}

impl Drop for Mark {
    #[inline]
    fn drop(&mut self) {
        if let Counted::By(owner) = &self.counted {
            owner.0.views.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
