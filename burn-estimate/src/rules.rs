//! What an operation allocates and costs: where burn-flex puts the result of an operation, and what
//! its kernels take beside it.
//!
//! A result is a view of its operand, or takes its operand's memory when no other tensor shares it,
//! or is new memory. Kernels that need rows in order copy operands whose rows are not. Seen in the
//! source of burn-flex 0.21.0.

use burn_backend::{DType, Shape};
use burn_ir::{BaseOperationIr, FloatOperationIr, ModuleOperationIr, OperationIr, TensorIr};

/// What an operation is, beyond its operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// The operation of Burn's backend.
    pub name: &'static str,
    /// Its work class in the operation table.
    pub work: &'static str,
    /// Its trait.
    pub group: &'static str,
}

/// Bytes of a tensor's elements.
pub(crate) fn bytes(tensor: &TensorIr) -> usize {
    tensor.shape.num_elements() * tensor.dtype.size()
}

/// A tensor on a storage.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub storage: u64,
    /// Elements between neighbours of each dimension.
    pub strides: Vec<isize>,
    /// The first element.
    pub offset: isize,
}

/// An operand.
pub(crate) struct Operand<'a> {
    pub tensor: &'a TensorIr,
    pub view: &'a View,
    pub storage_bytes: u64,
    /// Whether no other tensor shares the storage.
    pub is_unique: bool,
}

/// Where a result is.
#[derive(Debug)]
pub(crate) enum Placement {
    /// On an existing storage.
    Shared(View),
    /// On new memory, as the device lays it out or with these strides.
    New(Option<Vec<isize>>),
}

/// What an operation allocates and costs.
pub(crate) struct Plan {
    pub placements: Vec<Placement>,
    /// Memory that is freed when the operation is done.
    pub workspace_bytes: u64,
    pub flops: u64,
    /// Elements that are read in another order than they lie in.
    pub reordered: u64,
    /// Whether elements are read and written.
    pub moves: bool,
}

/// Strides of rows in order.
pub(crate) fn row_major(shape: &Shape) -> Vec<isize> {
    let mut strides = vec![1; shape.num_dims()];
    for dim in (0..strides.len().saturating_sub(1)).rev() {
        strides[dim] = strides[dim + 1] * shape[dim + 1] as isize;
    }
    strides
}

impl Operand<'_> {
    fn is_contiguous(&self) -> bool {
        self.view.strides == row_major(&self.tensor.shape)
    }

    fn starts_at_0(&self) -> bool {
        self.is_contiguous() && self.view.offset == 0
    }

    /// Whether the operand is all of its storage, in order.
    fn is_whole(&self) -> bool {
        self.starts_at_0() && self.storage_bytes == bytes(self.tensor) as u64
    }

    /// Bytes of the copy that a kernel makes of it.
    fn copied(&self) -> u64 {
        if self.is_whole() {
            0
        } else {
            bytes(self.tensor) as u64
        }
    }

    pub(crate) fn shared(&self, strides: Vec<isize>, offset: isize) -> Placement {
        Placement::Shared(View {
            storage: self.view.storage,
            strides,
            offset: self.view.offset + offset,
        })
    }

    pub fn as_it_is(&self) -> Placement {
        self.shared(self.view.strides.clone(), 0)
    }

    /// Its strides when it is broadcast to a shape.
    pub(crate) fn broadcast(&self, shape: &Shape) -> Vec<isize> {
        let own = &self.tensor.shape;
        let added = shape.num_dims() - own.num_dims();
        let stride = |dim: usize| match dim.checked_sub(added) {
            Some(dim) if own[dim] == shape[dim + added] => self.view.strides[dim],
            _ => 0,
        };
        (0..shape.num_dims()).map(stride).collect()
    }
}

/// Whether an operation is the seed of a backward pass: a gradient of 1 for the loss.
pub(crate) fn begins_backward(op: &OperationIr, row: &Row) -> bool {
    row.name == "float_ones" && op.outputs().all(|seed| seed.shape.num_elements() == 1)
}

