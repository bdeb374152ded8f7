//! Measures the memory of a rank's optimizer: state and gradients.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;

/// The steps of a rank's optimizer and the bytes that it held: measured, not computed from a formula. Clones share the values.
#[derive(Clone, Debug, Default)]
pub struct Held(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    elements: AtomicU64,
    updates: AtomicU64,
    state_bytes: AtomicU64,
    gradient_bytes: AtomicU64,
}

impl Held {
    /// Elements that it updates, as seen in its last step.
    pub fn elements(&self) -> u64 {
        self.0.elements.load(Ordering::Relaxed)
    }

    /// Its steps.
    pub fn updates(&self) -> u64 {
        self.0.updates.load(Ordering::Relaxed)
    }

    /// Bytes of its state after its first step, and of the parameters that it keeps beside it on the host.
    pub fn state_bytes(&self) -> u64 {
        self.0.state_bytes.load(Ordering::Relaxed)
    }

    /// The most bytes of gradients at one time.
    pub fn gradient_bytes(&self) -> u64 {
        self.0.gradient_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn note_update(&self) {
        self.0.updates.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn note_gradients(&self, bytes: u64) {
        self.0.gradient_bytes.fetch_max(bytes, Ordering::Relaxed);
    }

    /// Records a step of `elements`, and measures the state if their number has changed: its size is fixed after the first step. Before
    /// a training with ranks a clone takes some steps of a few elements, to check that it can be sharded.
    pub(super) fn note_step(&self, elements: usize, measure: impl FnOnce() -> u64) {
        let elements = elements as u64;
        if self.0.elements.swap(elements, Ordering::Relaxed) != elements {
            self.0.state_bytes.store(measure(), Ordering::Relaxed);
        }
    }
}

/// Bytes of a module's gradients.
pub fn gradient_bytes<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    gradients: &GradientsParams,
) -> u64 {
    let mut count = Count {
        gradients,
        bytes: 0,
    };
    module.visit(&mut count);
    count.bytes
}

struct Count<'a> {
    gradients: &'a GradientsParams,
    bytes: u64,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Count<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let gradient = self.gradients.get::<B::InnerBackend, D>(param.id);
        let bytes = |gradient: Tensor<B::InnerBackend, D>| {
            (gradient.shape().num_elements() * gradient.dtype().size()) as u64
        };
        self.bytes += gradient.map_or(0, bytes);
    }
}
