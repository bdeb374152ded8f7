//! The gradient reducer: collects the gradients of this rank by bucket and submits full buckets as jobs to its group.

use core::fmt;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use burn_backend::TensorData;
use parking_lot::Mutex;

use super::landing::Landing;
use super::layout::Layout;
use super::memory_tracker::{MemoryTracker, TrackedBytes};
use super::reduced::Reduced;
use super::step_tag::StepTag;
use super::sum::{FullBucket, LocalGradient, Reduction, Sum};
use crate::group::{Pending, ProcessGroup};
use crate::host::HostRead;
use crate::shard::{Progress, ReducePlan};
use crate::{Memory, Stage, ZeroError, ZeroSettings};

/// When gradients are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timing {
    /// Bucket by bucket during backward: stage 2.
    DuringBackward,
    /// In the optimizer's step, once a window of micro-batches: stages 0 and 1.
    AtTheStep,
}

/// The gradients that the optimizer's next step gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Arriving {
    /// Gradients of this rank alone.
    #[default]
    Local,
    /// This rank's shards of reduced gradients.
    Reduced,
}

/// Submits full buckets to the communication thread in the order of a plan, which is the same on every rank, whatever the order in
/// which backward completes gradients.
pub(crate) struct GradientReducer {
    number: u64,
    group: Arc<dyn ProcessGroup>,
    how: Arc<Reduction>,
    memory: Memory,
    pass: Mutex<Option<Pass>>,
    /// Steps of the optimizer.
    steps: AtomicU64,
    /// For reductions in the step: from the last parameter to the first.
    step_plan: Arc<ReducePlan>,
    /// For reductions in backward: the order of rank 0's first backward pass.
    backward_plan: OnceLock<Arc<ReducePlan>>,
    arriving: Mutex<Arriving>,
}

/// The gradients that were submitted since a pass began.
enum Pass {
    Reduce(Reducing),
    Land(Landing),
}

/// Buckets submitted to the communication thread: one that is sent and one that waits. With the one that backward fills there are
/// three.
const GIVEN_BUCKETS: usize = 2;

struct Reducing {
    plan: Arc<ReducePlan>,
    progress: Progress,
    /// By bucket; taken when it is full.
    gradients: Vec<Vec<Arc<LocalGradient>>>,
    given: VecDeque<Pending<()>>,
    sum: Arc<Mutex<Sum>>,
    at: StepTag,
    failed: Option<ZeroError>,
}