/// Whether an operation is never part of a backward pass. Convolutions, transposed ones too, may be
/// part of one, and so may activations, which `FusedBackward` and Burn's `BalancedCheckpointing`
/// compute again there.
pub(crate) fn is_forward(row: &Row) -> bool {
    let backward = row.name.ends_with("_backward") || row.name.starts_with("conv");
    row.group == "ModuleOps" && !backward
}

/// What an operation allocates and costs.
pub(crate) fn plan(op: &OperationIr, row: &Row, operands: &[Operand]) -> Plan {
    let elements = op.outputs().map(|out| out.shape.num_elements() as u64);
    let mut plan = Plan {
        placements: op.outputs().map(|_| Placement::New(None)).collect(),
        workspace_bytes: 0,
        flops: elements.sum(),
        reordered: 0,
        moves: true,
    };
    match op {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            if let Some((placement, copied)) = view(op, operands) {
                plan.moves = copied > 0;
                plan.reordered = copied / first_size(operands);
                plan.flops = 0;
                plan.placements = vec![placement];
                return plan;
            }
        }
        OperationIr::Float(_, FloatOperationIr::Matmul(product)) => {
            plan.flops *= products(op);
            plan.workspace_bytes = matmul(&operands[0], &product.out);
            if product.out.dtype == DType::BF16 {
                plan.workspace_bytes += converted(op) + copies(operands);
            }
            return plan;
        }
        OperationIr::Module(module) => {
            if let Some((flops, workspace)) = convolution(module) {
                plan.flops = flops;
                plan.workspace_bytes = workspace + copies(operands);
                if operands[0].tensor.dtype == DType::BF16 {
                    plan.workspace_bytes += converted(op);
                }
                return plan;
            }
        }
        _ => {}
    }
    plan.reordered = reordered(op, row, operands);
    match (operands, op.outputs().next()) {
        ([first, rest @ ..], Some(out)) if takes_place(row, first, rest, out) => {
            plan.placements = vec![first.as_it_is()];
        }
        ([only], Some(out)) if is_elementwise(row) && keeps_strides(only, out) => {
            plan.placements = vec![Placement::New(Some(only.view.strides.clone()))];
        }
        ([], Some(out)) if row.name.ends_with("_zeros") || row.name.ends_with("_empty") => {
            plan.workspace_bytes = bytes(out) as u64;
        }
        ([], _) => {}
        _ if is_elementwise(row) => {}
        _ => plan.workspace_bytes = workspace(op, row, operands),
    }
    plan
}

/// The operands of an operation, and how many bytes it reads of each. A lookup reads as much of its
/// table as its result has.
pub(crate) fn reads<'a>(
    op: &'a OperationIr,
    row: &Row,
) -> impl Iterator<Item = (&'a TensorIr, usize)> {
    let name = row.name;
    let looks_up = name == "embedding" || name.ends_with("_select") || name.contains("_gather");
    let made: usize = op.outputs().map(bytes).sum();
    op.inputs().enumerate().map(move |(nth, input)| match nth {
        0 if looks_up => (input, bytes(input).min(made)),
        _ => (input, bytes(input)),
    })
}

/// Exponentials and the like that an operation computes: one for each element of its result.
pub(crate) fn functions(op: &OperationIr, row: &Row) -> u64 {
    let is_function = match row.work {
        // A power by multiplication.
        "math" => !row.name.contains("powi"),
        "norm" => row.name.contains("soft"),
        _ => false,
    };
    let elements = op.outputs().map(|out| out.shape.num_elements() as u64);
    if is_function { elements.sum() } else { 0 }
}

/// Floating-point operations of a kernel of its own.
pub(crate) fn flops(op: &OperationIr) -> u64 {
    if let OperationIr::Module(module) = op
        && let Some((flops, _)) = convolution(module)
    {
        return flops;
    }
    let elements = op.outputs().map(|out| out.shape.num_elements() as u64);
    elements.sum::<u64>() * products(op)
}

