//! Fusion: operations wait in burn-fusion's queue, and the [`Ledger`] follows them when it runs them, those that are fused as one kernel.
//!
//! The queue is that of a real device; only its [fusers](crate::fusers) and what runs are ours.

use std::cell::RefCell;
use std::sync::Arc;

use burn_backend::StreamId;
use burn_fusion::client::GlobalFusionClient;
use burn_fusion::stream::{Context, Operation, OperationStreams, OrderedExecution};
use burn_fusion::{FusionRuntime, NumOperations, OperationFuser, Optimization};
use burn_ir::{FloatOperationIr, HandleContainer, NumericOperationIr, OperationIr};
use parking_lot::Mutex;

use crate::client::MetaDevice;
use crate::fusers::fusers;
use crate::ledger::{Call, Ledger};

/// The queue of a device.
#[derive(Clone)]
pub(crate) struct Queue {
    client: GlobalFusionClient<Runtime>,
}

impl Queue {
    pub fn new(device: &MetaDevice) -> Self {
        Self {
            client: GlobalFusionClient::load(device),
        }
    }

    /// Adds an operation.
    pub fn push(&self, ledger: &Arc<Mutex<Ledger>>, mut call: Call) {
        call.op = match call.op {
            // An operation that burn-fusion does not have.
            OperationIr::NumericFloat(dtype, NumericOperationIr::PowiScalar(op)) => {
                OperationIr::Float(dtype, FloatOperationIr::PowfScalar(op))
            }
            op => op,
        };
        let op = call.op.clone();
        let queued = Queued {
            ledger: ledger.clone(),
            call: Arc::new(call),
        };
        let tensors = STREAM.executes(|| {
            let streams = OperationStreams::default();
            self.client.register(streams, op, queued)
        });
        // The router has tensors of its own for the results. What becomes an operand is not dropped.
        tensors
            .into_iter()
            .for_each(|tensor| drop(tensor.into_ir()));
    }

    /// Runs all that waits.
    pub fn drain(&self) {
        STREAM.executes(|| self.client.sync(|| ()));
    }

    /// Waits for what the queue runs by itself.
    pub fn settle(&self) {
        NO_STREAM.executes(|| self.client.sync(|| ()));
    }
}

/// All threads that use a device share a stream here.
const STREAM: StreamId = StreamId { value: 0 };
/// No operation is in it.
const NO_STREAM: StreamId = StreamId { value: u64::MAX };

/// An operation in the queue.
#[derive(Clone, Debug)]
struct Queued {
    ledger: Arc<Mutex<Ledger>>,
    call: Arc<Call>,
}

thread_local! {
    /// The operations of the kernel that the queue's thread runs.
    static KERNEL: RefCell<Option<Vec<Queued>>> = const { RefCell::new(None) };
}

impl Operation<Runtime> for Queued {
    fn execute(&self, _: &mut HandleContainer<()>) {
        KERNEL.with_borrow_mut(|kernel| match kernel {
            None => self.ledger.lock().register(&self.call),
            Some(operations) => operations.push(self.clone()),
        });
    }
}

/// Operations that run as one kernel.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    pub operations: usize,
}

impl NumOperations for Kernel {
    fn len(&self) -> usize {
        self.operations
    }

    fn name(&self) -> &'static str {
        "kernel"
    }
}

impl Optimization<Runtime> for Kernel {
    fn execute(&mut self, context: &mut Context<()>, execution: &OrderedExecution<Runtime>) {
        KERNEL.set(Some(Vec::new()));
        for operation in 0..self.operations {
            let operation = execution.operation_within_optimization(operation);
            operation.execute(&mut context.handles);
        }
        let operations = KERNEL.take().unwrap_or_default();
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
