//! One operation that is recorded: its operands are brought back, its result becomes a node.

use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Weak};

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, DeviceOps, Shape, TensorMetadata};
use parking_lot::Mutex;

use crate::budget::{self, Clock, Costs, OpCost, Phase};
use crate::context::{self, Moment};
use crate::handle::Managed;
use crate::kind::Value;
use crate::node::{AnyEntry, Entry, Head, Lineage, Node, Origin, State, Storage};
use crate::op::{OpInfo, Work};
use crate::policy::Fate;
use crate::recipe::{Input, Never, Part, Recipe, Source};
use crate::replay;
use crate::trace::EventKind;

/// An operation under way.
pub(crate) struct Call<B: Backend> {
    op: &'static OpInfo,
    moment: Moment,
    records: bool,
    storage: Shares<B>,
    permuted_elements: usize,
    /// Only under a budget.
    cost: Option<OpCost>,
    clock: Clock,
    lineage: Lineage,
}

/// Whose storage the result has.
enum Shares<B: Backend> {
    /// Its own.
    Own,
    /// An unmanaged tensor's.
    Leaf,
    /// That of a managed tensor.
    With(Source<B>),
}

/// What the operands look like.
struct Operands<B: Backend> {
    evicted: Vec<Arc<dyn Entry<B>>>,
    first: Option<Shares<B>>,
    first_contiguous: bool,
    /// Elements of the largest operand whose elements may lie in another order than its shape says.
    permuted_elements: usize,
    /// Bytes of the largest operand.
    largest: u64,
    /// Bytes of the largest operand that cannot come back and that nobody but this operation refers to.
    given_up: u64,
    cost: Option<OpCost>,
    lineage: Lineage,
    /// Recorded before a backward pass and used after it: state, such as running statistics.
    outlived: Vec<Arc<dyn Entry<B>>>,
}

