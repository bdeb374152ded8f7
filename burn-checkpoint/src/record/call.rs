//! One operation that is recorded.

use std::sync::Arc;

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, DeviceId, DeviceOps, Shape};
use burn_decorator::gradient::{self, Pass};

use super::results::Results;
use super::room::Room;
use super::shares::Shares;
use crate::budget::again::again;
use crate::budget::counted::CountedBytes;
use crate::budget::memory::MemoryStats;
use crate::node::budgeted::Budgeted;
use crate::node::content::{Content, Home, State};
use crate::node::entry::Origin;
use crate::node::extent::Extent;
use crate::node::gradient::Gradient;
use crate::node::handle::Managed;
use crate::node::kind::Value;
use crate::node::meta::TensorMeta;
use crate::node::recipe::Part;
use crate::node::recipe::Recipe;
use crate::node::replay::{self, Locked};
use crate::node::source::Source;
use crate::node::{Node, Storage};
use crate::observe::trace::{self, EventKind};
use crate::record::context::{self, OpContext};
use crate::record::cost::OpCost;
use crate::record::flags;
use crate::record::op::OpInfo;
use crate::record::step::{Lineage, Phase, Step};
use crate::record::work::Work;
use crate::scope::policy::{OpCall, SavePolicy};

/// An operation under way: what is known of it before it runs, once its operands were seen, and
/// after it. Built and changed in place: it is large, and each operation needs one.
pub(crate) struct Call<B: Backend> {
    pub(super) op: &'static OpInfo,
    pub(super) op_context: OpContext,
    /// How the result comes back if it gets a recipe; fixed if it gets none.
    origin: Origin,
    /// That of the operands until they are all seen, then that of the result.
    pub(super) lineage: Lineage,
    /// Operands that are evicted, or have outlived their step. Seldom any: an option is dropped
    /// faster than an empty list.
    pub(super) waiting: Option<Vec<Arc<Node<B>>>>,
    /// Of a view operation, once its first operand was seen.
    pub(super) shares: Option<Shares<B>>,
    /// For a view in a scope that may offload: the storage of what it is a view of.
    pub(super) viewed: Option<Box<Value<B>>>,
    /// Whether the result is a constant of this backward pass if it has no recipe: it is new, or an
    /// operand is one.
    pub(super) is_constant: bool,
    /// Bytes of the largest operand.
    pub(super) largest: u64,
    /// Bytes of the largest operand that cannot come back and that only this operation refers to.
    pub(super) given_up: u64,
    /// Bytes of the operand that the operation writes into.
    pub(super) written: u64,
    pub(super) cost: Option<OpCost>,
    /// Where the result will be; known only under a budget.
    pub(super) device: Option<DeviceId>,
    /// The counters of that device.
    pub(super) memory: Option<Arc<MemoryStats>>,
    /// Delivered operands, until the operation is over.
    pub(super) delivered: Option<Locked<B>>,
    /// Whether any operand is not delivered.
    pub(super) has_others: bool,
    pub(super) operands: Operands,
}

/// What an operation works on besides gradients and constants of this step, under a budget.
#[derive(Default)]
pub(super) struct Operands {
    /// Something that an earlier step left.
    pub state: bool,
    /// Something else: an activation, or what was there before the budget.
    pub others: bool,
}

impl<B: Backend> Call<B> {
    /// Not inlined, so that the code of each operation is shorter.
    #[inline(never)]
    pub fn new(op: &'static OpInfo) -> Self {
        let op_context = context::tick(op);
        Self {
            op,
            cost: op_context.step.map(|_| OpCost::new(op)),
            op_context,
            origin: Origin::Kept,
            lineage: Lineage::Activation,
            waiting: None,
            shares: None,
            viewed: None,
            is_constant: false,
            largest: 0,
            given_up: 0,
            written: 0,
            device: None,
            memory: None,
            delivered: None,
            has_others: false,
            operands: Operands::default(),
        }
    }

