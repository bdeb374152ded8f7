//! What the operands of an operation look like.

use std::sync::Arc;

use burn_backend::{Backend, DeviceId, DeviceOps};

use super::order::Order;
use crate::budget::{OpCost, Phase};
use crate::context::Moment;
use crate::node::{Entry, Head, Lineage, Origin, State, Storage, Viewed};
use crate::op::{OpInfo, Work};
use crate::recipe::{Input, Source};
use crate::replay;

/// Whose storage the result has, if not its own.
pub(super) enum Shares<B: Backend> {
    /// An unmanaged tensor's.
    Leaf,
    /// That of a managed tensor.
    With(Source<B>),
}

/// What is known once all operands were seen.
pub(super) struct Operands<B: Backend> {
    op: &'static OpInfo,
    /// What is evicted, and what has outlived its step.
    waiting: Vec<Arc<dyn Entry<B>>>,
    /// Of a view: the first operand's storage.
    pub shares: Option<Shares<B>>,
    /// Whether it is copied all the same.
    copies: bool,
    pub order: Order,
    /// For a view in a scope that may offload: what it is a view of.
    pub viewed: Option<Box<Viewed<B>>>,
    /// Bytes of the largest operand.
    largest: u64,
    /// Bytes of the largest operand that cannot come back and that nobody but this operation refers to.
    given_up: u64,
    pub cost: Option<OpCost>,
    /// Where the result will be; known only under a budget.
    device: Option<DeviceId>,
    pub lineage: Lineage,
}

impl<B: Backend> Operands<B> {
    #[inline]
    pub fn new(op: &'static OpInfo) -> Self {
        Self {
            op,
            waiting: Vec::new(),
            shares: None,
            copies: false,
            order: Order::default(),
            viewed: None,
            largest: 0,
            given_up: 0,
            cost: None,
            device: None,
            lineage: Lineage::Activation,
        }
    }

    pub fn see(&mut self, input: Input<'_, B>, moment: &Moment) {
        let source = match input {
            Input::Node(source) => source,
            Input::Leaf(leaf) => {
                if self.is_first_of_view() {
                    self.shares = Some(Shares::Leaf);
                }
                // In which order it lies is not known. How large it is matters only where something may be offloaded.
                if may_offload(moment) {
                    self.order.see(&leaf().0, false);
                } else {
                    self.order.odd_elements = usize::MAX;
                }
                if let Some(cost) = &mut self.cost {
                    let (shape, dtype, device) = leaf();
                    cost.operand(&shape, dtype);
                    self.device.get_or_insert_with(|| device.id());
                }
                return;
            }
            Input::To(device) => {
                if self.cost.is_some() {
                    self.device = Some(device.id());
                }
                return;
            }
            Input::Number(number) => {
                self.order.number.get_or_insert(number);
                if let Some(cost) = &mut self.cost {
                    cost.argument(&number);
                }
                return;
            }
            Input::Plain(argument) => {
                // No room is made for views.
                if let Some(cost) = &mut self.cost
                    && self.op.work != Work::View
                {
                    cost.argument(argument);
                }
                return;
            }
        };
        let node = source.node();
        let head = node.head();
        let mut state = node.state();
        if let Some(cost) = &mut self.cost {
            cost.operand(&head.shape, head.dtype);
            self.device.get_or_insert_with(|| head.ledger.device());
        }
        if let Some(step) = moment.step
            && step.phase == Phase::Backward
            && head.lineage == Lineage::Gradient
            && head.step == step.number
        {
            self.lineage = Lineage::Gradient;
        }
        self.order.see(&head.shape, head.row_major);
        if self.is_first_of_view() {
            self.copies = !head.contiguous && self.op.name.ends_with("reshape");
            self.shares = match &head.group {
                _ if self.copies => None,
                Some(group) => Some(Shares::With(group.clone())),
                None if head.bytes == 0 => Some(Shares::Leaf),
                None => Some(Shares::With(source.clone())),
            };
            if self.copies
                && let Some(cost) = &mut self.cost
            {
                cost.copies();
            }
            if may_offload(moment) {
                self.viewed = viewed(source, head, &state);
            }
        }
        self.largest = self.largest.max(head.bytes);
        state.last_used = moment.clock;
        if let (Some(own), Some(user)) = (&state.scope, &moment.scope)
            && !Arc::ptr_eq(user, own)
        {
            state.feeds_inner_scope |= user.is_within(own);
        }
        if !state.is_resident() || outlived(head, &state, moment) {
            self.waiting.push(node.clone());
        }
        if state.origin == Origin::Fixed && head.bytes > 0 {
            // The operand's handle and what was saved for a recipe are two references.
            let last = head.users() == 1 && Arc::strong_count(node) == 2;
            if last {
                self.given_up = self.given_up.max(head.bytes);
            }
        }
    }

    #[inline]
    fn is_first_of_view(&self) -> bool {
        self.op.work == Work::View && self.shares.is_none() && !self.copies
    }

    /// Brings back what is evicted. None of it is referred to from here on: who is the last to refer to an operand may have it.
    #[inline]
    pub fn bring_back(&mut self, moment: &Moment) {
        if !self.waiting.is_empty() {
            let waiting = std::mem::take(&mut self.waiting);
            replay::bring_back(waiting.iter().cloned());
            settle_outlived(waiting, moment);
        }
    }

    /// Whether a recipe would not pay. It would keep the storage of an operand that cannot come back and that nobody else
    /// wants, to be able to drop that of the result: nothing is won unless the result is larger.
    pub fn gives_up(&self) -> bool {
        self.given_up > 0 && self.given_up * 2 > self.largest
    }

    /// Makes room for the result, on the device that it will be on.
    pub fn make_room(&mut self, moment: &Moment) {
        let (Some(cost), Some(device)) = (&mut self.cost, self.device) else {
            return;
        };
        if self.op.work == Work::View {
            return;
        }
        let ledger = moment.ledger(device);
        if let Some(budget) = ledger.budget() {
            cost.expected = budget.expected(cost.key());
            let bytes = cost.expected.unwrap_or(cost.largest_bytes());
            budget.make_room(self.op.name, bytes);
        }
    }
}

/// Whether the innermost scope may move anything to the host.
#[inline]
fn may_offload(moment: &Moment) -> bool {
    let scope = moment.scope.as_ref();
    scope.is_some_and(|scope| scope.policy.may_offload())
}

/// What a view of this tensor is a view of: this, or what this is a view of itself.
fn viewed<B: Backend>(
    source: &Source<B>,
    head: &Head<B>,
    state: &State<B>,
) -> Option<Box<Viewed<B>>> {
    match (&state.storage, &head.group) {
        (Storage::Resident(value), None) if head.row_major => Some(Box::new(Viewed {
            owner: source.clone(),
            value: value.clone(),
        })),
        _ => state.viewed.clone(),
    }
}

/// Recipes must not reach through the steps.
fn settle_outlived<B: Backend>(nodes: Vec<Arc<dyn Entry<B>>>, moment: &Moment) {
    for node in nodes {
        let outlived = outlived(node.head(), &node.state(), moment);
        if outlived {
            node.settle();
            node.retire();
        }
    }
}

/// Whether a tensor was recorded before a backward pass and is used after it: state, such as running statistics.
fn outlived<B: Backend>(head: &Head<B>, state: &State<B>, moment: &Moment) -> bool {
    moment
        .step
        .is_some_and(|step| step.phase == Phase::Forward && head.step < step.number)
        && state.origin == Origin::Recorded
}
