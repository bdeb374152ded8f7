//! A kernel of elementwise operations as CubeCL builds it: what it reads, what it writes, and which
//! operation it takes next. Seen in the source of burn-cubecl-fusion 0.21.0 (`engine/fuser.rs`,
//! `engine/trace` and `engine/scoring.rs`).
//!
//! Shapes are *relative*: each size is a number by order of appearance, and size 1 is 0.

use burn_fusion::{FuserProperties, FuserStatus};
use burn_ir::{
    BaseOperationIr as Base, FloatOperationIr as Float, NumericOperationIr as Numeric, OperationIr,
    TensorId, TensorIr, TensorStatus,
};
use burn_std::Shape;
use rustc_hash::{FxHashMap, FxHashSet};

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
    locals: FxHashSet<TensorId>,
    /// Those that an earlier part hands over.
    pub handed_over: FxHashSet<TensorId>,
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
    inputs: FxHashSet<TensorId>,
    /// Results, with the status of their last use.
    results: FxHashMap<TensorId, TensorStatus>,
    indexed: FxHashSet<TensorId>,
    /// Results of one part that another reads from memory.
    buffers: FxHashSet<TensorId>,
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
            inputs: FxHashSet::default(),
            results: FxHashMap::default(),
            indexed: FxHashSet::default(),
            buffers: FxHashSet::default(),
            shape: Shape::new([]),
            computed: 0,
            registered: 0,
            accesses: 0,
            is_closed: false,
        }
    }

    fn part(&self) -> &Part {
        self.parts.last().expect("a trace has a part")
    }

    fn part_mut(&mut self) -> &mut Part {
        self.parts.last_mut().expect("a trace has a part")
    }

    /// Whether the kernel can take the operation.
    pub fn takes(&self, op: &OperationIr) -> bool {
        const MOST_COMPUTED: usize = 64;
        if self.is_closed {
            return false;
        }
        if let OperationIr::Drop(_) = op {
            return self.registered > 0;
        }
        let (Some(form), Some(out)) = (form(op), op.outputs().next()) else {
            return false;
        };
        let is_known = |id: &TensorId| self.inputs.contains(id) || self.results.contains_key(id);
        let is_read = match form {
            Form::Elementwise => op.inputs().all(|input| !self.indexed.contains(&input.id)),
            Form::Indexed(inputs) => inputs
                .iter()
                .all(|input| !is_known(&input.id) || self.indexed.contains(&input.id)),
            Form::View(input) => {
                let is_input =
                    self.inputs.contains(&input.id) && !self.results.contains_key(&input.id);
                is_input || !self.part().locals.contains(&input.id)
            }
        };
        is_read
            && !self.indexed.contains(&out.id)
            && self.computed <= MOST_COMPUTED
            && self.shape_with(&out.shape).is_some()
            && self.has_room(op)
    }

    /// Whether the kernel's tensors are few enough with those of the operation.
    fn has_room(&self, op: &OperationIr) -> bool {
        let most = 1 + self.inputs.len() + self.results.len() + op.nodes().len();
        if most <= self.most_tensors || (self.inputs.is_empty() && self.results.is_empty()) {
            return true;
        }
        let mut next = self.clone();
        next.push(op);
        1 + next.inputs.len() + next.writes() <= self.most_tensors
    }

    /// Adds an operation, or closes.
    pub fn add(&mut self, op: &OperationIr) {
        match self.takes(op) {
            true => self.push(op),
            false => self.is_closed = true,
        }
    }

    /// Adds an operation that the kernel takes.
    pub fn push(&mut self, op: &OperationIr) {
        self.registered += 1;
        self.accesses += op.inputs().count() + op.outputs().count();
        match form(op) {
            Some(Form::Elementwise) => {
                self.computed += 1;
                op.inputs().for_each(|input| self.read(input));
            }
            Some(Form::Indexed(inputs)) => {
                self.computed += 1;
                for input in inputs {
                    self.read_whole(input);
                    self.indexed.insert(input.id);
                }
            }
            Some(Form::View(input)) => {
                self.read_whole(input);
                self.part_mut().views += 1;
            }
            // A tensor is dropped: there is no result.
            None => op.inputs().for_each(|input| self.used(input)),
        }
        if let Some(out) = op.outputs().next() {
            if let Some(shape) = self.shape_with(&out.shape) {
                self.shape = shape;
            }
            self.write(out);
        }
    }

    /// The shape with a result of another one, if the part can have both.
    fn shape_with(&self, shape: &Shape) -> Option<Shape> {
        if self.shape.is_empty() {
            return Some(shape.clone());
        }
        if self.shape.rank() != shape.rank() {
            return None;
        }
        let mut updated = self.shape.clone();
        for dim in 0..shape.rank() {
            let (known, new) = (self.shape[dim], shape[dim]);
            if known == new || (self.shapes.broadcast && new == 0) {
                continue;
            }
            if !self.shapes.broadcast || known != 0 || !self.shapes.grow {
                return None;
            }
            updated[dim] = new;
        }
        let grows = updated != self.shape;
        (!grows || updated == *shape).then_some(updated)
    }

    /// Notes the status of a tensor's use.
    fn used(&mut self, tensor: &TensorIr) {
        if let Some(status) = self.results.get_mut(&tensor.id) {
            *status = tensor.status;
        }
    }

    fn read(&mut self, tensor: &TensorIr) {
        self.used(tensor);
        self.read_in(self.parts.len() - 1, tensor);
    }

    fn read_in(&mut self, part: usize, tensor: &TensorIr) {
        let part = &mut self.parts[part];
        let is_indexed = self.indexed.contains(&tensor.id);
        if is_indexed || part.handed_over.contains(&tensor.id) || !part.locals.insert(tensor.id) {
            return;
        }
        part.reads += 1;
        match self.results.contains_key(&tensor.id) {
            true => self.buffers.insert(tensor.id),
            false => self.inputs.insert(tensor.id),
        };
    }

    /// Adds an input that is not read element by element.
    pub fn read_whole(&mut self, tensor: &TensorIr) {
        self.used(tensor);
        self.inputs.insert(tensor.id);
    }

    fn write(&mut self, tensor: &TensorIr) {
        if self.part_mut().locals.insert(tensor.id) {
            self.results.entry(tensor.id).or_insert(tensor.status);
        }
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
        self.part_mut().handed_over.insert(tensor.id);
    }

    /// Results that are written to memory.
    fn writes(&self) -> usize {
        let results = self.results.iter();
        let kept = results.filter(|(id, status)| {
            **status != TensorStatus::ReadWrite || self.buffers.contains(id)
        });
        kept.count()
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
