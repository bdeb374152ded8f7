//! Fusion: operations wait in burn-fusion's queue, and the [`Ledger`] follows them when it runs
//! them, those that are fused as one kernel.
//!
//! The queue is that of a real device; only its [fusers](crate::fusers) and what runs are ours.

use std::sync::Arc;

use burn_backend::{
    Device, DeviceHandle, DeviceId, DeviceService, DeviceServiceStage, ServerUtilitiesHandle,
    StreamId,
};
use burn_decorator::carried::{carry, with};
use burn_fusion::client::GlobalFusionClient;
use burn_fusion::stream::{Context, Operation, OperationStreams, OrderedExecution};
use burn_fusion::{FusionRuntime, OperationFuser, Optimization};
use burn_ir::{FloatOperationIr, HandleContainer, NumericOperationIr, OperationIr};
use parking_lot::Mutex;

use crate::device::MetaDevice;
use crate::fusers::{Kernel, fusers};
use crate::ledger::{Call, Ledger};

/// The queue of a device, which runs on a thread of its own. Operations are handed over to that
/// thread thousands at a time: burn-fusion hands over each by itself, and both threads then spin
/// while they wait for each other.
#[derive(Clone)]
pub(crate) struct Queue {
    client: GlobalFusionClient<Runtime>,
    thread: DeviceHandle<Thread>,
    /// Operations that are not handed over yet; `None` if no operation waits.
    pushed: Arc<Mutex<Option<Vec<Queued>>>>,
}

impl Queue {
    pub fn new(device: &MetaDevice) -> Self {
        Self {
            client: GlobalFusionClient::load(device),
            thread: DeviceHandle::new(device.to_id()),
            pushed: Arc::default(),
        }
    }

    /// Adds an operation.
    pub fn push(&self, ledger: &Arc<Mutex<Ledger>>, mut call: Call) {
        // The thread sleeps until it gets operations, and takes long to wake.
        const MOST: usize = 1 << 14;
        call.op = match call.op {
            // An operation that burn-fusion does not have.
            OperationIr::NumericFloat(dtype, NumericOperationIr::PowiScalar(op)) => {
                OperationIr::Float(dtype, FloatOperationIr::PowfScalar(op))
            }
            op => op,
        };
        let mut pushed = self.pushed.lock();
        let pushed = pushed.get_or_insert_default();
        pushed.push(Queued {
            ledger: ledger.clone(),
            call: Arc::new(call),
        });
        if pushed.len() == MOST {
            self.hand_over(std::mem::take(pushed), || ());
        }
    }

    /// Runs all that waits.
    pub fn drain(&self) {
        if let Some(pushed) = self.pushed.lock().take() {
            self.hand_over(pushed, || self.client.sync(|| ()));
        }
    }

    /// Waits for what the queue runs by itself.
    pub fn settle(&self) {
        if let Some(pushed) = &mut *self.pushed.lock() {
            self.hand_over(std::mem::take(pushed), || ());
        }
    }

    /// Hands over what was pushed, then calls `end` on the queue's thread.
    fn hand_over(&self, pushed: Vec<Queued>, end: impl FnOnce() + Send) {
        let run = || {
            pushed.into_iter().for_each(|queued| self.register(queued));
            end();
        };
        let done = STREAM.executes(|| self.thread.exclusive(run));
        done.expect("the queue's thread runs");
    }

    fn register(&self, queued: Queued) {
        let op = queued.call.op.clone();
        let streams = OperationStreams::default();
        let tensors = self.client.register(streams, op, queued);
        // The router has tensors of its own for the results. What becomes an operand is not
        // dropped.
        tensors
            .into_iter()
            .for_each(|tensor| drop(tensor.into_ir()));
    }
}

/// All threads that use a device share a stream here.
const STREAM: StreamId = StreamId { value: 0 };

/// The thread of a device's queue.
struct Thread;

impl DeviceService for Thread {
    fn init(_: DeviceId) -> Self {
        Self
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        Arc::new(())
    }

    /// That of burn-fusion's service, so that both have one thread, on which `register` runs at
    /// once.
    fn stage() -> DeviceServiceStage {
        DeviceServiceStage::Upstream
    }
}

/// An operation in the queue.
#[derive(Clone, Debug)]
struct Queued {
    ledger: Arc<Mutex<Ledger>>,
    call: Arc<Call>,
}

/// The operations of the kernel that runs.
#[derive(Default)]
struct OfKernel(Vec<Queued>);

impl Operation<Runtime> for Queued {
    fn execute(&self, _: &mut HandleContainer<()>) {
        let of_kernel = with(|kernel: &mut OfKernel| kernel.0.push(self.clone()));
        if of_kernel.is_none() {
            self.ledger.lock().register(&self.call);
        }
    }
}

impl Optimization<Runtime> for Kernel {
    fn execute(&mut self, context: &mut Context<()>, execution: &OrderedExecution<Runtime>) {
        let run = || {
            for operation in 0..self.operations {
                let operation = execution.operation_within_optimization(operation);
                operation.execute(&mut context.handles);
            }
        };
        let ((), of_kernel) = carry(OfKernel::default(), run);
        let operations = of_kernel.unwrap_or_default().0;
        let calls: Vec<_> = operations.iter().map(|queued| &*queued.call).collect();
        // All are of one device.
        if let Some(first) = operations.first() {
            first.ledger.lock().register_kernel(&calls);
        }
    }

    fn to_state(&self) {}

    fn from_state(_: &MetaDevice, (): ()) -> Self {
        unreachable!("kernels are not saved")
    }
}

/// What the queue runs on.
#[derive(Debug)]
pub(crate) struct Runtime;

impl FusionRuntime for Runtime {
    type OptimizationState = ();
    type Optimization = Kernel;
    type FusionHandle = ();
    type FusionDevice = MetaDevice;

    fn fusers(device: MetaDevice) -> Vec<Box<dyn OperationFuser<Kernel>>> {
        fusers(device.kernels)
    }
}