    /// Whether the operation needs its recipe: its result may come back, or it may have to run
    /// again. Without a recipe it may write into its operands.
    #[inline]
    pub fn needs_recipe(&self) -> bool {
        self.origin != Origin::Kept || self.retrying().is_some()
    }

    /// Runs the operation by its recipe, as often as there is no memory for it, if its budget
    /// retries.
    #[inline]
    pub fn retry(&self, recipe: Option<&Arc<dyn Recipe<B>>>) -> Option<Value<B>> {
        Some(self.run_again(self.retrying()?, &**recipe?))
    }

    /// The counters of the device that the result will be on, if their budget runs operations again
    /// for which there is no memory.
    #[inline]
    fn retrying(&self) -> Option<&MemoryStats> {
        let memory = self.memory.as_deref();
        memory.filter(|memory| memory.retries())
    }

    #[cold]
    fn run_again(&self, memory: &MemoryStats, recipe: &dyn Recipe<B>) -> Value<B> {
        // Inputs stay locked through all tries: otherwise each try would begin with the same
        // replays.
        let mut inputs = None;
        again(memory, self.op, || {
            inputs.get_or_insert_with(|| replay::lock_inputs(recipe));
            recipe.run()
        })
    }

    /// As [`Self::begin`], for a new tensor that takes `room`: a function of plain arguments. It is
    /// recorded in forward passes; in backward and in the optimizer it is a constant, and at once
    /// written to.
    pub fn begin_new(&mut self, room: Room) {
        if self.op.work == Work::Fixed {
            return self.begin_fixed(room);
        }
        self.memory = room.make(self.op);
        if let Some(cost) = &mut self.cost {
            cost.expected = Some(room.bytes());
        }
        if let Some(step) = self.op_context.step {
            let is_seed = self.op.name == "float_ones" && context::is_seed(room.elements());
            if is_seed {
                // Autodiff starts a backward pass with it.
                self.op_context.step = context::begin(Phase::Backward);
                self.lineage = Lineage::Gradient;
            }
            if is_seed || step.phase != Phase::Forward {
                self.is_constant = !is_seed;
                return;
            }
        }
        if !self.op_context.keeps {
            self.origin = Origin::Recorded;
        }
    }

    /// As [`Self::begin_new`], for what cannot be computed again, such as random numbers. Data of
    /// more than one element begins a forward pass.
    fn begin_fixed(&mut self, room: Room) {
        if let Some(step) = self.op_context.step
            && step.phase != Phase::Forward
            && self.op.name.ends_with("from_data")
            && room.elements() > 1
            && gradient::pass().is_none()
        {
            self.op_context.step = context::begin(Phase::Forward);
        }
        // Nothing asks what it costs.
        self.cost = None;
        self.memory = room.make(self.op);
    }

    /// Begins an operation whose arguments were seen: brings operands back, and decides what
    /// becomes of the result: whether it has a recipe.
    pub fn begin(&mut self) {
        if let Some(waiting) = self.waiting.take() {
            self.bring_back(waiting);
        }
        if self.pass_delivery() {
            return self.begin_delivered();
        }
        self.lineage = self.result_lineage();
        if !self.gives_up() && !self.op_context.keeps && self.lineage == Lineage::Activation {
            self.origin = Origin::Recorded;
        }
        if self.op_context.step.is_some() {
            self.make_room();
        }
    }

    /// Begins an operation on delivered operands alone, whose result belongs to no scope and to no
    /// step.
    #[cold]
    fn begin_delivered(&mut self) {
        self.op_context.region = None;
        self.origin = Origin::Delivered;
        self.make_room();
    }

