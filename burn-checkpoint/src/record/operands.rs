//! The operands of an operation, and what the result takes from them.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, DeviceOps, TensorMetadata};

use super::call::Call;
use super::shares::Shares;
use crate::node::content::{Content, State};
use crate::node::entry::AnyEntry;
use crate::node::extent::Extent;
use crate::node::gradient::Gradient;
use crate::node::kind::{Kind, Value};
use crate::node::replay;
use crate::node::source::Source;
use crate::node::{Node, Storage};
use crate::observe::trace::{self, EventKind};
use crate::record::context;
use crate::record::step::{Lineage, Phase};
use crate::record::work::Work;

impl<B: Backend> Call<B> {
    /// Whether the result is a delivered tensor, because all of its operands are.
    pub(super) fn pass_delivery(&self) -> bool {
        self.delivered.is_some() && !self.has_others && self.op.work.passes_delivery()
    }

    /// Sees an operand that is no node, with its mark if it is a gradient.
    pub fn see_leaf<K: Kind<B>>(&mut self, tensor: &K::Primitive, gradient: Option<&Gradient>) {
        self.has_others = true;
        if let Some(gradient) = gradient {
            self.see_gradient(gradient);
        } else {
            self.operands.others = true;
            if self.is_first_of_view() {
                self.shares = Some(Shares::Leaf);
            }
        }
        if let Some(cost) = &mut self.cost {
            let extent = match gradient {
                Some(gradient) => gradient.extent(),
                None => Extent::of(&tensor.shape(), tensor.dtype()),
            };
            cost.operand(extent, || tensor.shape());
            self.device.get_or_insert_with(|| K::device(tensor).id());
        }
    }

    /// Sees the device that the result is to be on, where it need not be that of the operands.
    pub fn see_device(&mut self, device: &Device<B>) {
        if self.cost.is_some() {
            self.device = Some(device.id());
        }
    }

    /// Sees a plain number, such as a dimension.
    pub fn see_number(&mut self, number: usize) {
        if let Some(cost) = &mut self.cost {
            cost.hash(number);
        }
    }

    /// Sees the type of the result.
    pub fn see_type(&mut self, dtype: DType) {
        if let Some(cost) = &mut self.cost {
            cost.hash(dtype);
        }
    }

    /// Sees any other plain argument, such as the options of a convolution.
    pub fn see_plain(&mut self, argument: &dyn Debug) {
        // The sizes of views are not remembered.
        if let Some(cost) = &mut self.cost
            && self.op.work != Work::View
        {
            cost.argument(argument);
        }
    }

    /// Sees an operand that is a node.
    pub fn see_node(&mut self, source: &Source<B>) {
        let node = source.node();
        let meta = &node.meta;
        if trace::is_on() && meta.op.is_parameter {
            let path = meta.op.name;
            trace::emit(EventKind::Parameter { path }, 0, 0, None);
        }
        let mut state = node.state();
        if let Some(cost) = &mut self.cost {
            cost.operand(meta.extent, || meta.shape.clone());
            self.device.get_or_insert_with(|| node.memory().device);
        }
        if let Some(step) = self.op_context.step {
            let made = node.step();
            let is_of_step = made.number == step.number;
            match node.lineage() {
                Lineage::Gradient if is_of_step && step.phase != Phase::Forward => {
                    self.lineage = Lineage::Gradient;
                }
                Lineage::Gradient | Lineage::State => self.operands.state = true,
                Lineage::Activation if !is_of_step => self.operands.state = true,
                // A constant of backward, which is a node in a trace.
                Lineage::Activation if made.phase != Phase::Forward && state.content.is_kept() => {}
                Lineage::Activation => self.operands.others = true,
            }
        }
        if self.is_first_of_view() {
            self.see_viewed(source, &state);
        }
        let bytes = node.bytes();
        self.largest = self.largest.max(bytes);
        if meta.is_delivered {
            let delivered = self.delivered.get_or_insert_default();
            delivered.add(node, &mut state);
        } else {
            self.has_others = true;
        }
        if let Some(own) = &node.budgeted {
            own.last_used
                .store(self.op_context.number, Ordering::Relaxed);
        }
        if let (Some(own), Some(user)) = (state.home.region(), &self.op_context.region)
            && !Arc::ptr_eq(user, own)
        {
            state.feeds_inner_scope |= user.is_within(own);
        }
        if !state.content.is_resident() || self.outlived(node, &state) {
            self.see_waiting(node);
        }
        let last = bytes > 0 && node.users() == 1 && Arc::strong_count(node) == 1;
        if last && state.content.is_kept() {
            self.given_up = self.given_up.max(bytes);
        }
        if last && !node.is_branch_point() && self.op.writes {
            self.written = self.written.max(node.own_bytes());
        }
    }

