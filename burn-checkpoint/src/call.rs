//! One operation that is recorded: its operands are brought back, its result becomes a node.

use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Weak};

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, DeviceOps, Shape, TensorMetadata};
use parking_lot::Mutex;

use crate::budget;
use crate::context::{self, Moment};
use crate::handle::Managed;
use crate::kind::Value;
use crate::node::{AnyEntry, Entry, Head, Node, Origin, State, Storage};
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
    cost: budget::OpCost,
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
    /// Bytes of the largest operand.
    largest: u64,
    /// Bytes of the largest operand that cannot come back and that nobody but this operation refers to.
    given_up: u64,
}

impl<B: Backend> Call<B> {
    /// Brings the operands back and decides what becomes of the result.
    pub fn begin(op: &'static OpInfo, show: impl FnOnce(&mut dyn FnMut(Input<'_, B>))) -> Self {
        let moment = context::tick(op);
        let mut cost = budget::OpCost::new(op);
        let mut operands = Operands {
            evicted: Vec::new(),
            first: None,
            first_contiguous: true,
            largest: 0,
            given_up: 0,
        };
        show(&mut |input| operands.see(input, moment.clock, &mut cost));
        if !operands.evicted.is_empty() {
            replay::bring_back(std::mem::take(&mut operands.evicted));
        }
        // A recipe would keep the storage of an operand that cannot come back and that nobody else wants, to be able to
        // drop that of the result: nothing is won unless the result is larger.
        let gives_up = operands.given_up > 0 && operands.given_up * 2 > operands.largest;
        let records = !gives_up && moment.fate != Fate::Keep;
        Self {
            op,
            storage: operands.storage(op),
            moment,
            records,
            cost,
        }
    }

    /// Whether the result gets a recipe.
    pub fn records(&self) -> bool {
        self.records
    }

    /// Makes room for the result.
    pub fn make_room(&self) {}

    /// The result with its recipe, if it gets one.
    pub fn finish<R: Recipe<B>>(self, value: Value<B>, recipe: Option<R>) -> Results<B> {
        if let Value::Many(parts) = value {
            return match recipe {
                Some(recipe) => self.finish_parts(parts, recipe),
                None => self.finish_fixed_parts(parts),
            };
        }
        Results::one(match recipe {
            Some(recipe) => self.node(value, recipe, Origin::Recorded, true),
            None => self.node(value, Never, Origin::Fixed, true),
        })
    }

    fn finish_fixed_parts(&self, parts: Vec<Value<B>>) -> Results<B> {
        let parts = parts.into_iter().map(|part| match part {
            Value::Absent => None,
            part => Some(self.node(part, Never, Origin::Fixed, true)),
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
            Some(self.node(part, Part { whole, index }, Origin::Recorded, false))
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
            group: None,
            residents: AtomicU32::new(0),
            users: AtomicU32::new(0),
            ledger: context::ledger(device.id()),
            device,
            cost_ns: self.cost.ns(),
        };
        let state = self.state(Storage::Evicted, Origin::Recorded);
        Source::new(Arc::new(Node {
            head,
            state: Mutex::new(state),
            recipe: Mutex::new(Some(recipe)),
        }))
    }

    fn state(&self, storage: Storage<B>, origin: Origin) -> State<B> {
        State {
            storage,
            origin,
            locks: 0,
            hand_over: false,
            scope: self.moment.scope.clone(),
            last_used: self.moment.clock,
            witness: None,
        }
    }

    fn node<R: Recipe<B>>(
        &self,
        value: Value<B>,
        recipe: R,
        origin: Origin,
        costs: bool,
    ) -> Managed<B> {
        let (shape, dtype) = value.meta();
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
            group,
            residents: AtomicU32::new(0),
            users: AtomicU32::new(0),
            ledger: context::ledger(device.id()),
            device,
            cost_ns: if costs { self.cost.ns() } else { 0.0 },
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
        }
        Managed::new(Source::new(node))
    }
}

impl<B: Backend> Operands<B> {
    fn see(&mut self, input: Input<'_, B>, clock: u64, cost: &mut budget::OpCost) {
        let source = match input {
            Input::Node(source) => source,
            Input::Leaf(shape) => {
                self.first.get_or_insert(Shares::Leaf);
                cost.operand(shape);
                return;
            }
        };
        let node = source.node();
        let head = node.head();
        cost.operand(&|| head.shape.clone());
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
        state.last_used = clock;
        if !state.is_resident() {
            self.evicted.push(node.clone());
        }
        // The operand's handle and what was saved for a recipe are two references.
        let last = head.users() == 1 && Arc::strong_count(node) == 2;
        if last && state.origin == Origin::Fixed && head.bytes > 0 {
            self.given_up = self.given_up.max(head.bytes);
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

/// What cannot be computed again, counted.
pub(crate) fn fixed<B: Backend>(op: &'static OpInfo, value: Value<B>) -> Results<B> {
    let call = Call {
        op,
        moment: context::tick(op),
        records: false,
        storage: Shares::Own,
        cost: budget::OpCost::new(op),
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
        group: None,
        residents: AtomicU32::new(0),
        users: AtomicU32::new(0),
        ledger: context::ledger(device.id()),
        device,
        cost_ns: 0.0,
    };
    let state = State {
        storage: Storage::Evicted,
        origin: Origin::Source,
        locks: 0,
        hand_over: false,
        scope: None,
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