impl<B: Backend> Call<B> {
    /// Brings the operands back and decides what becomes of the result.
    pub fn begin(op: &'static OpInfo, show: impl FnOnce(&mut dyn FnMut(Input<'_, B>))) -> Self {
        let mut moment = context::tick(op);
        let mut operands = Operands::new(moment.step.map(|_| OpCost::new(op)));
        show(&mut |input| operands.see(input, &moment));
        if !operands.evicted.is_empty() {
            replay::bring_back(std::mem::take(&mut operands.evicted));
        }
        for node in operands.outlived.drain(..) {
            node.settle();
            node.retire();
        }
        let lineage = lineage(&mut moment, op, operands.lineage);
        // A recipe would keep the storage of an operand that cannot come back and that nobody else wants, to be able to
        // drop that of the result: nothing is won unless the result is larger.
        let gives_up = operands.given_up > 0 && operands.given_up * 2 > operands.largest;
        let records = !gives_up && moment.fate != Fate::Keep && lineage == Lineage::Activation;
        operands.make_room(op);
        let cost = operands.cost.take();
        Self {
            op,
            permuted_elements: operands.permuted_elements,
            storage: operands.storage(op),
            clock: Clock::start(moment.costs),
            moment,
            records,
            cost,
            lineage,
        }
    }

    /// Whether the result gets a recipe.
    pub fn records(&self) -> bool {
        self.records
    }

    /// The result with its recipe, if it gets one.
    pub fn finish<R: Recipe<B>>(self, value: Value<B>, recipe: Option<R>) -> Results<B> {
        if let Value::Many(parts) = value {
            return match recipe {
                Some(recipe) => self.finish_parts(parts, recipe),
                None => self.finish_fixed_parts(parts),
            };
        }
        Results::one(match recipe {
            Some(recipe) => self.node(value, recipe, Origin::Recorded),
            None => self.node(value, Never, Origin::Fixed),
        })
    }

    fn finish_fixed_parts(&self, parts: Vec<Value<B>>) -> Results<B> {
        let parts = parts.into_iter().map(|part| match part {
            Value::Absent => None,
            part => Some(self.node(part, Never, Origin::Fixed)),
        });
        Results::many(parts.collect())
    }

    fn finish_parts<R: Recipe<B>>(&self, parts: Vec<Value<B>>, recipe: R) -> Results<B> {
        let device = parts.iter().find_map(Value::device).unwrap_or_default();
        let whole = self.whole(device, recipe);
        let parts = parts.into_iter().enumerate().map(|(index, part)| {
            if matches!(part, Value::Absent) {
                return None;
            }
            let whole = whole.clone();
            Some(self.node(part, Part { whole, index }, Origin::Recorded))
        });
        Results::many(parts.collect())
    }

    /// The node of an operation with several results, which holds them only while a replay hands them out.
    fn whole<R: Recipe<B>>(&self, device: Device<B>, recipe: R) -> Source<B> {
        let head = Head {
            op: self.op,
            id: self.moment.clock,
            shape: Shape::new([]),
            dtype: DType::U8,
            bytes: 0,
            contiguous: true,
            row_major: true,
            group: None,
            residents: AtomicU32::new(0),
            users: AtomicU32::new(0),
            ledger: context::ledger(device.id()),
            device,
            cost_ns: 0.0,
            retired: AtomicBool::new(false),
            step: self.step(),
            lineage: self.lineage,
        };
        let state = self.state(Storage::Evicted, Origin::Recorded);
        Source::new(Arc::new(Node {
            head,
            state: Mutex::new(state),
            recipe: Mutex::new(Some(recipe)),
        }))
    }

    fn cost_ns(&self, elements: u64) -> f32 {
        let estimated = || self.cost.as_ref().map_or(0.0, |cost| cost.ns(elements));
        self.clock.ns().unwrap_or_else(estimated)
    }

    /// Whether the result's elements are sure to lie in the order that its shape says. An operation may keep the order of its
    /// operand, such as a transposed one; what comes back from the host does not.
    fn is_row_major(&self, elements: usize) -> bool {
        match self.op.work {
            Work::View => self.op.name.ends_with("reshape"),
            Work::Compute | Work::Fixed => true,
            // A smaller operand is broadcast.
            Work::Cheap | Work::Math => self.permuted_elements < elements,
            _ => self.permuted_elements == 0,
        }
    }

    fn step(&self) -> u64 {
        self.moment.step.map_or(0, |step| step.number)
    }

    fn state(&self, storage: Storage<B>, origin: Origin) -> State<B> {
        State {
            storage,
            origin,
            locks: 0,
            hand_over: false,
            scope: self.moment.scope.clone(),
            last_used: self.moment.clock,
            feeds_inner_scope: false,
            witness: None,
        }
    }

    fn node<R: Recipe<B>>(&self, value: Value<B>, recipe: R, origin: Origin) -> Managed<B> {
        let (shape, dtype) = value.meta();
        let elements = shape.num_elements();
        let cost_ns = self.cost_ns(elements as u64);
        let device = value.device().unwrap_or_default();
        let bytes = bytes(&shape, dtype);
        let (group, bytes) = match &self.storage {
            Shares::Own => (None, bytes),
            Shares::Leaf => (None, 0),
            Shares::With(source) => (Some(source.clone()), bytes),
        };
        let head = Head {
            op: self.op,
            id: self.moment.clock,
            shape,
            dtype,
            bytes,
            contiguous: self.op.work != Work::View || is_contiguous(self.op),
            row_major: self.is_row_major(elements),
            group,
            residents: AtomicU32::new(0),
            users: AtomicU32::new(0),
            ledger: context::ledger(device.id()),
            device,
            cost_ns,
            retired: AtomicBool::new(false),
            step: self.step(),
            lineage: self.lineage,
        };
        head.came();
        head.emit(|op, node| EventKind::Alloc { op, node }, bytes);
        let ledger = head.ledger.clone();
        let state = self.state(Storage::Resident(value), origin);
        let node = Arc::new(Node {
            head,
            state: Mutex::new(state),
            recipe: Mutex::new(Some(recipe)),
        });
        let weak = Arc::downgrade(&node) as Weak<dyn AnyEntry>;
        if self.moment.scope.is_some() {
            context::enlist(weak.clone());
        }
        if let Some(budget) = ledger.budget() {
            budget.register(weak);
            if let Some(cost) = &self.cost {
                budget.computed(cost_ns, cost.key(), bytes);
            }
        }
        Managed::new(Source::new(node))
    }
}