impl GradientReducer {
    pub(crate) fn new(
        layout: Layout,
        group: Arc<dyn ProcessGroup>,
        settings: &ZeroSettings,
    ) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let step_plan = Arc::new(ReducePlan::of_map(layout.map()));
        let how = Reduction {
            layout,
            stage: settings.stage,
            op: settings.reduction,
            dtype: settings.communication_dtype,
            tracker: MemoryTracker::default(),
        };
        Self {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            group,
            how: Arc::new(how),
            memory: settings.gradients,
            pass: Mutex::default(),
            steps: AtomicU64::new(0),
            step_plan,
            backward_plan: OnceLock::new(),
            arriving: Mutex::default(),
        }
    }

    /// Reducers of one thread are numbered in the order in which they were made.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.how.layout
    }

    pub(crate) fn group(&self) -> &dyn ProcessGroup {
        &*self.group
    }

    /// Counts the gradients that this rank holds.
    pub(crate) fn tracker(&self) -> &MemoryTracker {
        &self.how.tracker
    }

    /// When gradients are reduced. With one rank nothing is, so backward is not involved in any stage.
    pub(crate) fn timing(&self) -> Timing {
        match self.how.stage {
            Stage::Gradients if self.group.world_size() > 1 => Timing::DuringBackward,
            _ => Timing::AtTheStep,
        }
    }

    /// Where gradients are between backward and the step.
    pub(crate) fn memory(&self) -> Memory {
        self.memory
    }

    /// Whether there is nothing to do before the step.
    pub(crate) fn is_idle(&self) -> bool {
        self.group.world_size() == 1 && self.memory == Memory::Device
    }

    /// Whether gradients leave the device during backward.
    pub(crate) fn takes_in_backward(&self) -> bool {
        self.timing() == Timing::DuringBackward || self.memory == Memory::Host
    }

    /// Sets which gradients the next step gets.
    pub(crate) fn note(&self, arriving: Arriving) {
        *self.arriving.lock() = arriving;
    }

    /// Takes what [`note`](Self::note) has set.
    pub(crate) fn take_arriving(&self) -> Arriving {
        core::mem::take(&mut self.arriving.lock())
    }

    /// Counts a step of the optimizer, and returns its tag.
    pub(crate) fn next_step(&self, lr: f64) -> StepTag {
        let number = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        StepTag::Step { number, lr }
    }

    /// Starts the pass of a backward pass: gradients are reduced in it, or copied to the host for the step. `order` returns the
    /// parameters that this rank's graph uses, in the expected order of their gradients.
    ///
    /// # Errors
    ///
    /// Those of the group: the first pass gathers the order of rank 0.
    pub(crate) fn begin_backward(
        &self,
        order: impl FnOnce() -> Vec<usize>,
    ) -> Result<(), ZeroError> {
        match self.timing() {
            Timing::DuringBackward => {
                let steps = self.steps.load(Ordering::Relaxed);
                let plan = self.plan_backward(order)?;
                self.begin(plan, StepTag::Backward { steps });
            }
            Timing::AtTheStep => *self.pass.lock() = Some(Pass::Land(Landing::new(self.layout()))),
        }
        Ok(())
    }

    /// The plan of all backward passes, fixed by the first in which rank 0's graph uses a parameter.
    fn plan_backward(
        &self,
        order: impl FnOnce() -> Vec<usize>,
    ) -> Result<Arc<ReducePlan>, ZeroError> {
        if let Some(plan) = self.backward_plan.get() {
            return Ok(plan.clone());
        }
        let own: Vec<u64> = match self.group.rank() {
            0 => order()
                .into_iter()
                .map(|parameter| parameter as u64)
                .collect(),
            _ => Vec::new(),
        };
        let own = own.into_iter().flat_map(u64::to_le_bytes).collect();
        let all = self.group.gather_bytes("order of the gradients", own)?;
        let order = all[0].as_chunks().0.iter();
        let order: Vec<_> = order
            .map(|&bytes| u64::from_le_bytes(bytes) as usize)
            .collect();
        if order.is_empty() {
            return Ok(self.step_plan.clone());
        }
        let plan = || Arc::new(ReducePlan::in_order(self.layout().map(), &order));
        Ok(self.backward_plan.get_or_init(plan).clone())
    }

    /// Starts the pass of a step, which reduces all gradients.
    pub(crate) fn begin_step(&self, at: StepTag) {
        self.begin(self.step_plan.clone(), at);
    }

    fn begin(&self, plan: Arc<ReducePlan>, at: StepTag) {
        *self.pass.lock() = Some(Pass::Reduce(Reducing {
            progress: Progress::new(&plan),
            gradients: vec![Vec::new(); plan.buckets().len()],
            given: VecDeque::new(),
            sum: Arc::new(Mutex::new(Sum::new(self.layout()))),
            plan,
            at,
            failed: None,
        }));
    }

    /// Whether a pass is under way that waits for this parameter.
    pub(crate) fn takes(&self, parameter: usize) -> bool {
        match &*self.pass.lock() {
            None => false,
            Some(Pass::Reduce(pass)) => !pass.progress.has(parameter),
            Some(Pass::Land(pass)) => !pass.has(parameter),
        }
    }

    /// Submits a parameter's gradient, or that there is none. Blocks if that fills a bucket while [`GIVEN_BUCKETS`] others are not
    /// reduced yet.
    pub(crate) fn submit(&self, parameter: usize, gradient: Option<HostRead>) {
        let mut pass = self.pass.lock();
        let bytes = self.layout().parameters()[parameter].bytes();
        let gradient = gradient.map(|read| (read, self.how.tracker.hold(bytes)));
        match &mut *pass {
            None => {}
            Some(Pass::Reduce(pass)) => pass.submit(self, parameter, gradient),
            Some(Pass::Land(pass)) => pass.submit(self.layout(), parameter, gradient),
        }
    }

    /// Ends the pass: the reduced gradients, by parameter. Parameters that were not submitted have no gradient on this rank.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn finish(&self) -> Result<Vec<Reduced>, ZeroError> {
        let sum = match self.pass.lock().take() {
            Some(Pass::Reduce(pass)) => pass.finish(self)?,
            // A backward pass that began without this reducer.
            _ => Sum::new(self.layout()),
        };
        sum.finish(self.group())
    }

    /// Ends the pass of gradients that are copied to the host unreduced: by parameter, in their own types.
    pub(crate) fn finish_landing(&self) -> Vec<Option<TensorData>> {
        match self.pass.lock().take() {
            Some(Pass::Land(landing)) => landing.finish(),
            // A backward pass that began without this reducer.
            _ => vec![None; self.layout().parameters().len()],
        }
    }
}

