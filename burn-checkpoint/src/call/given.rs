//! Tensors that no recipe of this thread computes: random numbers, data, what others deliver.

use std::sync::Arc;

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, DeviceId, DeviceOps, Shape, TensorData};

use super::recorded::Call;
use super::results::Results;
use crate::clock::{Lineage, Phase};
use crate::context;
use crate::entry::Origin;
use crate::handle::Managed;
use crate::kind::Value;
use crate::node::{Source, State, Storage, TensorMeta};
use crate::op::OpInfo;
use crate::recipe::{Never, Recipe};
use crate::recorded::Node;

/// The room that an operation without operands needs, as its arguments tell it one after the other.
#[derive(Default)]
pub(crate) struct Room {
    device: Option<DeviceId>,
    bytes: Option<u64>,
    elements: u64,
    element_bytes: u64,
}

impl Room {
    pub fn on<D: DeviceOps>(&mut self, device: &D) {
        self.device = Some(device.id());
    }

    pub fn shape(&mut self, shape: &Shape) {
        self.elements = shape.num_elements() as u64;
    }

    /// The type of an element; of several the elements have all.
    pub fn dtype(&mut self, dtype: impl Into<DType>) {
        self.element_bytes += dtype.into().size() as u64;
    }

    pub fn data(&mut self, data: &TensorData) {
        self.bytes = Some(data.as_bytes().len() as u64);
    }

    pub fn range(&mut self, range: &std::ops::Range<i64>) {
        self.elements = range.end.saturating_sub(range.start).max(0) as u64;
    }

    /// The step of a range.
    pub fn step(&mut self, step: usize) {
        self.elements = self.elements.div_ceil((step as u64).max(1));
    }

    /// Makes it, where a device was told of.
    pub fn make(self, op: &'static OpInfo) {
        let Some(device) = self.device else { return };
        let bytes = self.bytes.unwrap_or(self.elements * self.element_bytes);
        context::memory_on(device).make_room(op.name, bytes);
    }
}

/// What cannot be computed again, counted.
pub(crate) fn fixed<B: Backend>(op: &'static OpInfo, mut value: Value<B>) -> Results<B> {
    let mut call = Call::new(op);
    if let Some(step) = call.op_context.step {
        let elements = value.shape().num_elements();
        if op.name == "float_ones" && elements == 1 {
            // What autodiff starts a backward pass with.
            call.op_context.step = context::backward_begins();
            call.lineage = Lineage::Gradient;
        } else if op.name.ends_with("from_data") && elements > 1 && step.phase == Phase::Backward {
            call.op_context.step = context::forward_begins();
        }
    }
    call.finish(&mut value, &mut None::<Never>)
}

/// A tensor that somebody else delivers.
pub(crate) fn source<B: Backend, R: Recipe<B>>(
    op: &'static OpInfo,
    (shape, dtype, device): (Shape, DType, Device<B>),
    recipe: R,
) -> Managed<B> {
    let op_context = context::tick(op);
    let memory = context::memory_on(device.id());
    let state = State::new(Storage::Evicted, Origin::Source, op_context.number, None);
    let meta = TensorMeta::new(op, op_context.number, shape, dtype, device, memory);
    Managed::new(Source::new(Arc::new(Node::new(meta, state, Some(recipe)))))
}