/// Floating-point operations for an element of the result.
fn products(op: &OperationIr) -> u64 {
    match op {
        OperationIr::Float(_, FloatOperationIr::Matmul(product)) => {
            2 * product.lhs.shape[product.lhs.shape.num_dims() - 1] as u64
        }
        _ => 1,
    }
}

/// The result of an operation that moves no elements if its operand's rows allow it, and the bytes
/// that it moves otherwise.
fn view(op: &BaseOperationIr, operands: &[Operand]) -> Option<(Placement, u64)> {
    let first = operands.first()?;
    let mut strides = first.view.strides.clone();
    let shape = &first.tensor.shape;
    let mut offset = 0;
    match op {
        BaseOperationIr::Reshape(_) if !first.starts_at_0() => {
            return Some((Placement::New(None), bytes(first.tensor) as u64));
        }
        BaseOperationIr::Reshape(reshape) => strides = row_major(&reshape.out.shape),
        BaseOperationIr::SwapDims(swap) => strides.swap(swap.dim1, swap.dim2),
        BaseOperationIr::Permute(permute) => {
            let order = permute.axes.iter();
            strides = order.map(|&axis| first.view.strides[axis]).collect();
        }
        BaseOperationIr::Flip(flip) => {
            for &axis in &flip.axes {
                offset += strides[axis] * (shape[axis] as isize - 1);
                strides[axis] = -strides[axis];
            }
        }
        BaseOperationIr::Expand(expand) => strides = first.broadcast(&expand.out.shape),
        BaseOperationIr::Slice(slice) if slice.ranges.iter().all(|range| range.step > 0) => {
            for (dim, range) in slice.ranges.iter().enumerate() {
                let (start, step) = (range.to_range(shape[dim]).start, range.step);
                offset += strides[dim] * start as isize;
                strides[dim] *= step;
            }
        }
        BaseOperationIr::Cat(_) if operands.len() == 1 => {}
        _ => return None,
    }
    Some((first.shared(strides, offset), 0))
}

/// Whether an operation computes each element of its result from the same elements of its operands,
/// in no other order.
fn is_elementwise(row: &Row) -> bool {
    const OTHERS: [&str; 8] = [
        "_mask_",
        "_cast",
        "_into_",
        "repeat_dim",
        "_cat",
        "slice_assign",
        "_cross",
        "to_device",
    ];
    matches!(row.work, "cheap" | "math") && !OTHERS.iter().any(|other| row.name.contains(other))
}

/// Whether the result takes the memory of the first operand.
fn takes_place(row: &Row, first: &Operand, rest: &[Operand], out: &TensorIr) -> bool {
    let alike = first.tensor.dtype == out.dtype && first.tensor.shape == out.shape;
    let free = first.is_unique && first.starts_at_0();
    let rows = |other: &Operand| {
        let strides = other.broadcast(&out.shape);
        strides == row_major(&out.shape) || (is_fast(row, out) && is_row_or_column(&strides, out))
    };
    is_elementwise(row) && alike && free && rest.iter().all(rows)
}

/// Whether burn-flex has a kernel for operands that are broadcast.
fn is_fast(row: &Row, out: &TensorIr) -> bool {
    let sums = ["float_add", "float_sub", "float_mul", "float_div"];
    out.dtype == DType::F32 && sums.contains(&row.name)
}

/// Whether strides are those of one row that is broadcast to all rows, or of one number for each
/// row.
fn is_row_or_column(strides: &[isize], out: &TensorIr) -> bool {
    let shape = &out.shape;
    let (Some(last), dims) = (strides.last(), strides.len()) else {
        return false;
    };
    if *last == 1 {
        return (0..dims - 1).all(|dim| strides[dim] == 0 || shape[dim] == 1);
    }
    let outer = dims
        - strides
            .iter()
            .rev()
            .take_while(|stride| **stride == 0)
            .count();
    let mut expected = 1;
    let in_order = (0..outer).rev().all(|dim| {
        let fits = strides[dim] == expected;
        expected *= shape[dim] as isize;
        fits
    });
    outer < dims && in_order
}

