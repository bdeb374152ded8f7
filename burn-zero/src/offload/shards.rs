//! State shared by a `ZeroOptimizer` and an offloaded optimizer inside it during a step.
//!
//! An updated shard is sent to the other ranks and uploaded with theirs, so it stays in host memory: if it were uploaded
//! at once, it would have to be downloaded again for sending. And shards are cut anew in each step, so only the
//! `ZeroOptimizer` knows their leaves. Layers between the two (clipping, a scaler) pass nothing on, so the state is a thread-local.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Param, ParamId};
use burn::tensor::{Shape, Tensor, TensorData, TensorPrimitive, backend::AutodiffBackend};
use burn_backend::tensor::Device;

use super::parameters::Leaf;

thread_local! {
    /// During a step of a `ZeroOptimizer`.
    static STEP: RefCell<Option<ShardStep>> = const { RefCell::new(None) };
}

struct ShardStep {
    /// The node of the leaf that each shard is cut from.
    nodes: HashMap<ParamId, u64>,
    updated: HostShards,
}

/// Updated shards in host memory.
#[derive(Default)]
pub(crate) struct HostShards(HashMap<ParamId, HostShard>);

struct HostShard {
    /// Taken when it is sent.
    data: Option<Arc<TensorData>>,
    /// Shared with the optimizer: the leaf of the parameter that the shard becomes part of.
    leaf: Leaf,
}

/// Restores the thread's earlier state when dropped, also by a panic.
struct Before(Option<ShardStep>);

impl Drop for Before {
    fn drop(&mut self) {
        STEP.set(self.0.take());
    }
}

/// Runs a step on shards, given the nodes of the leaves that they are cut from. Shards that it updates on the host stay there.
pub(crate) fn step_on_shards<R>(
    nodes: HashMap<ParamId, u64>,
    step: impl FnOnce() -> R,
) -> (R, HostShards) {
    let updated = HostShards::default();
    let _before = Before(STEP.replace(Some(ShardStep { nodes, updated })));
    let result = step();
    let updated = STEP.take().map(|step| step.updated).unwrap_or_default();
    (result, updated)
}

/// The node of the leaf that a shard is cut from, if it is known; `None` outside of a step on shards.
pub(super) fn node_of_shard(id: ParamId) -> Option<Option<u64>> {
    STEP.with_borrow(|step| Some(step.as_ref()?.nodes.get(&id).copied()))
}

/// Whether this thread is in a step on shards.
pub(super) fn are_stepped() -> bool {
    STEP.with_borrow(Option::is_some)
}

/// An updated shard that stays in host memory, as a lazy parameter: it is uploaded only if it is read before it is taken. `leaf` is set
/// to the leaf that it becomes part of.
pub(super) fn leave_on_host<B: AutodiffBackend, const D: usize>(
    id: ParamId,
    data: TensorData,
    device: &Device<B>,
    requires_grad: bool,
    leaf: Leaf,
) -> Param<Tensor<B, D>> {
    let shape = Shape::from(data.shape.to_vec());
    let data = Arc::new(data);
    let shard = HostShard {
        data: Some(data.clone()),
        leaf,
    };
    STEP.with_borrow_mut(|step| {
        if let Some(step) = step {
            step.updated.0.insert(id, shard);
        }
    });
    let upload = move |device: &Device<B>, requires_grad: bool| {
        let value = B::float_from_data(TensorData::clone(&data), device);
        let value = Tensor::<B, D>::from_primitive(TensorPrimitive::Float(value));
        value.set_require_grad(requires_grad)
    };
    Param::uninitialized(id, upload, device.clone(), requires_grad, shape)
}

impl HostShards {
    /// Takes an updated shard, whose data its parameter shares; `None` if it was not updated on the host.
    pub(crate) fn take(&mut self, id: ParamId) -> Option<Arc<TensorData>> {
        self.0.get_mut(&id)?.data.take()
    }

    /// Discards a shard that was read as a tensor and may have changed: the optimizer downloads it again in its next step.
    pub(crate) fn forget(&mut self, id: ParamId) {
        self.0.remove(&id);
    }

    /// Notes that the shard became part of the leaf of this node.
    pub(crate) fn is_in(&mut self, id: ParamId, node: Option<u64>) {
        if let Some(shard) = self.0.remove(&id) {
            shard.leaf.set(node);
        }
    }
}
