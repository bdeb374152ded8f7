//! A kernel of elementwise operations as CubeCL builds it: what it reads, what it writes, and which operation it takes next. Seen in the source of
//! burn-cubecl-fusion 0.21.0 (`engine/fuser.rs`, `engine/trace` and `engine/scoring.rs`).
//!
//! Shapes are *relative*: each size is a number by order of appearance, and size 1 is 0.

use std::collections::{HashMap, HashSet};

use burn_fusion::{FuserProperties, FuserStatus};
use burn_ir::{
    BaseOperationIr as Base, FloatOperationIr as Float, NumericOperationIr as Numeric, OperationIr,
    TensorId, TensorIr, TensorStatus,
};
use burn_std::Shape;

/// How a kernel reads an operation's operands.
enum Form<'a> {
    Elementwise,
    Indexed([&'a TensorIr; 2]),
    View(&'a TensorIr),
}

/// The form of an operation that can be fused with others.
fn form(op: &OperationIr) -> Option<Form<'_>> {
    let is_elementwise = match op {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            match op {
                Base::SwapDims(op) => return Some(Form::View(&op.input)),
                Base::Reshape(op) if op.input.shape == op.out.shape => true,
                Base::Reshape(op) if op.input.shape.rank() > op.out.shape.rank() => false,
                Base::Reshape(op) => return Some(Form::View(&op.input)),
                Base::Gather(op) => return Some(Form::Indexed([&op.tensor, &op.indices])),
                Base::Select(op) => return Some(Form::Indexed([&op.tensor, &op.indices])),
                _ => matches!(
                    op,
                    Base::Equal(_)
                        | Base::EqualElem(_)
                        | Base::Cast(_)
                        | Base::Ones(_)
                        | Base::Zeros(_)
                        | Base::MaskWhere(_)
                        | Base::MaskFill(_)
                ),
            }
        }
        OperationIr::Float(_, op) => matches!(
            op,
            Float::Exp(_)
                | Float::Log(_)
                | Float::Powf(_)
                | Float::Log1p(_)
                | Float::Cos(_)
                | Float::Sin(_)
                | Float::PowfScalar(_)
                | Float::Tanh(_)
                | Float::Erf(_)
                | Float::Sqrt(_)
                | Float::Recip(_)
        ),
        OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => matches!(
            op,
            Numeric::Add(_)
                | Numeric::AddScalar(_)
                | Numeric::Sub(_)
                | Numeric::SubScalar(_)
                | Numeric::Mul(_)
                | Numeric::MulScalar(_)
                | Numeric::Div(_)
                | Numeric::DivScalar(_)
                | Numeric::Abs(_)
                | Numeric::Lower(_)
                | Numeric::LowerElem(_)
                | Numeric::Greater(_)
                | Numeric::GreaterElem(_)
                | Numeric::LowerEqual(_)
                | Numeric::LowerEqualElem(_)
                | Numeric::GreaterEqual(_)
                | Numeric::GreaterEqualElem(_)
                | Numeric::Full(_)
                | Numeric::Rem(_)
                | Numeric::RemScalar(_)
                | Numeric::Clamp(_)
        ),
        _ => false,
    };
    is_elementwise.then_some(Form::Elementwise)
}

/// Whether a kernel reads the operation's operands element by element, in the order of its result.
pub(crate) fn is_elementwise(op: &OperationIr) -> bool {
    matches!(op, OperationIr::Drop(_)) || matches!(form(op), Some(Form::Elementwise))
}

/// Which shapes of results a part of a kernel has.
#[derive(Clone, Copy)]
pub(crate) struct Shapes {
    /// Sizes other than those of the first result.
    pub broadcast: bool,
    /// A later result may have a size where all before it had 1.
    pub grow: bool,
}

pub(crate) const BROADCAST: Shapes = Shapes {
    broadcast: true,
    grow: true,
};