/// Bytes of an element of the first operand.
fn first_size(operands: &[Operand]) -> u64 {
    let first = operands.first();
    first.map_or(1, |first| first.tensor.dtype.size() as u64)
}

/// Elements that an operation other than a product reads in another order than they lie in: if it
/// reads any operand so, all of its largest tensor.
fn reordered(op: &OperationIr, row: &Row, operands: &[Operand]) -> u64 {
    let out = op.outputs().next();
    let in_order = |operand: &Operand| match out {
        Some(out) if is_elementwise(row) && operands.len() > 1 => {
            let strides = operand.broadcast(&out.shape);
            strides == row_major(&out.shape)
                || (is_fast(row, out) && is_row_or_column(&strides, out))
        }
        // Its result lies in the same order.
        _ if is_elementwise(row) => true,
        _ => operand.is_contiguous(),
    };
    if operands.iter().all(in_order) {
        return 0;
    }
    let tensors = op.inputs().chain(op.outputs());
    let elements = tensors.map(|tensor| tensor.shape.num_elements() as u64);
    elements.max().unwrap_or(0)
}

/// Whether a new result has the strides of the operand: if the operand is all of its storage, in
/// another order.
fn keeps_strides(only: &Operand, out: &TensorIr) -> bool {
    let all = only.storage_bytes == bytes(only.tensor) as u64 && only.view.offset == 0;
    let forward = only.view.strides.iter().all(|stride| *stride > 0);
    all && forward && only.tensor.shape == out.shape
}

fn copies(operands: &[Operand]) -> u64 {
    operands.iter().map(Operand::copied).sum()
}

/// What a product takes beside its result. Results of unaligned bytes are allocated twice, before
/// the product; during it the left matrix is packed if its rows are not contiguous. (The right one
/// is packed too, in some cases, and smaller.)
fn matmul(lhs: &Operand, out: &TensorIr) -> u64 {
    /// Columns that are packed at once, on processors of today.
    const PACKED: usize = 1024;
    let dims = lhs.tensor.shape.num_dims();
    let [rows, columns] = [dims - 2, dims - 1].map(|dim| lhs.tensor.shape[dim]);
    let packed = match lhs.view.strides[dims - 1] {
        1 => 0,
        _ => {
            let products = out.shape.num_elements() / (rows * out.shape[dims - 1]).max(1);
            products.min(threads()) * rows * columns.min(PACKED) * lhs.tensor.dtype.size()
        }
    };
    bytes(out).max(packed) as u64
}

/// Threads that burn-flex computes on.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Bytes of bf16 operands and results that are converted to f32.
fn converted(op: &OperationIr) -> u64 {
    let tensors = op.inputs().chain(op.outputs());
    tensors.map(|tensor| 2 * bytes(tensor) as u64).sum()
}

/// Workspace of kernels that read their operands in order.
fn workspace(op: &OperationIr, row: &Row, operands: &[Operand]) -> u64 {
    let first = &operands[0];
    let elements = first.tensor.shape.num_elements() as u64;
    match row.name {
        // A copy of all elements in f64.
        "float_cast" => copies(operands) + 8 * elements,
        // Summed in aligned memory and then copied, unless along the last dimension. Only some
        // orders of the operand are read as they are.
        "float_sum_dim" | "float_mean_dim" if first.tensor.dtype == DType::F32 => {
            let shape = &first.tensor.shape;
            let dims = shape.num_dims();
            let sums = op.outputs().next();
            let reduced = sums.and_then(|out| (0..dims).find(|&dim| out.shape[dim] != shape[dim]));
            let (Some(out), Some(dim)) = (sums, reduced) else {
                return bytes(first.tensor) as u64;
            };
            let ordered = first.is_contiguous() || (dim < 2 && dims - dim < 3);
            let copied = if ordered { 0 } else { bytes(first.tensor) };
            let aligned = if dim + 1 < dims { bytes(out) } else { 0 };
            (copied + aligned) as u64
        }
        "float_sum" | "float_mean" if first.tensor.dtype == DType::F32 => 0,
        "float_cat" | "int_cat" | "bool_cat" => match op {
            OperationIr::BaseFloat(BaseOperationIr::Cat(cat))
            | OperationIr::BaseInt(BaseOperationIr::Cat(cat))
            | OperationIr::BaseBool(BaseOperationIr::Cat(cat))
                if cat.dim == 0 && operands.iter().all(Operand::is_contiguous) =>
            {
                0
            }
            _ => copies(operands),
        },
        name if name.ends_with("repeat_dim") => {
            let out = op.outputs().map(bytes).sum::<usize>();
            copies(operands) + out as u64
        }
        _ => copies(operands) + indices(op),
    }
}

