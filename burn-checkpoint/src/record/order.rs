//! Which results are sure to lie in memory in the order of their shape.
//!
//! A tensor that comes back from the host does. Any other result would come back in another order
//! than it had; a matmul or a sum may then add up in another order, and its last bits differ.
//! Burn's traits do not expose a tensor's order, so it is derived from the operation; a result
//! whose order is not sure is computed again. The rules hold on burn-flex and on CubeCL's backends.

use burn_backend::Shape;

use crate::record::op::OpInfo;
use crate::record::work::Work;

/// What is known of the operands' order.
#[derive(Default)]
pub(super) struct Order {
    /// Elements of the largest operand whose order is not sure: an unmanaged one, or a managed one
    /// that is not row-major.
    pub odd_elements: u64,
    /// Dimensions of the first operand.
    pub rank: Option<usize>,
    /// The first plain number among the arguments: the dimension of a softmax.
    pub number: Option<usize>,
}

impl Order {
    /// An operand.
    #[inline]
    pub fn see(&mut self, shape: &Shape, in_order: bool) {
        self.rank.get_or_insert(shape.num_dims());
        if !in_order {
            self.odd_elements = self.odd_elements.max(shape.num_elements() as u64);
        }
    }

    /// Whether a result of so many elements is sure to lie in the order of its shape.
    pub fn is_kept(&self, op: &OpInfo, elements: u64) -> bool {
        // What is smaller than the result is broadcast; the result has a buffer of its own, or that
        // of an operand of its size.
        let ordered = self.odd_elements == 0 || self.odd_elements < elements;
        match op.work {
            // Matmul, linear and attention are new, whatever the operands are. Convolutions give
            // channels last on CubeCL's backends.
            Work::Compute => {
                op.name.ends_with("matmul") || matches!(op.name, "linear" | "attention")
            }
            Work::New | Work::Fixed => true,
            // A reshape of what lies in another order may be a copy or a view.
            Work::View => self.odd_elements == 0 && op.keeps_order,
            Work::Norm if op.name == "layer_norm" => ordered,
            // Along another dimension than the last one burn-flex swaps the two, computes, and
            // swaps them back.
            Work::Norm => {
                ordered && self.rank.is_some() && self.rank == self.number.map(|dim| dim + 1)
            }
            Work::Cheap | Work::Math => ordered,
            Work::Reduce => self.odd_elements == 0,
            // Rows copied one by one into a new buffer.
            Work::Index if op.name == "embedding" || op.name.ends_with("_select") => true,
            // Images: channels last on CubeCL.
            Work::Index => self.odd_elements == 0 && op.group != "ModuleOps",
            Work::Sort | Work::Pass => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::op::op_table;

    /// Of operations with a result of 64 elements: elements of the largest operand in another
    /// order, rank, dimension, and whether the result is in order.
    #[test]
    fn an_order_is_kept_or_not() {
        const LAST: (Option<usize>, Option<usize>) = (Some(3), Some(2));
        let elementwise = "float_add gelu layer_norm softmax";
        for (names, odd_elements, (rank, number), is_kept) in [
            // An operand that is broadcast does not matter.
            (elementwise, 0, LAST, true),
            (elementwise, 8, LAST, true),
            (elementwise, 64, LAST, false),
            (elementwise, 128, LAST, false),
            // A product or a selection is new, but for channels last.
            ("float_matmul linear attention", 1024, LAST, true),
            ("embedding float_select", 1024, LAST, true),
            ("conv2d max_pool2d interpolate", 0, LAST, false),
            // A softmax along another dimension is swapped.
            ("softmax", 0, (Some(3), Some(1)), false),
            ("softmax", 0, (Some(3), None), false),
            ("softmax", 0, (None, Some(2)), false),
            // Views.
            ("float_reshape float_detach", 0, LAST, true),
            ("float_reshape", 8, LAST, false),
            ("float_swap_dims float_slice", 0, LAST, false),
        ] {
            for name in names.split(' ') {
                let op = op_table().find(|op| op.name == name).expect("a row");
                let order = Order {
                    odd_elements,
                    rank,
                    number,
                };
                let found = order.is_kept(op, 64);
                assert_eq!(found, is_kept, "{name} {odd_elements} {rank:?} {number:?}");
            }
        }
    }
}
