//! One operation that is recorded: its operands are brought back, its result becomes a node.
//!
//! `operands.rs` looks at what goes in, `results.rs` hands out what comes out, and `given.rs` is for tensors that no
//! recipe of this thread makes.

mod given;
mod operands;
mod order;
mod results;

use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Weak};

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, DeviceOps, Shape};
use parking_lot::Mutex;

use crate::budget::{self, Clock, OpCost, Phase};
use crate::context::{self, Moment};
use crate::handle::Managed;
use crate::kind::Value;
use crate::ledger::Ledger;
use crate::node::{Entry, Head, Lineage, Node, Origin, State, Storage, Viewed, bytes};
use crate::op::{OpInfo, Work};
use crate::policy::Fate;
use crate::recipe::{Never, Part, Parts, Recipe, Source};
use crate::replay;
use crate::trace::EventKind;

pub(crate) use given::{Room, fixed, source};
use operands::{Operands, Shares};
use order::Order;
pub(crate) use results::Results;

/// An operation under way.
pub(crate) struct Call<B: Backend> {
    op: &'static OpInfo,
    moment: Moment,
    /// Whether the result keeps its recipe.
    records: bool,
    storage: Shares<B>,
    order: Order,
    viewed: Option<Box<Viewed<B>>>,
    /// Only under a budget.
    cost: Option<OpCost>,
    clock: Clock,
    lineage: Lineage,
}

impl<B: Backend> Call<B> {
    /// Brings the operands back and decides what becomes of the result: whether it keeps its recipe.
    pub fn begin(op: &'static OpInfo, recipe: &mut Option<impl Recipe<B>>) -> Self {
        let moment = context::tick(op);
        let mut operands = Operands::new(op, &moment);
        if let Some(recipe) = &*recipe {
            recipe.inputs(&mut |input| operands.see(input, &moment));
        }
        let call = Self::of(op, moment, &mut operands);
        if !call.records {
            // Before the operation runs: it may then write into its operands.
            *recipe = None;
        }
        call
    }

    fn of(op: &'static OpInfo, mut moment: Moment, operands: &mut Operands<B>) -> Self {
        if !operands.waiting.is_empty() {
            replay::bring_back(operands.waiting.iter().cloned());
            operands.settle_outlived(&moment);
        }
        let lineage = lineage(&mut moment, op, operands.lineage);
        let records =
            !operands.gives_up() && moment.fate != Fate::Keep && lineage == Lineage::Activation;
        operands.make_room(op, &moment);
        Self {
            op,
            order: std::mem::take(&mut operands.order),
            viewed: operands.viewed.take(),
            storage: operands.storage(op),
            cost: operands.cost.take(),
            clock: Clock::start(moment.costs),
            moment,
            records,
            lineage,
        }
    }

    /// The result with its recipe, if it gets one.
    pub fn finish<R: Recipe<B>>(mut self, value: Value<B>, recipe: Option<R>) -> Results<B> {
        if matches!(value, Value::Many(_)) {
            return self.finish_many(value, recipe);
        }
        let shape = value.shape();
        let cost_ns = self.cost_ns(|| shape.num_elements());
        let viewed = self.viewed.take();
        let node = self.node(value, shape, cost_ns.unwrap_or(0.0), recipe);
        if viewed.is_some() && (node.head.group.is_some() || !node.head.row_major) {
            node.state.lock().viewed = viewed;
        }
        if let Some(cost_ns) = cost_ns {
            self.computed(&node.head.ledger, cost_ns, node.head.bytes);
        }
        Results::One(Some(self.enter(node)))
    }

    fn finish_many<R: Recipe<B>>(self, value: Value<B>, recipe: Option<R>) -> Results<B> {
        let Value::Many(parts) = value else {
            unreachable!("one result is finished as one")
        };
        if let Some(recipe) = recipe {
            return self.finish_parts(parts, recipe);
        }
        let parts = parts.into_iter().map(|part| match part {
            Value::Absent => None,
            part => Some(self.enter_part(part, None::<Never>)),
        });
        Results::many(parts.collect())
    }

    /// The results are nodes that hand out what one more node, the operation's, computes.
    fn finish_parts<R: Recipe<B>>(self, parts: Vec<Value<B>>, recipe: R) -> Results<B> {
        let elements = || parts.iter().map(|part| part.shape().num_elements()).sum();
        let cost_ns = self.cost_ns(elements).unwrap_or(0.0);
        let device = parts.iter().find_map(Value::device).unwrap_or_default();
        let ledger = self.ledger(&device);
        let whole = self.whole(device, ledger.clone(), cost_ns, recipe);
        let siblings = Arc::new(Parts::new());
        let results: Vec<_> = parts
            .into_iter()
            .enumerate()
            .map(|(index, part)| {
                if matches!(part, Value::Absent) {
                    return None;
                }
                let recipe = Part {
                    whole: whole.clone(),
                    index,
                    siblings: siblings.clone(),
                };
                Some(self.enter_part(part, Some(recipe)))
            })
            .collect();
        let nodes = || results.iter().flatten().map(Managed::node);
        siblings.set(nodes());
        let bytes = nodes().map(|node| node.head().bytes).sum();
        self.computed(&ledger, cost_ns, bytes);
        Results::many(results)
    }