    /// Sees the operand of a view operation.
    #[inline(never)]
    fn see_viewed(&mut self, source: &Source<B>, state: &State<B>) {
        let node = source.node();
        self.share(node.meta.contiguous, || {
            if node.bytes() == 0 {
                Shares::Leaf
            } else {
                Shares::With(source.clone())
            }
        });
        if self.may_offload() {
            self.viewed = viewed(node, state);
        }
    }

    /// Sees an operand that has to be brought back.
    #[cold]
    fn see_waiting(&mut self, node: &Arc<Node<B>>) {
        self.waiting.get_or_insert_default().push(node.clone());
    }

    fn see_gradient(&mut self, gradient: &Gradient) {
        let step = self.op_context.step;
        if !step.is_some_and(|step| gradient.is_of(step)) {
            self.operands.state = true;
        } else if gradient.is_constant() {
            self.is_constant = true;
        } else {
            self.lineage = Lineage::Gradient;
        }
        if self.is_first_of_view() {
            self.share(gradient.is_contiguous(), || {
                Shares::Gradient(gradient.clone())
            });
        }
        let bytes = gradient.own_bytes();
        self.largest = self.largest.max(bytes);
        if gradient.is_last() {
            self.given_up = self.given_up.max(bytes);
            if self.op.writes {
                self.written = self.written.max(bytes);
            }
        }
    }

    /// Of a view operation, once its first operand was seen: whose storage the result has.
    fn share(&mut self, is_contiguous: bool, with: impl FnOnce() -> Shares<B>) {
        let copies = self.op.reshapes && !is_contiguous;
        self.shares = Some(if copies { Shares::Own } else { with() });
        if copies && let Some(cost) = &mut self.cost {
            cost.copies = true;
        }
    }

    #[inline]
    fn is_first_of_view(&self) -> bool {
        self.op.work == Work::View && self.shares.is_none()
    }

    /// Brings back evicted operands. References to them end here: the last holder of an operand may
    /// reuse its storage.
    #[cold]
    pub(super) fn bring_back(&mut self, waiting: Vec<Arc<Node<B>>>) {
        replay::bring_back(waiting.iter().cloned());
        for node in waiting {
            let outlived = self.outlived(&node, &node.state());
            if outlived {
                // Recipes must not reach into earlier steps.
                node.settle();
                node.retire();
            }
        }
    }

    /// Whether a tensor was recorded in an earlier step: it is state, such as running statistics.
    fn outlived(&self, node: &Node<B>, state: &State<B>) -> bool {
        let step = self.op_context.step;
        step.is_some_and(|step| node.step().number < step.number) && state.content.is_recorded()
    }

    /// Whether the innermost scope may move anything to the host.
    #[inline]
    fn may_offload(&self) -> bool {
        let region = self.op_context.region.as_ref();
        region.is_some_and(|region| region.policy.may_offload())
    }

    /// Whether a recipe would cost more memory than it saves. It would keep the storage of an
    /// operand that cannot come back and has no other reference, so that the result's can be
    /// dropped: this saves memory only if the result is larger.
    pub(super) fn gives_up(&self) -> bool {
        self.given_up > 0 && self.given_up * 2 > self.largest
    }

    /// Makes room for the result, on the device that it will be on.
    pub(super) fn make_room(&mut self) {
        let (Some(cost), Some(device)) = (&mut self.cost, self.device) else {
            return;
        };
        let memory = self.memory.insert(context::memory_on(device));
        let Some(budget) = memory.budget() else {
            return;
        };
        let bytes = match (self.op.work, &self.shares) {
            // A view that copies is as large as its operand.
            (Work::View, Some(Shares::Own)) => cost.largest_bytes,
            (Work::View, _) => return,
            _ => {
                cost.expected = budget.expected(cost.key());
                cost.expected.unwrap_or(cost.largest_bytes)
            }
        };
        budget.make_room(self.op.name, bytes.saturating_sub(self.written));
    }
}

/// The storage of the tensor that a view of this one is a view of: of this one, or of the one that
/// this is a view of itself.
fn viewed<B: Backend>(node: &Node<B>, state: &State<B>) -> Option<Box<Value<B>>> {
    match (&node.storage, &state.content) {
        (Storage::Own(_), content) => content.value().cloned().map(Box::new),
        (Storage::Shared { .. }, Content::Recorded(recorded)) => recorded.viewed.clone(),
        (Storage::Shared { .. }, _) => None,
    }
}
