//! Where CubeCL puts the result of an operation: a view of its operand, the memory of an operand
//! that no other tensor shares, or new memory. Its kernels read any strides and take no memory
//! beside their results. Seen in the source of burn-cubecl 0.21.0 and cubecl-runtime 0.10.0.

use burn_ir::{
    BaseOperationIr, FloatOperationIr, NumericOperationIr as Numeric, OperationIr, TensorIr,
};
use burn_std::{ReshapeAction, Strides, reshape_action};

use crate::device::Kernels;
use crate::rules::{self, Operand, Placement, Plan, bytes, row_major};
#[cfg(feature = "fusion")]
use crate::trace;

/// A view may begin at a multiple of so many bytes; on CUDA it is also the largest alignment of a
/// tensor's rows.
const fn alignment(kernels: Kernels) -> usize {
    match kernels {
        Kernels::Cuda => 512,
        // Of software Vulkan; drivers report 16 to 256.
        _ => 32,
    }
}

/// Strides and bytes of new memory. On CUDA and ROCm the rows of a tensor begin at multiples of a
/// power of two (`PitchedMemoryLayoutPolicy`).
pub(crate) fn layout(tensor: &TensorIr, kernels: Kernels) -> (Vec<isize>, u64) {
    let mut strides = row_major(&tensor.shape);
    let (width, size) = (
        tensor.shape.last().copied().unwrap_or(1),
        tensor.dtype.size(),
    );
    let is_pitched = kernels == Kernels::Cuda && strides.len() > 1 && width > 1;
    if !is_pitched {
        return (strides, bytes(tensor) as u64);
    }
    let align = (width * size)
        .next_power_of_two()
        .clamp(16, alignment(kernels));
    let pitch = (width * size).next_multiple_of(align);
    let elements = (pitch / size) as isize;
    let rows = strides.len() - 1;
    for stride in &mut strides[..rows] {
        *stride = *stride / width.max(1) as isize * elements;
    }
    let height = tensor.shape.num_elements() / width.max(1);
    (strides, (height * pitch) as u64)
}

/// What an operation allocates and costs.
pub(crate) fn plan(op: &OperationIr, operands: &[Operand], kernels: Kernels) -> Plan {
    let view = view(op, operands, kernels);
    let moves = view.is_none();
    let placements = match view.or_else(|| in_place(op, operands)) {
        Some(place) => vec![place],
        None => op.outputs().map(|_| Placement::New(None)).collect(),
    };
    Plan {
        placements,
        workspace_bytes: 0,
        flops: if moves { rules::flops(op) } else { 0 },
        reordered: 0,
        moves,
    }
}

/// The result of an operation that moves no elements.
pub(crate) fn view(op: &OperationIr, operands: &[Operand], kernels: Kernels) -> Option<Placement> {
    let (OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op)) = op
    else {
        return None;
    };
    let first = operands.first()?;
    let shape = &first.tensor.shape;
    let mut strides = first.view.strides.clone();
    let mut offset = 0;
    match op {
        BaseOperationIr::Reshape(reshape) => {
            let known: Strides = strides.iter().map(|&stride| stride as usize).collect();
            match reshape_action(shape, &known, &reshape.out.shape) {
                ReshapeAction::NoChange => {}
                ReshapeAction::Recompute => return None,
                ReshapeAction::UpdateStrides { strides: new } => {
                    strides = new.iter().map(|&stride| stride as isize).collect();
                }
            }
        }
        BaseOperationIr::SwapDims(swap) => strides.swap(swap.dim1, swap.dim2),
        BaseOperationIr::Permute(permute) => {
            let order = permute.axes.iter();
            strides = order.map(|&axis| first.view.strides[axis]).collect();
        }
        BaseOperationIr::Expand(expand) => strides = first.broadcast(&expand.out.shape),
        BaseOperationIr::Slice(slice) if slice.ranges.iter().all(|range| range.step == 1) => {
            let mut end = 0;
            for (dim, range) in slice.ranges.iter().enumerate() {
                let range = range.to_range(shape[dim]);
                offset += strides[dim] * range.start as isize;
                end += strides[dim] * (shape[dim] - range.end) as isize;
            }
            let size = first.tensor.dtype.size();
            let is_aligned =
                |elements: isize| (elements as usize * size).is_multiple_of(alignment(kernels));
            if !is_aligned(offset) || !is_aligned(end) {
                return None;
            }
        }
        BaseOperationIr::Cat(_) if operands.len() == 1 => {}
        _ => return None,
    }
    Some(first.shared(strides, offset))
}

/// The result of an elementwise operation in the memory of its first operand, or of its second.
fn in_place(op: &OperationIr, operands: &[Operand]) -> Option<Placement> {
    let out = op.outputs().next()?;
    let is_elementwise = match op {
        OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => !matches!(
            op,
            Numeric::CumSum(_) | Numeric::CumProd(_) | Numeric::CumMin(_) | Numeric::CumMax(_)
        ),
        OperationIr::Float(_, op) => {
            !matches!(op, FloatOperationIr::Matmul(_) | FloatOperationIr::Cross(_))
        }
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) => {
            matches!(
                op,
                BaseOperationIr::MaskWhere(_) | BaseOperationIr::MaskFill(_)
            )
        }
        _ => false,
    };
    let takes = |operand: &&Operand| {
        let strides = operand.view.strides.iter().zip(operand.tensor.shape.iter());
        operand.is_unique
            && (operand.tensor.dtype, &operand.tensor.shape) == (out.dtype, &out.shape)
            && strides
                .into_iter()
                .all(|(stride, size)| *stride > 0 || *size == 1)
    };
    let operand = operands.iter().filter(|_| is_elementwise).find(takes)?;
    Some(operand.shared(operand.view.strides.clone(), 0))
}

#[cfg(feature = "fusion")]
/// The operands of a kernel in whose memory its results may be: those of elementwise operations
/// alone.
pub(crate) fn in_place_of_kernel<'a, 'b>(
    ops: impl Iterator<Item = &'b OperationIr>,
    operands: &'b [Operand<'a>],
) -> Vec<&'b Operand<'a>> {
    let others = ops.filter(|op| !trace::is_elementwise(op));
    let others: Vec<_> = others
        .flat_map(|op| op.inputs().map(|input| input.id))
        .collect();
    let free = |operand: &&Operand| {
        operand.is_unique
            && !others.contains(&operand.tensor.id)
            && operand.view.strides == row_major(&operand.tensor.shape)
    };
    operands.iter().filter(free).collect()
}
