//! The channel through which Burn's router hands over every operation.
//!
//! The router computes the shape and type of each result before it registers the operation, and
//! marks the last use of each tensor. The [`Ledger`] of the device follows the operations; nothing
//! is computed.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn_backend::{
    AllocationProperty, Bytes, DType, DTypeUsageSet, DeviceOps, ExecutionError, Shape, TensorData,
    TensorMetadata,
};
use burn_checkpoint::is_replaying;
use burn_decorator::carried::{carry, with};
use burn_decorator::simulated::set_inexact;
use burn_ir::{CustomOpIr, OperationIr, TensorId, TensorIr};
use burn_router::{BackendRouter, MultiBackendBridge, RouterTensor, RunnerChannel, RunnerClient};
use burn_std::future::DynFut;
use parking_lot::Mutex;

use crate::device::{Kernels, MetaDevice};
use crate::fusion::Queue;
use crate::ledger::{Call, Ledger};
use crate::rules::{Row, bytes};

impl MetaDevice {
    /// Notes that a backward pass has ended, before its gradients are added to those of other
    /// micro-batches: [`Estimate::shared`] then knows the gradients of each, which leave the device
    /// during backward where they are sharded or offloaded. Otherwise a step's last gradients count
    /// as temporary memory. With Fusion, what waits in the queue runs first.
    ///
    /// [`Estimate::shared`]: crate::Estimate::shared
    pub fn backward_ended(self) {
        self.drain();
        self.ledger().lock().backward_ended();
    }

    /// Bytes of all tensors that are alive on the device.
    pub fn bytes_in_use(self) -> u64 {
        let client = burn_router::get_client::<Channel>(&self);
        client.settle();
        client.ledger.lock().bytes_in_use()
    }

    pub(crate) fn ledger(self) -> Arc<Mutex<Ledger>> {
        burn_router::get_client::<Channel>(&self).ledger
    }

    /// Runs what waits in the queue.
    pub(crate) fn drain(self) {
        burn_router::get_client::<Channel>(&self).drain();
    }
}

/// The router's backend, which computes shapes.
pub(crate) type Router = BackendRouter<Channel>;
/// A tensor of any kind.
pub(crate) type Tensor = RouterTensor<Client>;

thread_local! {
    /// The operation that this thread registers.
    static ROW: Cell<&'static Row> = const { Cell::new(&Row { name: "", work: "fixed", group: "" }) };
}

/// The path of the parameter that operands are labelled as.
struct Label(Arc<str>);

/// Sets the row of the operation that the router registers next.
pub(crate) fn announce(row: &'static Row) {
    ROW.set(row);
}

/// Calls `touch`, in which the operand of each operation is labelled as the parameter of this name.
pub(crate) fn label(name: &str, touch: impl FnOnce()) {
    carry(Label(name.into()), touch);
}

/// One operation on `operands` with a result of each shape and type, as a kernel of its own.
pub(crate) fn native(operands: Vec<Tensor>, results: Vec<(Shape, DType)>) -> Vec<Tensor> {
    let client = operands[0].client.clone();
    let result = |(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype);
    let results: Vec<_> = results.into_iter().map(result).collect();
    let operands: Vec<_> = operands.into_iter().map(RouterTensor::into_ir).collect();
    let op = CustomOpIr::new(ROW.get().name, &operands, &results);
    client.register(OperationIr::Custom(op))
}

/// Whether a device composes the operation from others where burn-flex has a kernel.
pub(crate) fn is_composed(operand: &Tensor) -> bool {
    operand.client.device.kernels != Kernels::Flex
}

/// Whether Fusion joins operations on the tensor's device.
pub(crate) fn has_fusion(operand: &Tensor) -> bool {
    operand.client.device.fusion
}

/// A result like the first operand.
pub(crate) fn native_like(operands: Vec<Tensor>) -> Tensor {
    let result = (operands[0].shape(), operands[0].dtype());
    native(operands, vec![result]).remove(0)
}

#[derive(Clone, Debug)]
pub(crate) struct Channel;

#[derive(Clone)]
pub struct Client {
    device: MetaDevice,
    ledger: Arc<Mutex<Ledger>>,
    /// Where operations wait, if the device has Fusion.
    queue: Option<Queue>,
}

impl Client {
    fn drain(&self) {
        self.queue.iter().for_each(Queue::drain);
    }

    fn settle(&self) {
        self.queue.iter().for_each(Queue::settle);
    }
}

impl RunnerClient for Client {
    type Device = MetaDevice;