/// What a result descends from; an operation that only one direction has says where in a step the thread is.
fn lineage(moment: &mut Moment, op: &OpInfo, operands: Lineage) -> Lineage {
    let Some(step) = moment.step else {
        return Lineage::Activation;
    };
    if budget::is_backward_only(op) {
        if step.phase == Phase::Forward {
            moment.step = context::backward_begins();
        }
        return Lineage::Gradient;
    }
    if operands == Lineage::Gradient && budget::is_forward_only(op) {
        moment.step = context::forward_begins();
        return Lineage::Activation;
    }
    operands
}

impl<B: Backend> Operands<B> {
    fn new(cost: Option<OpCost>) -> Self {
        Self {
            evicted: Vec::new(),
            first: None,
            first_contiguous: true,
            permuted_elements: 0,
            largest: 0,
            given_up: 0,
            cost,
            lineage: Lineage::Activation,
            outlived: Vec::new(),
        }
    }

    fn see(&mut self, input: Input<'_, B>, moment: &Moment) {
        let source = match input {
            Input::Node(source) => source,
            Input::Leaf(shape) => {
                self.first.get_or_insert(Shares::Leaf);
                self.permuted_elements = usize::MAX;
                if let Some(cost) = &mut self.cost {
                    cost.operand(&shape());
                }
                return;
            }
        };
        let node = source.node();
        let head = node.head();
        if let Some(cost) = &mut self.cost {
            cost.operand(&head.shape);
        }
        if let Some(step) = moment.step {
            if step.phase == Phase::Backward
                && head.lineage == Lineage::Gradient
                && head.step == step.number
            {
                self.lineage = Lineage::Gradient;
            }
            // Recipes must not reach through the steps.
            if step.phase == Phase::Forward
                && head.step < step.number
                && node.state().origin == Origin::Recorded
            {
                self.outlived.push(node.clone());
            }
        }
        if !head.row_major {
            self.permuted_elements = self.permuted_elements.max(head.shape.num_elements());
        }
        if self.first.is_none() {
            self.first_contiguous = head.contiguous;
            self.first = Some(match &head.group {
                Some(group) => Shares::With(group.clone()),
                None if head.bytes == 0 => Shares::Leaf,
                None => Shares::With(source.clone()),
            });
        }
        self.largest = self.largest.max(head.bytes);
        let mut state = node.state();
        state.last_used = moment.clock;
        if let (Some(own), Some(user)) = (&state.scope, &moment.scope) {
            let inner = user.is_within(own) && !Arc::ptr_eq(user, own);
            state.feeds_inner_scope |= inner;
        }
        if !state.is_resident() {
            self.evicted.push(node.clone());
        }
        // The operand's handle and what was saved for a recipe are two references.
        let last = head.users() == 1 && Arc::strong_count(node) == 2;
        if last && state.origin == Origin::Fixed && head.bytes > 0 {
            self.given_up = self.given_up.max(head.bytes);
        }
    }

    /// Makes room for the result, on the device of the last tensors.
    fn make_room(&self, op: &OpInfo) {
        let Some(cost) = &self.cost else { return };
        if op.work == Work::View {
            return;
        }
        if let Some(ledger) = context::recent_ledger()
            && let Some(budget) = ledger.budget()
        {
            let bytes = budget.expected(cost.key()).unwrap_or(cost.largest_bytes());
            budget::make_room(&ledger, op.name, bytes);
        }
    }

    fn storage(self, op: &OpInfo) -> Shares<B> {
        let copies = op.name.ends_with("reshape") && !self.first_contiguous;
        match self.first {
            Some(shares) if op.work == Work::View && !copies => shares,
            _ => Shares::Own,
        }
    }
}

/// Whether the result of a view operation is contiguous if its operand is.
fn is_contiguous(op: &OpInfo) -> bool {
    ["reshape", "detach", "set_require_grad"]
        .iter()
        .any(|name| op.name.ends_with(name))
}

/// Bytes of a tensor's elements.
pub(crate) fn bytes(shape: &Shape, dtype: DType) -> u64 {
    shape.num_elements() as u64 * dtype.size() as u64
}