/// Bytes of indices that are converted to 64 bits.
fn indices(op: &OperationIr) -> u64 {
    match op {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            let indices = match op {
                BaseOperationIr::Gather(op) => &op.indices,
                BaseOperationIr::Scatter(op) => &op.indices,
                BaseOperationIr::Select(op) => &op.indices,
                BaseOperationIr::SelectAssign(op) => &op.indices,
                _ => return 0,
            };
            match indices.dtype {
                DType::I64 => 0,
                _ => 8 * indices.shape.num_elements() as u64,
            }
        }
        _ => 0,
    }
}

/// The products of a convolution, and what burn-flex takes for it beside its result.
fn convolution(op: &ModuleOperationIr) -> Option<(u64, u64)> {
    macro_rules! forward {
        ($op:ident) => {{
            let trivial = $op.options.stride.iter().all(|stride| *stride == 1)
                && $op.options.padding.iter().all(|padding| *padding == 0);
            unfolded(&$op.x, &$op.weight, &$op.out, $op.options.groups, trivial)
        }};
    }
    macro_rules! transposed {
        ($op:ident) => {{
            let spatial: usize = $op.x.shape[2..].iter().product();
            let columns = $op.weight.shape[1..].iter().product::<usize>() * spatial;
            let flops = 2 * $op.x.shape[0] * $op.x.shape[1] * columns;
            let size = $op.x.dtype.size();
            (flops as u64, (columns * size) as u64)
        }};
    }
    Some(match op {
        ModuleOperationIr::Conv1d(op) => forward!(op),
        ModuleOperationIr::Conv2d(op) => forward!(op),
        ModuleOperationIr::Conv3d(op) => forward!(op),
        ModuleOperationIr::ConvTranspose1d(op) => transposed!(op),
        ModuleOperationIr::ConvTranspose2d(op) => transposed!(op),
        ModuleOperationIr::ConvTranspose3d(op) => transposed!(op),
        _ => return None,
    })
}

/// A convolution by tiles of unfolded windows.
fn unfolded(
    x: &TensorIr,
    weight: &TensorIr,
    out: &TensorIr,
    groups: usize,
    trivial: bool,
) -> (u64, u64) {
    /// Pixels of the result in a tile.
    const TILE: usize = 512;
    let window: usize = weight.shape[1..].iter().product();
    let flops = 2 * out.shape.num_elements() * window;
    let (channels_in, channels_out) = (x.shape[1], weight.shape[0]);
    let flat = x.shape.num_dims() < 5;
    let pointwise = trivial && weight.shape[2..].iter().all(|size| *size == 1);
    let by_channel =
        flat && weight.shape[1] == 1 && groups == channels_in && groups == channels_out;
    let few_channels = flat && groups == 1 && channels_in <= 4 && channels_out <= 16;
    let workspace = if pointwise || by_channel || few_channels {
        0
    } else {
        let pixels = out.shape[2..].iter().product::<usize>();
        let tiles = x.shape[0] * pixels.div_ceil(TILE);
        let tile = pixels.min(TILE) * (window + channels_out / groups);
        bytes(x) + bytes(weight) + tiles.min(threads()) * tile * x.dtype.size()
    };
    (flops as u64, workspace as u64)
}
