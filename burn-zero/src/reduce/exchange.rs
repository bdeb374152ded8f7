//! The exchange of gradients between ranks, as this rank sees it; and their way to the host, where the optimizer is.

use core::fmt;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn_backend::TensorData;
use parking_lot::Mutex;

use super::layout::Layout;
use super::reduced::Reduced;
use super::worker::{Arrival, Orders, Task, Worker};
use crate::group::ProcessGroup;
use crate::host::HostRead;
use crate::{Memory, Sharding, Stage, ZeroError};

/// When gradients are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timing {
    /// Bucket by bucket, while backward goes on: stage 2.
    DuringBackward,
    /// When the optimizer gets them, once a window of micro-batches: stages 0 and 1.
    AtTheStep,
}

/// What the optimizer's next step meets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Arriving {
    /// Gradients of this rank alone.
    #[default]
    Local,
    /// What is reduced already, as far as this rank holds it.
    Reduced,
}

/// Buckets are reduced in their order, the same on every rank, whatever the order in which gradients arrive.
pub(crate) struct Exchange {
    number: u64,
    orders: Arc<Orders>,
    worker: Worker,
    pass: Mutex<Option<Pass>>,
    arriving: Mutex<Arriving>,
}

/// The gradients that have arrived since `begin`.
struct Pass {
    task: Task,
    /// By parameter.
    submitted: Vec<bool>,
    /// By parameter, what is to stay in host memory.
    landing: Vec<Option<Arc<Arrival>>>,
    buckets: Vec<Waiting>,
    /// So many buckets were not reduced yet: the first ones, as backward begins with the last parameters.
    remaining: usize,
}

/// A bucket before it is reduced.
struct Waiting {
    /// Parameters that it still waits for.
    missing: usize,
    arrivals: Vec<Arc<Arrival>>,
}

impl Exchange {
    pub(crate) fn new(layout: Layout, group: Arc<dyn ProcessGroup>, sharding: &Sharding) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let orders = Arc::new(Orders {
            layout,
            group,
            stage: sharding.stage,
            op: sharding.reduction,
            dtype: sharding.communication_dtype,
            memory: sharding.gradients,
        });
        Self {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            worker: Worker::start(orders.clone()),
            orders,
            pass: Mutex::default(),
            arriving: Mutex::default(),
        }
    }

    /// Exchanges of one thread are numbered in the order in which they were made.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.orders.layout
    }

    pub(crate) fn group(&self) -> &dyn ProcessGroup {
        &*self.orders.group
    }

    /// One rank has nothing to reduce, whatever the stage.
    pub(crate) fn timing(&self) -> Timing {
        match self.orders.stage {
            Stage::Gradients if self.group().world_size() > 1 => Timing::DuringBackward,
            _ => Timing::AtTheStep,
        }
    }

    /// Where gradients are between backward and the step.
    pub(crate) fn memory(&self) -> Memory {
        self.orders.memory
    }

    /// Whether there is anything to do before the step.
    pub(crate) fn is_idle(&self) -> bool {
        self.group().world_size() == 1 && self.memory() == Memory::Device
    }

    /// Whether gradients leave the device while backward goes on.
    pub(crate) fn takes_in_backward(&self) -> bool {
        self.timing() == Timing::DuringBackward || self.memory() == Memory::Host
    }

    /// Notes what the next step meets.
    pub(crate) fn note(&self, arriving: Arriving) {
        *self.arriving.lock() = arriving;
    }

    /// What this step meets.
    pub(crate) fn take_arriving(&self) -> Arriving {
        core::mem::take(&mut self.arriving.lock())
    }

    /// Starts the pass of a backward pass: gradients are reduced now, or stay on the host until they are.
    pub(crate) fn begin_backward(&self) {
        self.begin(match self.timing() {
            Timing::DuringBackward => Task::Reduce,
            Timing::AtTheStep => Task::Land,
        });
    }

    /// Starts the pass of a step, which reduces all gradients.
    pub(crate) fn begin_step(&self) {
        self.begin(Task::Reduce);
    }

    /// Starts a pass over all parameters.
    fn begin(&self, task: Task) {
        let layout = &self.orders.layout;
        let waiting = layout.buckets().iter().map(|bucket| Waiting {
            missing: bucket.segments().len(),
            arrivals: Vec::new(),
        });
        *self.pass.lock() = Some(Pass {
            task,
            landing: vec![None; layout.parameters().len()],
            submitted: vec![false; layout.parameters().len()],
            buckets: waiting.collect(),
            remaining: layout.buckets().len(),
        });
    }

    /// Whether a pass is under way that waits for this parameter.
    pub(crate) fn takes(&self, parameter: usize) -> bool {
        let pass = self.pass.lock();
        pass.as_ref().is_some_and(|pass| !pass.submitted[parameter])
    }

    /// Brings a gradient, or the word that there is none. Waits if too many buckets are under way.
    pub(crate) fn submit(&self, parameter: usize, gradient: Option<HostRead>) {
        let layout = &self.orders.layout;
        let mut pass = self.pass.lock();
        let Some(pass) = &mut *pass else { return };
        debug_assert!(!pass.submitted[parameter], "one gradient a parameter");
        pass.submitted[parameter] = true;
        let arrival = Arc::new(Arrival::new(parameter, gradient));
        for bucket in layout.buckets_of(parameter) {
            let bucket = &mut pass.buckets[bucket];
            bucket.missing -= 1;
            bucket.arrivals.push(arrival.clone());
        }
        if pass.task == Task::Land {
            pass.landing[parameter] = Some(arrival.clone());
        }
        drop(arrival);
        while let Some(next) = pass.remaining.checked_sub(1)
            && pass.buckets[next].missing == 0
        {
            let arrivals = core::mem::take(&mut pass.buckets[next].arrivals);
            self.worker.send(pass.task, next, arrivals);
            pass.remaining = next;
        }
    }

    /// Ends the pass: the reduced gradients, by parameter.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn finish(&self) -> Result<Vec<Reduced>, ZeroError> {
        self.submit_rest();
        *self.pass.lock() = None;
        self.worker.finish()
    }

    /// Ends the pass of gradients that stay on the host as they are: by parameter, in their own types.
    pub(crate) fn finish_landing(&self) -> Vec<Option<TensorData>> {
        self.submit_rest();
        let pass = self.pass.lock().take();
        let landing = pass.map_or(Vec::new(), |pass| pass.landing).into_iter();
        let mut landed: Vec<_> = landing.map(|arrival| arrival?.data()).collect();
        // A backward pass that began without this one.
        landed.resize(self.layout().parameters().len(), None);
        landed
    }

    /// No gradient of what was not submitted.
    fn submit_rest(&self) {
        for parameter in 0..self.orders.layout.parameters().len() {
            if self.takes(parameter) {
                self.submit(parameter, None);
            }
        }
    }

    /// The parameters that any rank finds non-finite.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn agree_on_non_finite(
        &self,
        own: &BTreeSet<usize>,
    ) -> Result<BTreeSet<usize>, ZeroError> {
        let parameters = 0..self.orders.layout.parameters().len();
        let own = parameters
            .clone()
            .map(|p| own.contains(&p).into())
            .collect();
        let label = "which gradients are non-finite";
        let findings = self.orders.group.gather_bytes(label, own)?;
        let found = |&p: &usize| findings.iter().any(|rank| rank[p] != 0);
        Ok(parameters.filter(found).collect())
    }
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}
