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

use crate::budget::{self, Clock, Costs, OpCost, Phase, Place};
use crate::context::{self, Moment};
use crate::handle::Managed;
use crate::kind::Value;
use crate::ledger::Ledger;
use crate::node::{Entry, Head, Lineage, Node, Origin, State, Storage, bytes};
use crate::op::{OpInfo, Work};
use crate::policy::Fate;
use crate::recipe::{Never, Part, Parts, Recipe, Source};
use crate::trace::EventKind;

pub(crate) use given::{Room, fixed, source};
use operands::{Operands, Shares};
pub(crate) use results::Results;

/// An operation under way. Made in place and changed there: it is large, and there is one an operation.
pub(crate) struct Call<B: Backend> {
    op: &'static OpInfo,
    moment: Moment,
    operands: Operands<B>,
    /// Whether the result keeps its recipe.
    records: bool,
    clock: Clock,
    lineage: Lineage,
}

impl<B: Backend> Call<B> {
    #[inline]
    pub fn new(op: &'static OpInfo) -> Self {
        Self {
            op,
            moment: context::tick(op),
            operands: Operands::new(op),
            records: false,
            clock: Clock::start(Costs::Estimated),
            lineage: Lineage::Activation,
        }
    }

    /// Looks at the operands, brings them back, and decides what becomes of the result: whether it keeps its recipe.
    pub fn begin(&mut self, recipe: &mut Option<impl Recipe<B>>) {
        if self.moment.step.is_some() {
            self.operands.cost = Some(OpCost::new(self.op));
        }
        if let Some(recipe) = &*recipe {
            let (operands, moment) = (&mut self.operands, &self.moment);
            recipe.inputs(&mut |input| operands.see(input, moment));
        }
        self.decide();
        if !self.records {
            // Before the operation runs: it may then write into its operands.
            *recipe = None;
        }
    }

    fn decide(&mut self) {
        self.operands.bring_back(&self.moment);
        self.lineage = lineage(&mut self.moment, self.op, self.operands.lineage);
        self.records = !self.operands.gives_up()
            && self.moment.fate != Fate::Keep
            && self.lineage == Lineage::Activation;
        if self.moment.step.is_some() {
            self.operands.make_room(&self.moment);
        }
        self.clock = Clock::start(self.moment.costs);
    }

    /// The result with its recipe, if it gets one. Both are taken from where they are: they are large, and what is passed on by
    /// value is copied each time.
    #[inline]
    pub fn finish<R: Recipe<B>>(
        &mut self,
        value: &mut Value<B>,
        recipe: &mut Option<R>,
    ) -> Results<B> {
        if let Value::Many(parts) = value {
            return self.finish_many(std::mem::take(parts), recipe.take());
        }
        let node = self.node(value, recipe, |elements| self.cost_ns(elements));
        let head = &node.head;
        if let Some(viewed) = self.operands.viewed.take()
            && (head.group.is_some() || !head.row_major)
        {
            node.state.lock().viewed = Some(viewed);
        }
        self.computed(&head.ledger, head.cost_ns, head.bytes);
        Results::One(Some(self.enter(node)))
    }

    fn finish_many<R: Recipe<B>>(&self, parts: Vec<Value<B>>, recipe: Option<R>) -> Results<B> {
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
    fn finish_parts<R: Recipe<B>>(&self, parts: Vec<Value<B>>, recipe: R) -> Results<B> {
        let elements = parts.iter().map(|part| part.shape().num_elements()).sum();
        let cost_ns = self.cost_ns(elements);
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
    fn enter_part<R: Recipe<B>>(&self, mut part: Value<B>, mut recipe: Option<R>) -> Managed<B> {
        self.enter(self.node(&mut part, &mut recipe, |_| 0.0))
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
        let scope = self.moment.scope.clone();
        let state = State::new(Storage::Evicted, Origin::Recorded, id, scope);
        Source::new(Arc::new(Node {
            head,
            state: Mutex::new(state),
            recipe: Mutex::new(Some(recipe)),
        }))
    }

    /// The counters for a result on this device.
    fn ledger(&self, device: &Device<B>) -> Arc<Ledger> {
        self.moment.ledger(device.id())
    }

    /// What it took to give so many elements; 0 without a budget.
    #[inline]
    fn cost_ns(&self, elements: usize) -> f32 {
        let Some(cost) = &self.operands.cost else {
            return 0.0;
        };
        self.clock.ns().unwrap_or_else(|| cost.ns(elements as u64))
    }

    /// Tells the budget what the operation took and gave.
    fn computed(&self, ledger: &Ledger, cost_ns: f32, bytes: u64) {
        if let (Some(budget), Some(cost)) = (ledger.budget(), &self.operands.cost) {
            budget.computed(cost_ns);
            if cost.expected != Some(bytes) {
                budget.expect(cost.key(), bytes);
            }
        }
    }

    fn step(&self) -> u64 {
        self.moment.step.map_or(0, |step| step.number)
    }

    /// With one handle, which is made when the node is entered.
    #[inline]
    fn head(&self, value: &Value<B>, cost_ns: impl FnOnce(usize) -> f32) -> Head<B> {
        let device = value.device().unwrap_or_default();
        let ledger = self.ledger(&device);
        let shape = value.shape();
        let dtype = value.dtype();
        let elements = shape.num_elements();
        let (group, own) = match &self.operands.shares {
            None => (None, true),
            Some(Shares::Leaf) => (None, false),
            Some(Shares::With(source)) => (Some(source.clone()), true),
        };
        Head {
            op: self.op,
            id: self.moment.clock,
            bytes: if own { bytes(elements, dtype) } else { 0 },
            contiguous: self.op.work != Work::View || is_contiguous(self.op),
            row_major: self.operands.order.is_kept(self.op, elements),
            shape,
            dtype,
            device,
            group,
            residents: AtomicU32::new(0),
            listed: AtomicBool::new(false),
            place: Place::default(),
            retired: AtomicBool::new(false),
            users: AtomicU32::new(1),
            ledger,
            cost_ns: cost_ns(elements),
            step: self.step(),
            lineage: self.lineage,
        }
    }

    /// Made in its place: `Arc::new` would make it on the stack and copy it, and this allocates first.
    #[inline]
    fn node<R: Recipe<B>>(
        &self,
        value: &mut Value<B>,
        recipe: &mut Option<R>,
        cost_ns: impl FnOnce(usize) -> f32,
    ) -> Arc<Node<B, R>> {
        let origin = match recipe {
            Some(_) => Origin::Recorded,
            None => Origin::Fixed,
        };
        Arc::new_cyclic(|_| {
            let head = self.head(value, cost_ns);
            let scope = self.moment.scope.clone();
            let storage = Storage::Resident(std::mem::replace(value, Value::Absent));
            Node {
                head,
                state: Mutex::new(State::new(storage, origin, self.moment.clock, scope)),
                recipe: Mutex::new(recipe.take()),
            }
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
        Managed::first(Source::new(node))
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