    /// One of several results, whose cost is known of all together.
    fn enter_part<R: Recipe<B>>(&self, part: Value<B>, recipe: Option<R>) -> Managed<B> {
        let shape = part.shape();
        self.enter(self.node(part, shape, 0.0, recipe))
    }

    /// The node of an operation with several results, which holds them only while a replay hands them out.
    fn whole<R: Recipe<B>>(
        &self,
        device: Device<B>,
        ledger: Arc<Ledger>,
        cost_ns: f32,
        recipe: R,
    ) -> Source<B> {
        let (op, id) = (self.op, self.moment.clock);
        let mut head = Head::new(op, id, Shape::new([]), DType::U8, device, ledger);
        head.bytes = 0;
        head.cost_ns = cost_ns;
        head.step = self.step();
        head.lineage = self.lineage;
        Source::new(Arc::new(Node {
            head,
            state: Mutex::new(self.state(Storage::Evicted, Origin::Recorded)),
            recipe: Mutex::new(Some(recipe)),
        }))
    }

    /// The counters for a result on this device.
    fn ledger(&self, device: &Device<B>) -> Arc<Ledger> {
        self.moment.ledger(device.id())
    }

    /// What it took, under a budget.
    fn cost_ns(&self, elements: impl FnOnce() -> usize) -> Option<f32> {
        let cost = self.cost.as_ref()?;
        let estimated = || cost.ns(elements() as u64);
        Some(self.clock.ns().unwrap_or_else(estimated))
    }

    /// Tells the budget what the operation took and gave.
    fn computed(&self, ledger: &Ledger, cost_ns: f32, bytes: u64) {
        if let (Some(budget), Some(cost)) = (ledger.budget(), &self.cost) {
            budget.computed(cost_ns);
            if cost.expected != Some(bytes) {
                budget.expect(cost.key(), bytes);
            }
        }
    }

    fn step(&self) -> u64 {
        self.moment.step.map_or(0, |step| step.number)
    }

    #[inline]
    fn state(&self, storage: Storage<B>, origin: Origin) -> State<B> {
        State::new(
            storage,
            origin,
            self.moment.clock,
            self.moment.scope.clone(),
        )
    }

    #[inline]
    fn head(&self, value: &Value<B>, shape: Shape, cost_ns: f32) -> Head<B> {
        let device = value.device().unwrap_or_default();
        let ledger = self.ledger(&device);
        let dtype = value.dtype();
        let elements = shape.num_elements();
        let (group, own) = match &self.storage {
            Shares::Own => (None, true),
            Shares::Leaf => (None, false),
            Shares::With(source) => (Some(source.clone()), true),
        };
        Head {
            op: self.op,
            id: self.moment.clock,
            bytes: if own { bytes(elements, dtype) } else { 0 },
            contiguous: self.op.work != Work::View || is_contiguous(self.op),
            row_major: self.order.is_kept(self.op, elements),
            shape,
            dtype,
            device,
            group,
            residents: AtomicU32::new(0),
            listed: AtomicBool::new(false),
            retired: AtomicBool::new(false),
            users: AtomicU32::new(0),
            ledger,
            cost_ns,
            step: self.step(),
            lineage: self.lineage,
        }
    }

    /// Made in place: nodes are large, and there is one an operation.
    #[inline]
    fn node<R: Recipe<B>>(
        &self,
        value: Value<B>,
        shape: Shape,
        cost_ns: f32,
        recipe: Option<R>,
    ) -> Arc<Node<B, R>> {
        let origin = match recipe {
            Some(_) => Origin::Recorded,
            None => Origin::Fixed,
        };
        Arc::new(Node {
            head: self.head(&value, shape, cost_ns),
            state: Mutex::new(self.state(Storage::Resident(value), origin)),
            recipe: Mutex::new(recipe),
        })
    }

    /// Counts a new node, and tells its scope and its budget of it.
    fn enter(&self, node: Arc<dyn Entry<B>>) -> Managed<B> {
        let head = node.head();
        head.came();
        head.emit(|op, node| EventKind::Alloc { op, node }, head.bytes);
        if let Some(scope) = &self.moment.scope {
            let weak: Weak<dyn Entry<B>> = Arc::downgrade(&node);
            scope.enlist(weak, head.own_bytes());
        }
        if let Some(budget) = head.ledger.budget() {
            budget.register(&node);
        }
        Managed::new(Source::new(node))
    }
}

/// What a result descends from; an operation that only one direction has says where in a step the thread is.
#[inline]
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
    let begins = match operands {
        Lineage::Gradient => budget::is_forward_only(op),
        Lineage::Activation => step.phase == Phase::Backward && budget::is_layer(op),
    };
    if begins {
        moment.step = context::forward_begins();
        return Lineage::Activation;
    }
    operands
}

/// Whether the result of a view operation is contiguous if its operand is.
#[inline]
fn is_contiguous(op: &OpInfo) -> bool {
    ["reshape", "detach", "set_require_grad"]
        .iter()
        .any(|name| op.name.ends_with(name))
}
