//! The exchange of gradients between ranks, as this rank sees it; and their way to the host, where the optimizer is.

use core::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn_backend::TensorData;
use parking_lot::Mutex;

use super::layout::Layout;
use super::memory_tracker::MemoryTracker;
use super::reduced::Reduced;
use super::step_tag::StepTag;
use super::worker::{Arrival, Orders, Task, Worker};
use crate::group::ProcessGroup;
use crate::host::HostRead;
use crate::shard::Readiness;
use crate::{Memory, Stage, ZeroError, ZeroSettings};

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
pub(crate) struct GradientReducer {
    number: u64,
    orders: Arc<Orders>,
    worker: Worker,
    pass: Mutex<Option<Pass>>,
    /// Steps of the optimizer.
    steps: AtomicU64,
    /// Before a pass.
    nothing: Readiness,
    arriving: Mutex<Arriving>,
}

/// The gradients that have arrived since `begin`.
struct Pass {
    task: Task,
    readiness: Readiness,
    /// By bucket, until it is full.
    arrivals: Vec<Vec<Arc<Arrival>>>,
    /// By parameter, what is to stay in host memory.
    landing: Vec<Option<Arc<Arrival>>>,
    at: StepTag,
}

impl GradientReducer {
    pub(crate) fn new(
        layout: Layout,
        group: Arc<dyn ProcessGroup>,
        settings: &ZeroSettings,
    ) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let orders = Arc::new(Orders {
            layout,
            group,
            stage: settings.stage,
            op: settings.reduction,
            dtype: settings.communication_dtype,
            memory: settings.gradients,
            tracker: MemoryTracker::default(),
        });
        Self {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            steps: AtomicU64::new(0),
            nothing: Readiness::new(orders.layout.map()),
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

    /// Counts the gradients that this rank holds.
    pub(crate) fn tracker(&self) -> &MemoryTracker {
        &self.orders.tracker
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

    /// The optimizer is about to take a step.
    pub(crate) fn next_step(&self, lr: f64) -> StepTag {
        let number = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        StepTag::Step { number, lr }
    }

    /// Starts the pass of a backward pass: gradients are reduced now, or stay on the host until they are.
    pub(crate) fn begin_backward(&self) {
        let steps = self.steps.load(Ordering::Relaxed);
        let task = match self.timing() {
            Timing::DuringBackward => Task::Reduce,
            Timing::AtTheStep => Task::Land,
        };
        self.begin(task, StepTag::Backward { steps });
    }

    /// Starts the pass of a step, which reduces all gradients.
    pub(crate) fn begin_step(&self, at: StepTag) {
        self.begin(Task::Reduce, at);
    }

    /// Starts a pass over all parameters.
    fn begin(&self, task: Task, at: StepTag) {
        let layout = &self.orders.layout;
        *self.pass.lock() = Some(Pass {
            task,
            readiness: self.nothing.clone(),
            arrivals: vec![Vec::new(); layout.buckets().len()],
            landing: vec![None; layout.parameters().len()],
            at,
        });
    }

    /// Whether a pass is under way that waits for this parameter.
    pub(crate) fn takes(&self, parameter: usize) -> bool {
        let pass = self.pass.lock();
        pass.as_ref()
            .is_some_and(|pass| !pass.readiness.has(parameter))
    }

    /// Brings a gradient, or the word that there is none. Waits if too many buckets are under way.
    pub(crate) fn submit(&self, parameter: usize, gradient: Option<HostRead>) {
        let layout = &self.orders.layout;
        let mut pass = self.pass.lock();
        let Some(pass) = &mut *pass else { return };
        debug_assert!(!pass.readiness.has(parameter), "one gradient a parameter");
        let bytes = layout.parameters()[parameter].bytes();
        let arrival = Arrival::new(parameter, gradient, bytes, &self.orders.tracker);
        let arrival = Arc::new(arrival);
        for bucket in layout.buckets_of(parameter) {
            pass.arrivals[bucket].push(arrival.clone());
        }
        if pass.task == Task::Land {
            pass.landing[parameter] = Some(arrival.clone());
        }
        drop(arrival);
        for bucket in pass.readiness.arrive(parameter) {
            let arrivals = core::mem::take(&mut pass.arrivals[bucket]);
            self.worker.send(pass.task, bucket, arrivals, pass.at);
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
        let missing: Vec<_> = match &*self.pass.lock() {
            Some(pass) => pass.readiness.missing().collect(),
            None => Vec::new(),
        };
        for parameter in missing {
            self.submit(parameter, None);
        }
    }
}

impl fmt::Debug for GradientReducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GradientReducer")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use burn::tensor::{DType, Tensor};
    use burn_flex::Flex;

    use super::*;
    use crate::group::{Pending, Request, SingleRank, Traffic};
    use crate::reduce::Parameter;

    /// Tells what is called.
    #[derive(Debug)]
    struct Told(SingleRank, Sender<String>);

    impl ProcessGroup for Told {
        fn rank(&self) -> usize {
            self.0.rank()
        }

        fn world_size(&self) -> usize {
            self.0.world_size()
        }

        fn submit(&self, request: Request) -> Pending {
            self.1
                .send(request.label.clone())
                .expect("the test listens");
            self.0.submit(request)
        }

        fn abort(&self, reason: &str) {
            self.0.abort(reason);
        }

        fn traffic(&self) -> Traffic {
            self.0.traffic()
        }

        fn declare_settings(&self, text: &str) {
            self.0.declare_settings(text);
        }
    }

    /// Four parameters of ten elements, each a bucket.
    fn reducer() -> (GradientReducer, Receiver<String>) {
        let parameters = (0..4).map(|index| Parameter {
            path: format!("p{index}"),
            shape: vec![10],
            dtype: DType::F32,
        });
        let settings = ZeroSettings {
            bucket_elements: 10,
            ..ZeroSettings::stage(Stage::Gradients)
        };
        let layout = Layout::new(parameters.collect(), 1, 0, &settings).unwrap();
        let (told, calls) = channel();
        let group = Arc::new(Told(SingleRank::new(), told));
        (GradientReducer::new(layout, group, &settings), calls)
    }

    fn gradient(value: f32) -> Option<HostRead> {
        let gradient = Tensor::<Flex, 1>::full([10], value, &Default::default());
        Some(HostRead::start::<Flex>(gradient.into_primitive().tensor()))
    }

    #[test]
    fn buckets_are_reduced_while_backward_goes_on() {
        let (reducer, calls) = reducer();
        let next = || calls.recv_timeout(Duration::from_secs(20)).unwrap();
        for pass in 0..2 {
            // As with several ranks.
            reducer.begin(Task::Reduce, StepTag::Backward { steps: pass });
            reducer.submit(3, gradient(3.0));
            // Nothing else has arrived yet.
            assert_eq!(
                next(),
                format!("gradients of bucket 3, after step {pass} (p3)")
            );
            reducer.submit(1, gradient(1.0));
            assert!(reducer.takes(2) && !reducer.takes(1));
            reducer.submit(2, gradient(2.0));
            // The first did not go before the second, whatever came first.
            assert_eq!(
                next(),
                format!("gradients of bucket 2, after step {pass} (p2)")
            );
            assert_eq!(
                next(),
                format!("gradients of bucket 1, after step {pass} (p1)")
            );
            let reduced = reducer.finish().unwrap();
            assert_eq!(
                next(),
                format!("gradients of bucket 0, after step {pass} (p0)")
            );
            assert!(next().starts_with("which gradients there are"));
            assert!(!reduced[0].is_present() && !reducer.takes(0));
            for (parameter, reduced) in reduced.iter().enumerate().skip(1) {
                assert_eq!(reduced.elements, [parameter as f32; 10]);
            }
            reducer.next_step(0.1);
        }
        assert!(calls.try_recv().is_err(), "nothing else is sent");
    }
}