impl<B: Backend> Value<B> {
    /// Shape and type of one tensor.
    fn meta(&self) -> (Shape, DType) {
        match self {
            Self::Float(x) => (x.shape(), x.dtype()),
            Self::Int(x) => (x.shape(), x.dtype()),
            Self::Bool(x) => (x.shape(), x.dtype()),
            Self::Quant(x) => (x.shape(), x.dtype()),
            Self::Many(_) | Self::Absent => (Shape::new([]), DType::U8),
        }
    }

    /// Where a tensor is.
    fn device(&self) -> Option<Device<B>> {
        match self {
            Self::Float(x) => Some(B::float_device(x)),
            Self::Int(x) => Some(B::int_device(x)),
            Self::Bool(x) => Some(B::bool_device(x)),
            Self::Quant(x) => Some(B::q_device(x)),
            Self::Many(_) | Self::Absent => None,
        }
    }
}

/// Makes room for a new tensor of this shape.
pub(crate) fn make_room_for(op: &'static OpInfo, shape: &Shape) {
    if let Some(ledger) = context::recent_ledger() {
        // Elements of four bytes: what Burn makes by default.
        budget::make_room(&ledger, op.name, shape.num_elements() as u64 * 4);
    }
}

/// What cannot be computed again, counted.
pub(crate) fn fixed<B: Backend>(op: &'static OpInfo, value: Value<B>) -> Results<B> {
    let mut moment = context::tick(op);
    let mut lineage = Lineage::Activation;
    if let Some(step) = moment.step {
        let elements = value.meta().0.num_elements();
        if op.name == "float_ones" && elements == 1 {
            // What autodiff starts a backward pass with.
            moment.step = context::backward_begins();
            lineage = Lineage::Gradient;
        } else if op.name.ends_with("from_data") && elements > 1 && step.phase == Phase::Backward {
            moment.step = context::forward_begins();
        }
    }
    let call = Call {
        op,
        moment,
        records: false,
        permuted_elements: 0,
        storage: Shares::Own,
        clock: Clock::start(Costs::Estimated),
        cost: None,
        lineage,
    };
    call.finish(value, None::<Never>)
}

/// A tensor that somebody else delivers.
pub(crate) fn source<B: Backend, R: Recipe<B>>(
    op: &'static OpInfo,
    (shape, dtype, device): (Shape, DType, Device<B>),
    recipe: R,
) -> Managed<B> {
    let moment = context::tick(op);
    let head = Head {
        op,
        id: moment.clock,
        bytes: bytes(&shape, dtype),
        shape,
        dtype,
        contiguous: true,
        row_major: true,
        group: None,
        residents: AtomicU32::new(0),
        users: AtomicU32::new(0),
        ledger: context::ledger(device.id()),
        device,
        cost_ns: 0.0,
        retired: AtomicBool::new(false),
        step: 0,
        lineage: Lineage::Activation,
    };
    let state = State {
        storage: Storage::Evicted,
        origin: Origin::Source,
        locks: 0,
        hand_over: false,
        scope: None,
        feeds_inner_scope: false,
        last_used: moment.clock,
        witness: None,
    };
    Managed::new(Source::new(Arc::new(Node {
        head,
        state: Mutex::new(state),
        recipe: Mutex::new(Some(recipe)),
    })))
}

/// The results of an operation, in order.
pub(crate) enum Results<B: Backend> {
    One(Option<Managed<B>>),
    Many(std::vec::IntoIter<Option<Managed<B>>>),
}

impl<B: Backend> Results<B> {
    fn one(result: Managed<B>) -> Self {
        Self::One(Some(result))
    }

    fn many(results: Vec<Option<Managed<B>>>) -> Self {
        Self::Many(results.into_iter())
    }

    /// The next result; `None` where it is absent.
    pub fn next(&mut self) -> Option<Managed<B>> {
        match self {
            Self::One(result) => result.take(),
            Self::Many(results) => results.next().flatten(),
        }
    }

    /// The next result, which every run of the operation gives.
    pub fn expect(&mut self) -> Managed<B> {
        self.next().expect("an operation gives what its row says")
    }
}
