//! What an operation costs, and how large its result will be.

use std::hash::{Hash, Hasher};
use std::time::Instant;

use burn_backend::Shape;
use rustc_hash::FxHasher;

use super::Costs;
use crate::op::{OpInfo, Work};

/// What is known of an operation before it runs, collected from its operands.
pub(crate) struct OpCost {
    op: &'static OpInfo,
    /// Elements of the largest operand.
    largest: u64,
    /// The product of all operands' elements.
    product: f64,
    /// Elements that one output element of a convolution needs.
    window: u64,
    /// The product of the leading dimensions that a batched product has.
    batch: u64,
    operands: u32,
    hasher: FxHasher,
    /// Bytes of the result as it was last time, if room was made for so many.
    pub expected: Option<u64>,
}

/// The time an operation takes, where that is its cost.
pub(crate) struct Clock(Option<Instant>);

impl Clock {
    /// Starts now if costs are measured.
    #[inline]
    pub fn start(costs: Costs) -> Self {
        Self((costs == Costs::Measured).then(Instant::now))
    }

    /// Nanoseconds since the start; `None` if costs are estimated.
    #[inline]
    pub fn ns(&self) -> Option<f32> {
        self.0.map(|start| start.elapsed().as_nanos() as f32)
    }
}

/// The key by which the size of results is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Expected(u64);

/// Nanoseconds to start any operation.
const START_NS: f32 = 500.0;

/// Nanoseconds an element, estimated; only their ratios matter. `cargo bench -p burn-checkpoint --bench calibrate` prints
/// what a machine takes.
fn element_ns(work: Work) -> f32 {
    match work {
        Work::Compute => 0.05,
        Work::Sort => 60.0,
        Work::Norm => 4.0,
        Work::Math => 6.0,
        Work::Reduce => 0.4,
        Work::Index => 2.0,
        Work::Cheap => 0.6,
        Work::View | Work::Fixed | Work::Pass => 0.0,
    }
}

impl OpCost {
    pub fn new(op: &'static OpInfo) -> Self {
        let mut hasher = FxHasher::default();
        op.name.hash(&mut hasher);
        Self {
            op,
            largest: 0,
            product: 1.0,
            window: 1,
            batch: 1,
            operands: 0,
            hasher,
            expected: None,
        }
    }

    /// Adds an operand.
    pub fn operand(&mut self, shape: &Shape) {
        let dims = shape.as_slice();
        let mut elements = 1;
        self.hasher.write_usize(dims.len());
        for &dim in dims {
            self.hasher.write_usize(dim);
            elements *= dim as u64;
        }
        self.largest = self.largest.max(elements);
        if self.operands < 2 {
            self.product *= elements.max(1) as f64;
        }
        match self.operands {
            0 if dims.len() > 2 => {
                self.batch = dims[..dims.len() - 2]
                    .iter()
                    .map(|dim| *dim as u64)
                    .product();
            }
            1 => {
                self.window = elements / dims.first().map_or(1, |dim| (*dim as u64).max(1));
                if dims.len() < 3 {
                    self.batch = 1;
                }
            }
            _ => {}
        }
        self.operands += 1;
    }

    /// Estimated nanoseconds, given the elements of the result.
    pub fn ns(&self, elements: u64) -> f32 {
        let work = match self.op.work {
            Work::Compute => self.products(elements),
            _ => self.largest.max(elements) as f32,
        };
        START_NS + element_ns(self.op.work) * work
    }

    /// Multiplications of a product. For `[m, k] x [k, n]` the elements of operands and result multiply to `(m k n)²`.
    fn products(&self, elements: u64) -> f32 {
        if self.op.name.starts_with("conv") {
            return (elements * self.window) as f32;
        }
        (self.product * elements.max(1) as f64 / self.batch.max(1) as f64).sqrt() as f32
    }

    /// Bytes of the largest operand, if its elements have four.
    pub fn largest_bytes(&self) -> u64 {
        self.largest * 4
    }

    /// The key of this operation on operands of these shapes.
    pub fn key(&self) -> Expected {
        Expected(self.hasher.finish())
    }
}