/// A part of a kernel: elementwise operations on one shape.
#[derive(Clone, Default)]
pub(crate) struct Part {
    /// Tensors that it has read or computed.
    locals: HashSet<TensorId>,
    /// Those that an earlier part hands over.
    pub handed_over: HashSet<TensorId>,
    results: Vec<TensorId>,
    reads: usize,
    pub views: usize,
}

/// A kernel of elementwise operations, in parts: before and after a reduction.
#[derive(Clone)]
pub(crate) struct Trace {
    shapes: Shapes,
    /// Inputs and results that a kernel can have, and one.
    pub most_tensors: usize,
    pub parts: Vec<Part>,
    inputs: HashSet<TensorId>,
    /// Results, with the status of their last use.
    results: HashMap<TensorId, TensorStatus>,
    indexed: HashSet<TensorId>,
    /// Results of one part that another reads from memory.
    buffers: HashSet<TensorId>,
    pub shape: Shape,
    computed: usize,
    pub registered: usize,
    /// Reads and writes of its operations, were they not fused.
    accesses: usize,
    pub is_closed: bool,
}

impl Trace {
    pub fn new(shapes: Shapes, most_tensors: usize) -> Self {
        Self {
            shapes,
            most_tensors,
            parts: vec![Part::default()],
            inputs: HashSet::new(),
            results: HashMap::new(),
            indexed: HashSet::new(),
            buffers: HashSet::new(),
            shape: Shape::new([]),
            computed: 0,
            registered: 0,
            accesses: 0,
            is_closed: false,
        }
    }

    fn part(&mut self) -> &mut Part {
        self.parts.last_mut().expect("a trace has a part")
    }

    /// Adds an operation, or closes.
    pub fn add(&mut self, op: &OperationIr) -> bool {
        if self.is_closed {
            return false;
        }
        let is_added = match op {
            OperationIr::Drop(tensor) => {
                self.used(tensor);
                self.registered > 0
            }
            _ => self.add_kernel(op),
        };
        if is_added {
            self.registered += 1;
            self.accesses += op.inputs().count() + op.outputs().count();
        }
        self.is_closed = !is_added;
        is_added
    }

    pub fn can_add(&self, op: &OperationIr) -> bool {
        self.clone().add(op)
    }

    fn add_kernel(&mut self, op: &OperationIr) -> bool {
        const MOST_COMPUTED: usize = 64;
        let (Some(form), Some(out)) = (form(op), op.outputs().next()) else {
            return false;
        };
        if !self.takes_shape(&out.shape) || self.computed > MOST_COMPUTED {
            return false;
        }
        let mut next = self.clone();
        let added = match form {
            Form::Elementwise => {
                next.computed += 1;
                op.inputs().try_for_each(|input| next.read(input))
            }
            Form::Indexed(inputs) => {
                next.computed += 1;
                inputs.into_iter().try_for_each(|input| next.index(input))
            }
            Form::View(input) => next.view(input),
        };
        if added.and_then(|()| next.write(out)).is_none() {
            return false;
        }
        let is_first = self.inputs.is_empty() && self.results.is_empty();
        if !is_first && 1 + next.inputs.len() + next.writes() > self.most_tensors {
            return false;
        }
        *self = next;
        true
    }

    fn takes_shape(&mut self, shape: &Shape) -> bool {
        if self.shape.is_empty() {
            self.shape = shape.clone();
        }
        if self.shape.rank() != shape.rank() {
            return false;
        }
        let mut updated = self.shape.clone();
        for dim in 0..shape.rank() {
            let (known, new) = (self.shape[dim], shape[dim]);
            if known == new || (self.shapes.broadcast && new == 0) {
                continue;
            }
            if !self.shapes.broadcast || known != 0 || !self.shapes.grow {
                return false;
            }
            updated[dim] = new;
        }
        let grows = updated != self.shape;
        if grows && updated != *shape {
            return false;
        }
        self.shape = updated;
        true
    }

    /// Notes the status of a tensor's use.
    fn used(&mut self, tensor: &TensorIr) {
        if let Some(status) = self.results.get_mut(&tensor.id) {
            *status = tensor.status;
        }
    }

