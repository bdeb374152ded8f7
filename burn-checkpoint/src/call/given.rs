//! Tensors that no recipe of this thread computes: random numbers, data, what others deliver.

use std::sync::Arc;

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, DeviceOps, Shape};
use parking_lot::Mutex;

use super::operands::Shares;
use super::order::Order;
use super::{Call, Results};
use crate::budget::{self, Clock, Costs, Phase};
use crate::context;
use crate::handle::Managed;
use crate::kind::Value;
use crate::node::{Head, Lineage, Node, Origin, State, Storage};
use crate::op::OpInfo;
use crate::recipe::{Never, Recipe, Source};

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
        let elements = value.shape().num_elements();
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
        order: Order::default(),
        viewed: None,
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
    let ledger = context::ledger(device.id());
    let state = State::new(Storage::Evicted, Origin::Source, moment.clock, None);
    Managed::new(Source::new(Arc::new(Node {
        head: Head::new(op, moment.clock, shape, dtype, device, ledger),
        state: Mutex::new(state),
        recipe: Mutex::new(Some(recipe)),
    })))
}