    /// The results, with their recipe unless they are never evicted. The value is taken from a
    /// reference: passing such a large one copies it.
    pub fn results<'a>(
        &mut self,
        value: &'a mut Value<B>,
        recipe: Option<Arc<dyn Recipe<B>>>,
    ) -> Results<'a, B> {
        let recipe = recipe.filter(|_| self.origin != Origin::Kept);
        if let Value::Many(parts) = value {
            let recipe = recipe.filter(|_| self.origin == Origin::Recorded);
            return self.finish_many(std::mem::take(parts), recipe);
        }
        if let Some(gradient) = self.gradient(value) {
            return Results::Gradient(value, Some(gradient));
        }
        let node = self.node(value, recipe);
        if let Some(viewed) = self.viewed.take() {
            keep_viewed(&node, viewed);
        }
        if let Some(own) = &node.budgeted {
            self.computed(node.memory(), own.cost_ns, node.bytes());
        }
        Results::One(Some(self.enter(node)))
    }

    /// Counts the only result, if it is a gradient or a constant of backward, and need not be a
    /// node. It has to be one in a scope, which may move it to the host, and where it has to be
    /// found by its operation: in a trace, and where operations are tried again.
    fn gradient(&mut self, value: &Value<B>) -> Option<Gradient> {
        let step = self.op_context.step?;
        let is_node = match &self.shares {
            // A node would not count the storage.
            Some(Shares::Gradient(_)) => false,
            Some(Shares::Leaf | Shares::With(_)) => true,
            None | Some(Shares::Own) => trace::is_on() || self.retrying().is_some(),
        };
        let in_scope = self.op_context.region.is_some();
        let is_gradient = self.lineage != Lineage::Activation;
        let is_fixed = self.origin == Origin::Kept;
        let is_marked = match &self.shares {
            _ if is_node => false,
            _ if is_gradient => !in_scope,
            // No recipe keeps the storage, so the view has to be what counts it.
            Some(Shares::Gradient(owner)) if owner.is_constant() => is_fixed,
            _ => self.is_constant && is_fixed && !in_scope,
        };
        if !is_marked {
            return None;
        }
        let memory = self.memory_on(&value.device().unwrap_or_default());
        // It takes a place whether it is a node or not: otherwise a rank that records a trace would
        // repeat other evictions.
        memory.budget()?.next_place();
        let extent = Extent::of(&value.shape(), value.dtype());
        let cost_ns = self.cost_ns(&memory, extent.elements, extent.bytes);
        self.computed(&memory, cost_ns, extent.bytes);
        let is_contiguous = self.is_contiguous();
        match &self.shares {
            Some(Shares::Gradient(gradient)) => Some(gradient.view(extent, is_contiguous)),
            _ => Gradient::new(memory, extent, step, self.lineage, is_contiguous),
        }
    }

    /// Whether a reshape of the result is a view.
    fn is_contiguous(&self) -> bool {
        self.op.work != Work::View || self.op.keeps_order
    }

    /// With a recipe each result is a node that takes its part from one more node, which runs the
    /// operation.
    #[inline(never)]
    fn finish_many(
        &mut self,
        parts: Vec<Value<B>>,
        recipe: Option<Arc<dyn Recipe<B>>>,
    ) -> Results<'static, B> {
        let first = recipe.map(|recipe| Part {
            whole: self.whole(&parts, recipe),
            index: 0,
            siblings: Arc::default(),
        });
        // The cost of a part is 0: the operation's node has the cost of all.
        let cost = self.cost.take();
        let results = parts.into_iter().enumerate().map(|(index, mut part)| {
            if matches!(part, Value::Absent) {
                return None;
            }
            let recipe = first
                .clone()
                .map(|first| Arc::new(Part { index, ..first }) as _);
            // By its number traces tell it from the others.
            self.op_context.number = flags::tick();
            let node = self.node(&mut part, recipe);
            Some(self.enter(node))
        });
        let results: Vec<_> = results.collect();
        self.cost = cost;
        if let Some(first) = first {
            let nodes = || results.iter().flatten().map(Managed::node);
            first
                .siblings
                .get_or_init(|| nodes().map(Arc::downgrade).collect());
            let whole = first.whole.node();
            if let Some(own) = &whole.budgeted {
                let bytes = nodes().map(|node| node.bytes()).sum();
                self.computed(whole.memory(), own.cost_ns, bytes);
            }
        }
        Results::Many(results.into_iter())
    }

    /// The node of an operation with several results, which holds them only while a replay hands
    /// them out.
    fn whole(&mut self, parts: &[Value<B>], recipe: Arc<dyn Recipe<B>>) -> Source<B> {
        let device = parts.iter().find_map(Value::device).unwrap_or_default();
        let memory = self.memory_on(&device);
        let (mut elements, mut parts_bytes) = (0, 0);
        for part in parts {
            let extent = Extent::of(&part.shape(), part.dtype());
            elements += extent.elements;
            parts_bytes += extent.bytes;
        }
        let mut budgeted = self.budgeted(&memory, elements, parts_bytes);
        if let Some(own) = &mut budgeted {
            own.parts_bytes = parts_bytes;
        }
        let (shape, dtype) = (Shape::new([]), DType::U8);
        let meta = TensorMeta {
            op: self.op,
            id: self.op_context.number,
            call: 0,
            extent: Extent::of(&shape, dtype),
            shape,
            dtype,
            device,
            contiguous: true,
            is_delivered: false,
        };
        let storage = Storage::Own(CountedBytes::new(memory, 0));
        let home = Home::of_result(self.op_context.region.clone(), 0);
        let state = State::new(Content::recorded(None, recipe), home);
        Source::new(Arc::new(Node::new(meta, storage, budgeted, 0, state)))
    }

    /// The counters for a result on this device, taken from the operands if they are known.
    fn memory_on(&mut self, device: &Device<B>) -> Arc<MemoryStats> {
        burn_decorator::ensure_mended::<B>(device);
        let of_operands = self.memory.take();
        of_operands
            .filter(|memory| memory.device == device.id())
            .unwrap_or_else(|| context::memory_on(device.id()))
    }

    /// Nanoseconds of the operation, whose result has so many elements and bytes; 0 without a
    /// budget.
    #[inline]
    fn cost_ns(&self, memory: &MemoryStats, elements: u64, bytes: u64) -> f32 {
        let budget = memory.budget();
        let device = budget.and_then(|budget| budget.settings.device.as_ref());
        match (&self.cost, device) {
            (Some(cost), Some(device)) => cost.ns_on(device, elements, bytes),
            (Some(cost), _) => cost.ns(elements),
            (None, _) => 0.0,
        }
    }

    /// Reports the operation's cost to the budget, and its result's size if that is used to make
    /// room.
    fn computed(&self, memory: &MemoryStats, cost_ns: f32, bytes: u64) {
        if let (Some(budget), Some(cost)) = (memory.budget(), &self.cost) {
            budget.computed(cost.key(), cost_ns);
            if self.op.work != Work::View && cost.expected != Some(bytes) {
                budget.expect(cost.key(), bytes);
            }
        }
    }

    /// What the budget of these counters, if they have one, needs of a result of so many elements
    /// and bytes.
    #[inline]
    fn budgeted(&self, memory: &MemoryStats, elements: u64, bytes: u64) -> Option<Budgeted<B>> {
        memory.budget()?;
        let step = self.op_context.step.unwrap_or(Step::FIRST);
        let cost_ns = self.cost_ns(memory, elements, bytes);
        let id = self.op_context.number;
        Some(Budgeted::new(id, step, self.lineage, cost_ns))
    }

    /// Whether a policy that sees the result keeps it.
    fn is_kept(&self, value: &Value<B>) -> bool {
        let region = self.op_context.region.as_ref();
        let asking = region.filter(|region| region.policy.asks());
        asking.is_some_and(|region| {
            let (shape, dtype) = (value.shape(), value.dtype());
            let call = OpCall {
                op: self.op,
                number: self.op_context.call,
                bytes: Extent::of(&shape, dtype).bytes,
                shape: &shape,
                dtype,
            };
            region.policy.save_policy(&call) == SavePolicy::Keep
        })
    }

    /// The node of a result. Built inside its allocation: `Arc::new` would build it on the stack
    /// and copy it.
    fn node(
        &mut self,
        value: &mut Value<B>,
        mut recipe: Option<Arc<dyn Recipe<B>>>,
    ) -> Arc<Node<B>> {
        if recipe.is_some() && self.is_kept(value) {
            recipe = None;
        }
        Arc::new_cyclic(|_| {
            let device = value.device().unwrap_or_default();
            let memory = self.memory_on(&device);
            let (shape, dtype) = (value.shape(), value.dtype());
            let extent = Extent::of(&shape, dtype);
            let is_delivered = recipe.is_some() && self.origin == Origin::Delivered;
            let mut budgeted = self.budgeted(&memory, extent.elements, extent.bytes);
            if let (Some(own), Some(budget)) = (&mut budgeted, memory.budget()) {
                own.overwrites = self.written > 0;
                if !is_delivered {
                    own.place = budget.next_place();
                }
            }
            let storage = match &self.shares {
                None | Some(Shares::Own) => Storage::Own(CountedBytes::new(memory, extent.bytes)),
                // A gradient's bytes are counted by its handles.
                Some(Shares::Leaf | Shares::Gradient(_)) => {
                    Storage::Own(CountedBytes::new(memory, 0))
                }
                Some(Shares::With(source)) => Storage::shared(source.clone(), memory),
            };
            let meta = TensorMeta {
                op: self.op,
                id: self.op_context.number,
                call: self.op_context.call,
                shape,
                dtype,
                extent,
                device,
                contiguous: self.is_contiguous(),
                is_delivered,
            };
            let value = std::mem::replace(value, Value::Absent);
            let content = match recipe {
                None => Content::Kept(value),
                Some(recipe) if is_delivered => Content::Delivered {
                    value: Some(value),
                    recipe,
                },
                Some(recipe) => Content::recorded(Some(value), recipe),
            };
            let region = self.op_context.region.clone();
            let home = Home::of_result(region, self.op_context.call);
            // It has one user: the handle that `enter` makes.
            Node::new(meta, storage, budgeted, 1, State::new(content, home))
        })
    }

    /// Counts a new node, and adds it to its scope and its budget.
    fn enter(&self, node: Arc<Node<B>>) -> Managed<B> {
        node.counted().add();
        node.emit(|traced| EventKind::Alloc(traced, node.kind()), node.bytes());
        let weak = || Arc::downgrade(&node);
        if self.op_context.region.is_some() {
            context::enlist(weak(), node.own_bytes());
        }
        if let (Some(budget), Some(own)) = (node.budget(), &node.budgeted)
            && !node.meta.is_delivered
        {
            if let Storage::Shared { owner, .. } = &node.storage
                && let Some(owner) = &owner.node().budgeted
            {
                owner.add_view(&node);
            }
            budget.register(own.place, weak());
        }
        Managed::first(Source::new(node))
    }

    /// What the result descends from. An operation that only forward or only backward passes run
    /// changes the thread's phase.
    #[inline]
    fn result_lineage(&mut self) -> Lineage {
        let Some(step) = self.op_context.step else {
            return Lineage::Activation;
        };
        if self.op.is_backward_only {
            if step.phase == Phase::Forward {
                self.op_context.step = context::begin(Phase::Backward);
            }
            return Lineage::Gradient;
        }
        // A backward pass runs the product of a layer (linear, convolutions, attention) only on
        // gradients; what autodiff itself computes again is cheaper.
        let begins = self.lineage == Lineage::Gradient
            || step.phase != Phase::Forward && self.op.work == Work::Compute;
        let is_told = gradient::pass() == Some(Pass::Backward);
        if begins && self.op.is_forward_only && !is_told {
            self.op_context.step = context::begin(Phase::Forward);
            return Lineage::Activation;
        }
        let Operands { state, others } = self.operands;
        let is_of_state = self.lineage == Lineage::Activation && state && !others;
        if is_of_state && step.phase != Phase::Forward {
            return Lineage::State;
        }
        self.lineage
    }
}

/// Keeps the storage of the tensor that this one is a view of, for a scope that may offload it.
#[cold]
fn keep_viewed<B: Backend>(node: &Node<B>, viewed: Box<Value<B>>) {
    if let Content::Recorded(recorded) = &mut node.state().content
        && matches!(node.storage, Storage::Shared { .. })
    {
        recorded.viewed = Some(viewed);
    }
}