impl Reducing {
    fn submit(
        &mut self,
        reducer: &GradientReducer,
        parameter: usize,
        gradient: Option<(HostRead, TrackedBytes)>,
    ) {
        debug_assert!(!self.progress.has(parameter), "one gradient a parameter");
        if let Some((read, held)) = gradient {
            let gradient = Arc::new(LocalGradient::new(parameter, read, held));
            for &bucket in self.plan.buckets_of(parameter) {
                self.gradients[bucket].push(gradient.clone());
            }
        }
        for number in self.progress.arrive(&self.plan, parameter) {
            while self.given.len() >= GIVEN_BUCKETS
                && let Some(oldest) = self.given.pop_front()
            {
                self.wait(oldest);
            }
            let bucket = FullBucket {
                plan: self.plan.clone(),
                number,
                gradients: core::mem::take(&mut self.gradients[number]),
                at: self.at,
            };
            let (how, sum) = (reducer.how.clone(), self.sum.clone());
            let given = Pending::start(reducer.group(), move |ranks| {
                sum.lock().add(&how, bucket, ranks)
            });
            self.given.push_back(given);
        }
    }

    fn wait(&mut self, given: Pending<()>) {
        if let Err(error) = given.wait() {
            self.failed.get_or_insert(error);
        }
    }

    fn finish(mut self, reducer: &GradientReducer) -> Result<Sum, ZeroError> {
        for parameter in self.progress.missing() {
            self.submit(reducer, parameter, None);
        }
        while let Some(given) = self.given.pop_front() {
            self.wait(given);
        }
        match self.failed {
            Some(error) => Err(error),
            None => Ok(core::mem::replace(
                &mut *self.sum.lock(),
                Sum::new(reducer.layout()),
            )),
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
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use burn::tensor::{DType, Tensor};
    use burn_flex::Flex;

    use super::*;
    use crate::group::{GroupOptions, ReduceOp, Split, ThreadGroup};
    use crate::reduce::Parameter;

    /// Four parameters of ten elements, each a bucket.
    fn reducer(group: ThreadGroup) -> GradientReducer {
        let parameters = (0..4).map(|index| Parameter {
            path: format!("p{index}"),
            shape: vec![10],
            dtype: DType::F32,
        });
        let settings = ZeroSettings {
            bucket_elements: 10,
            reduction: ReduceOp::Sum,
            ..ZeroSettings::stage(Stage::Gradients)
        };
        let layout = Layout::new(parameters.collect(), 2, 0, &settings).unwrap();
        GradientReducer::new(layout, Arc::new(group), &settings)
    }

    fn gradient(value: f32) -> Option<HostRead> {
        let gradient = Tensor::<Flex, 1>::full([10], value, &Default::default());
        Some(HostRead::start::<Flex>(gradient.into_primitive().tensor()))
    }

    /// Rank 1 makes by hand the collectives that rank 0's reducer must make, with the same labels in the same order.
    #[test]
    fn buckets_are_reduced_in_the_order_of_the_first_graph_while_backward_goes_on() {
        let mut groups = ThreadGroup::new(2, GroupOptions::default()).unwrap();
        let (other, group) = (groups.pop().unwrap(), groups.pop().unwrap());
        let (done, calls) = channel();
        let other = std::thread::spawn(move || {
            for pass in 0..2 {
                if pass == 0 {
                    other.gather_bytes("order of the gradients", Vec::new())?;
                }
                for (bucket, path) in ["p1", "p3", "p2", "p0"].iter().enumerate() {
                    let label = format!("gradients of bucket {bucket}, after step {pass} ({path})");
                    let (zeros, split) = (vec![0.0; 10].into(), Split::Counts(vec![5, 5]));
                    other.reduce_scatter(&label, ReduceOp::Sum, zeros, split)?;
                    done.send(*path).unwrap();
                }
                let label = "which gradients there are, and which are non-finite";
                other.gather_bytes(label, vec![0; 4])?;
            }
            Ok::<_, ZeroError>(())
        });
        let next = || calls.recv_timeout(Duration::from_secs(20)).unwrap();
        let reducer = reducer(group);
        for pass in 0..2 {
            let order = || match pass {
                0 => vec![1, 3, 2],
                _ => unreachable!("it was told before"),
            };
            reducer.begin_backward(order).unwrap();
            reducer.submit(1, gradient(1.0));
            assert_eq!(next(), "p1", "nothing else has arrived yet");
            reducer.submit(2, gradient(2.0));
            assert!(reducer.takes(3) && !reducer.takes(2));
            reducer.submit(3, gradient(3.0));
            assert_eq!([next(), next()], ["p3", "p2"], "whatever came first");
            let reduced = reducer.finish().unwrap();
            assert_eq!(next(), "p0");
            assert!(!reduced[0].is_present() && !reducer.takes(0));
            for (parameter, reduced) in reduced.iter().enumerate().skip(1) {
                assert_eq!(reduced.elements, [parameter as f32; 5]);
            }
            reducer.next_step(0.1);
        }
        drop(reducer);
        other.join().unwrap().unwrap();
    }
}
