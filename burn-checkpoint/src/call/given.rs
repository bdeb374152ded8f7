//! Tensors that no recipe of this thread computes: random numbers, data, what others deliver.

use std::sync::Arc;

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, DeviceOps, Shape};

use super::recorded::Call;
use super::results::Results;
use crate::clock::Phase;
use crate::context;
use crate::entry::Origin;
use crate::handle::Managed;
use crate::kind::Value;
use crate::node::{Source, State, Storage, TensorMeta};
use crate::op::OpInfo;
use crate::recipe::{Never, Recipe};
use crate::recorded::Node;

/// What cannot be computed again, counted.
pub(crate) fn fixed<B: Backend>(op: &'static OpInfo, mut value: Value<B>) -> Results<B> {
    let mut call = Call::new(op);
    if let Some(step) = call.op_context.step
        && step.phase == Phase::Backward
        && op.name.ends_with("from_data")
        && value.shape().num_elements() > 1
    {
        call.op_context.step = context::begin(Phase::Forward);
    }
    call.finish(&mut value, &mut None::<Never>)
}

/// A tensor that a user's function delivers.
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
