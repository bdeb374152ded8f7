//! `Autocast` as a backend.

use std::marker::PhantomData;

use burn_backend::distributed::{
    CollectiveTensor, DistributedConfig, DistributedOps, ReduceOperation,
};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, BackendTypes, DeviceId};

/// What autocast asks of the backend below it, which in burn-dispatch is its enum of backends.
pub trait Recorded: Backend {
    /// Names a kind of device.
    type DeviceId;

    /// All devices of a kind: burn-tensor asks `Dispatch` for them.
    fn enumerate(id: Self::DeviceId) -> Vec<Self::Device>;

    /// Names a runtime of CubeCL.
    type Runtime;

    /// All devices of a runtime: burn-tensor asks `Dispatch` for them.
    fn enumerate_cube(runtime: Self::Runtime) -> Vec<Self::Device>;

    /// Whether the tensor takes part in a graph: burn-tensor asks `Dispatch` for that.
    fn is_tracked(tensor: &FloatTensor<Self>) -> bool;

    /// Whether the tensor belongs to autodiff: parameters, data of an autodiff device and what is
    /// computed from them do, gradients and what an optimizer works on do not.
    fn is_recorded(tensor: &FloatTensor<Self>) -> bool;
}

/// A backend that picks the precision of every operation by itself, as
/// [`AmpConfig::install`](crate::AmpConfig::install) and [`autocast`](crate::autocast) say; off
/// until then. In the patched burn-dispatch `Dispatch` is `Autocast<backend::Dispatch>`.
///
/// Operations are lowered where an operand [is recorded](Recorded::is_recorded), and in an
/// [`autocast`](crate::autocast) scope. So a model without autodiff (`valid()`) runs in f32 unless
/// it is in a scope.
#[derive(Clone, Copy, Debug, Default)]
pub struct Autocast<B>(PhantomData<B>);

impl<B: Recorded> Autocast<B> {
    /// All devices of a kind.
    pub fn enumerate(id: B::DeviceId) -> Vec<B::Device> {
        B::enumerate(id)
    }

    /// All devices of a runtime of CubeCL.
    pub fn enumerate_cube(runtime: B::Runtime) -> Vec<B::Device> {
        B::enumerate_cube(runtime)
    }

    /// Whether the tensor takes part in a graph.
    pub fn is_tracked(tensor: &FloatTensor<B>) -> bool {
        B::is_tracked(tensor)
    }
}

impl<B: Backend> BackendTypes for Autocast<B> {
    burn_decorator::forward_types!(
        B,
        float tensor: B::FloatTensorPrimitive,
        int tensor: B::IntTensorPrimitive,
        bool tensor: B::BoolTensorPrimitive,
        quantized tensor: B::QuantizedTensorPrimitive
    );
}

impl<B: Recorded> Backend for Autocast<B> {
    burn_decorator::forward_device!(B);

    fn name(device: &Self::Device) -> String {
        format!("autocast<{}>", B::name(device))
    }
}

/// Collectives that a user calls go to the inner backend; those of the gradients' server are begun
/// below autodiff, not here.
impl<B: Recorded> DistributedOps<Self> for Autocast<B> {
    fn start_communication_server(devices: &[B::Device], config: DistributedConfig) {
        B::start_communication_server(devices, config);
    }

    fn close_communication_server(device: &B::Device) {
        B::close_communication_server(device);
    }

    fn all_reduce(
        tensor: FloatTensor<Self>,
        op: ReduceOperation,
        device_ids: Vec<DeviceId>,
    ) -> CollectiveTensor<Self> {
        CollectiveTensor::new(B::all_reduce(tensor, op, device_ids).resolve())
    }

    fn sync_collective(device: &B::Device) {
        B::sync_collective(device);
    }
}
