//! What an operation costs, and the key by which the size of its result is remembered.

use std::fmt::{Debug, Write};
use std::hash::{Hash, Hasher};
use std::time::Instant;

use burn_backend::{DType, Shape};
use rustc_hash::FxHasher;

use crate::op::OpInfo;
use crate::products::{Operand, multiplications};
use crate::work::{self, Work};

/// Where an eviction's cost comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Costs {
    /// The operation and the shapes of its operands.
    Estimated,
    /// The time that the operation took.
    Measured,
}

/// What is known of an operation before it runs, collected from its operands.
pub(crate) struct OpCost {
    op: &'static OpInfo,
    /// Elements of the largest operand.
    largest: u64,
    /// The first three operands of a product.
    operands: Option<[Operand; 3]>,
    seen: usize,
    /// Whether a view had to copy.
    copies: bool,
    hasher: FxHasher,
    /// Bytes of the result as it was last time, if room was made for so many.
    pub expected: Option<u64>,
}

/// The time an operation takes, where that is its cost.
pub(crate) struct Timer(Option<Instant>);

impl Timer {
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
pub(crate) struct ResultKey(u64);

impl OpInfo {
    /// Nanoseconds that a [`MemoryBudget`](crate::MemoryBudget) takes this operation to cost on operands of these shapes. Only
    /// ratios matter.
    ///
    /// ```
    /// use burn_checkpoint::op_table;
    ///
    /// let matmul = op_table().find(|op| op.name == "float_matmul").unwrap();
    /// let of_side = |n: usize| matmul.estimated_ns(&[[n, n].into(), [n, n].into()], &[n, n].into());
    /// assert!(of_side(2048) > 7.0 * of_side(1024));
    /// ```
    pub fn estimated_ns(&'static self, operands: &[Shape], result: &Shape) -> f32 {
        let mut cost = OpCost::new(self);
        operands
            .iter()
            .for_each(|shape| cost.operand(shape, DType::F32));
        cost.ns(result.num_elements() as u64)
    }
}

impl OpCost {
    #[inline]
    pub fn new(op: &'static OpInfo) -> Self {
        let mut hasher = FxHasher::default();
        hasher.write_u64(op.key);
        Self {
            op,
            largest: 0,
            operands: (op.work == Work::Compute).then(Default::default),
            seen: 0,
            copies: false,
            hasher,
            expected: None,
        }
    }

    /// Adds an operand.
    pub fn operand(&mut self, shape: &Shape, dtype: DType) {
        let dims = shape.as_slice();
        let mut elements = 1;
        self.hasher.write_usize(dims.len());
        for dim in dims {
            self.hasher.write_usize(*dim);
            elements *= *dim as u64;
        }
        dtype.hash(&mut self.hasher);
        self.largest = self.largest.max(elements);
        if let Some(operands) = &mut self.operands
            && let Some(operand) = operands.get_mut(self.seen)
        {
            *operand = Operand::new(shape);
        }
        self.seen += 1;
    }

    /// Adds a plain argument, by what is printed of it: few types of arguments can be hashed.
    pub fn argument(&mut self, argument: &dyn Debug) {
        struct Text<'a>(&'a mut FxHasher);
        impl Write for Text<'_> {
            fn write_str(&mut self, part: &str) -> std::fmt::Result {
                self.0.write(part.as_bytes());
                Ok(())
            }
        }
        write!(Text(&mut self.hasher), "{argument:?}").expect("hashing does not fail");
    }

    /// The result of a view lies in another order than its operand: it is copied.
    pub fn copies(&mut self) {
        self.copies = true;
    }

    /// Estimated nanoseconds, given the elements of the result.
    pub fn ns(&self, elements: u64) -> f32 {
        let largest = self.largest.max(elements) as f64;
        let ns = match (&self.operands, self.op.work) {
            (Some(operands), _) => {
                let products = multiplications(self.op.name, operands, elements as f64);
                work::product_ns(self.op.name, products, largest)
            }
            (None, Work::View) if self.copies => work::COPY.ns(largest),
            _ => self.op.rate.ns(largest),
        };
        (work::START_NS + ns) as f32
    }

    /// Bytes of the largest operand, if its elements have four.
    pub fn largest_bytes(&self) -> u64 {
        self.largest * 4
    }

    /// The key of this operation on operands of these shapes and types with these arguments.
    pub fn key(&self) -> ResultKey {
        ResultKey(self.hasher.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::op_table;

    /// The key of a cast of so many elements.
    fn cast(elements: usize, from: DType, to: DType) -> ResultKey {
        let op = op_table()
            .find(|op| op.name == "float_cast")
            .expect("a row");
        let mut cost = OpCost::new(op);
        cost.operand(&[elements].into(), from);
        cost.argument(&to);
        cost.key()
    }

    #[test]
    fn a_size_is_that_of_shapes_types_and_arguments() {
        let key = cast(8, DType::F32, DType::F16);
        assert_eq!(key, cast(8, DType::F32, DType::F16));
        assert_ne!(key, cast(9, DType::F32, DType::F16));
        assert_ne!(key, cast(8, DType::F64, DType::F16));
        assert_ne!(key, cast(8, DType::F32, DType::F64));
    }
}