    fn register_op(&self, op: OperationIr) {
        let label = with(|label: &mut Label| label.0.clone());
        // A budget may have evicted the parameter: the operations that replay it are not labelled.
        if let Some(label) = label.filter(|_| !is_replaying()) {
            self.drain();
            return self.ledger.lock().touch(&op, label);
        }
        let call = Call::new(op, ROW.get());
        match &self.queue {
            None => self.ledger.lock().register(&call),
            Some(queue) => queue.push(&self.ledger, call),
        }
    }

    fn read_tensor_async(&self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        self.drain();
        self.ledger.lock().read(&tensor);
        let data = TensorData::from_bytes(zeros(bytes(&tensor)), tensor.shape, tensor.dtype);
        Box::pin(async move { Ok(data) })
    }

    fn sync(&self) -> Result<(), ExecutionError> {
        self.drain();
        Ok(())
    }

    fn create_empty_handle(&self) -> TensorId {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        TensorId::new(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    fn register_tensor_data(&self, data: TensorData) -> RouterTensor<Self> {
        let id = self.create_empty_handle();
        let tensor = TensorIr::uninit(id, data.shape.clone(), data.dtype);
        self.settle();
        self.ledger.lock().write(&tensor, ROW.get());
        RouterTensor::new(id, data.shape, data.dtype, self.clone())
    }

    fn device(&self) -> Self::Device {
        self.device
    }

    fn seed(&self, _seed: u64) {}

    fn dtype_usage(&self, dtype: DType) -> DTypeUsageSet {
        match dtype {
            DType::QFloat(_) => DTypeUsageSet::empty(),
            _ => burn_backend::DTypeUsage::general(),
        }
    }
}

/// Zeros that all reads share. The system commits no memory to pages that are only read, but a
/// smaller allocation would be cleared each time.
fn zeros(len: usize) -> Bytes {
    /// glibc maps each larger block from the system, and clears smaller ones.
    const LEAST: usize = 64 << 20;
    static ZEROS: Mutex<bytes::Bytes> = Mutex::new(bytes::Bytes::new());
    let mut zeros = ZEROS.lock();
    if zeros.len() < len {
        *zeros = vec![0; len.max(LEAST)].into();
    }
    Bytes::from_shared(zeros.slice(..len), AllocationProperty::Native)
}

/// The operations whose kernels lose more than one rounding of a low type.
fn inexact(kernels: Kernels) -> &'static [&'static str] {
    match kernels {
        Kernels::Flex => &[],
        // Burn's default, composed in the low type.
        Kernels::Cuda => &["gelu"],
        // Also functions that Vulkan's compilers compose.
        Kernels::Wgpu => &[
            "gelu",
            "float_sqrt",
            "float_tanh",
            "float_erf",
            "float_asinh",
            "float_acosh",
            "float_atanh",
            "float_log1p",
        ],
    }
}

impl RunnerChannel for Channel {
    type Device = MetaDevice;
    type Bridge = Bridge;
    type Client = Client;
    type FloatElem = f32;
    type IntElem = i32;
    type BoolElem = bool;

    fn name(_device: &MetaDevice) -> String {
        "meta".into()
    }

    fn init_client(device: &MetaDevice) -> Client {
        set_inexact(device.id(), inexact(device.kernels));
        Client {
            device: *device,
            ledger: Arc::new(Mutex::new(Ledger::new(device.kernels))),
            queue: device.fusion.then(|| Queue::new(device)),
        }
    }

    fn get_tensor_handle(tensor: &TensorIr, client: &Client) {
        client.drain();
        client.ledger.lock().read(tensor);
    }

    fn register_tensor(client: &Client, (): (), shape: Shape, dtype: DType) -> Tensor {
        let id = client.create_empty_handle();
        let tensor = TensorIr::uninit(id, shape.clone(), dtype);
        client.settle();
        client.ledger.lock().write(&tensor, ROW.get());
        RouterTensor::new(id, shape, dtype, client.clone())
    }
}

/// A move between devices carries only the shape.
pub(crate) struct Bridge;

impl MultiBackendBridge for Bridge {
    type TensorHandle = ();
    type Device = MetaDevice;

    fn change_backend_float(_tensor: (), _shape: Shape, _device: &MetaDevice) {}

    fn change_backend_int(_tensor: (), _shape: Shape, _device: &MetaDevice) {}

    fn change_backend_bool(_tensor: (), _shape: Shape, _device: &MetaDevice) {}
}