    fn read(&mut self, tensor: &TensorIr) -> Option<()> {
        self.used(tensor);
        let last = self.parts.len() - 1;
        self.read_in(last, tensor)
    }

    fn read_in(&mut self, part: usize, tensor: &TensorIr) -> Option<()> {
        let part = &mut self.parts[part];
        if self.indexed.contains(&tensor.id) {
            return None;
        }
        if part.handed_over.contains(&tensor.id) || !part.locals.insert(tensor.id) {
            return Some(());
        }
        part.reads += 1;
        match self.results.contains_key(&tensor.id) {
            true => self.buffers.insert(tensor.id),
            false => self.inputs.insert(tensor.id),
        };
        Some(())
    }

    fn index(&mut self, tensor: &TensorIr) -> Option<()> {
        let is_known = self.inputs.contains(&tensor.id) || self.results.contains_key(&tensor.id);
        if is_known && !self.indexed.contains(&tensor.id) {
            return None;
        }
        self.read_whole(tensor);
        self.indexed.insert(tensor.id);
        Some(())
    }

    fn view(&mut self, tensor: &TensorIr) -> Option<()> {
        self.used(tensor);
        let is_local = self.part().locals.contains(&tensor.id);
        let is_input = self.inputs.contains(&tensor.id) && !self.results.contains_key(&tensor.id);
        if is_local && !is_input {
            return None;
        }
        self.inputs.insert(tensor.id);
        self.part().views += 1;
        Some(())
    }

    /// Adds an input that is not read element by element.
    pub fn read_whole(&mut self, tensor: &TensorIr) {
        self.used(tensor);
        self.inputs.insert(tensor.id);
    }

    fn write(&mut self, tensor: &TensorIr) -> Option<()> {
        if self.indexed.contains(&tensor.id) {
            return None;
        }
        let part = self.part();
        if part.locals.insert(tensor.id) {
            part.results.push(tensor.id);
            self.results.entry(tensor.id).or_insert(tensor.status);
        }
        Some(())
    }

    /// Adds the result of a product or a reduction.
    pub fn write_whole(&mut self, tensor: &TensorIr) {
        let size = |shape: &Shape| shape.iter().sum::<usize>();
        if self.shape.is_empty() || size(&self.shape) < size(&tensor.shape) {
            self.shape = tensor.shape.clone();
        }
        self.write(tensor);
    }

    /// Begins another part.
    pub fn begin_part(&mut self, shapes: Shapes) {
        self.shape = Shape::new([]);
        self.shapes = shapes;
        self.is_closed = false;
        self.parts.push(Part::default());
    }

    /// Hands a tensor over from an earlier part.
    pub fn hand_over(&mut self, tensor: &TensorIr, from: usize) {
        self.read_in(from, tensor);
        self.used(tensor);
        self.part().handed_over.insert(tensor.id);
    }

    /// Results that are written to memory.
    fn writes(&self) -> usize {
        let is_kept = |id: &&TensorId| {
            self.results[id] != TensorStatus::ReadWrite || self.buffers.contains(id)
        };
        let writes = self.parts.iter().flat_map(|part| &part.results);
        writes.filter(is_kept).collect::<HashSet<_>>().len()
    }

    pub fn properties(&self) -> FuserProperties {
        let writes = self.writes();
        let views: usize = self.parts.iter().map(|part| part.views).sum();
        let reads: usize = self.parts.iter().map(|part| part.reads).sum();
        let saved = self.accesses.saturating_sub(reads + views + writes);
        let launches = self.registered.saturating_sub(1);
        FuserProperties {
            ready: self.registered > 0,
            score: (100 * saved + 10 * launches).saturating_sub(50 * views) as u64,
        }
    }

    pub fn status(&self) -> FuserStatus {
        match self.is_closed {
            true => FuserStatus::Closed,
            false => FuserStatus::Open,
        }
    }
}
