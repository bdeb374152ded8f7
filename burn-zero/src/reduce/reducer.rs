//! The gradient reducer: collects the gradients of this rank by bucket and submits full buckets as
//! jobs to its group.

use core::fmt;
use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock, Weak};

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, TensorData};
use burn_decorator::{HostRead, ReadError};
use burn_ranks::shard::{Bucket, Progress, ReducePlan};
use burn_ranks::{BufferDtype, Collectives, HostBuffer, Pending, ProcessGroup, ReduceOp, Split};
use bytemuck::{cast_slice, pod_collect_to_vec};
use half::{bf16, f16};
use parking_lot::Mutex;

use super::layout::{Layout, StepTag};
use super::memory_tracker::{MemoryTracker, TrackedBytes};
use crate::backend::{GradientPart, on_host};
use crate::error::ZeroError;
use crate::host::{floats, not_read};
use crate::settings::{Memory, Stage, ZeroSettings};

/// The reduced gradient of a parameter that any rank has a gradient of; the same on all ranks but
/// for the elements.
#[derive(Debug)]
pub(crate) struct Reduced {
    /// This rank's shard of the gradient, or all of it in stage 0, in its
    /// [`shard_shape`](super::ParameterSpec::shard_shape): a single 0 if this rank holds no elements,
    /// so that all ranks see a gradient of the same parameters; all NaN unless it is finite on all
    /// ranks.
    pub(crate) data: TensorData,
    /// Whether it is finite on all ranks.
    pub(crate) is_finite: bool,
}

/// Submits full buckets to the communication thread in the order of a plan, which is the same on
/// every rank, whatever the order in which backward completes gradients.
///
/// Several reducers may share a group: see [`ReduceOverRanks`](crate::ReduceOverRanks),
/// "What must be the same on all ranks".
pub(crate) struct GradientReducer {
    /// Reducers of one thread are numbered in the order in which they were made.
    pub(crate) number: u64,
    group: Arc<dyn ProcessGroup>,
    how: Arc<Reduction>,
    /// Dead once no optimizer over ranks steps with it any more. The reducer itself lives in leaves
    /// too, which are gathered with its group.
    owner: Weak<Owner>,
    /// Where gradients are between backward and the step.
    pub(crate) memory: Memory,
    /// Where submitted gradients are collected; `None` between backward passes and steps.
    destination: Mutex<Option<Destination>>,
    /// Steps of the optimizer.
    steps: AtomicU64,
    /// For reductions in the step: from the last parameter to the first.
    step_plan: Arc<ReducePlan>,
    /// For reductions in backward: the order of rank 0's first backward pass.
    backward_plan: OnceLock<Arc<ReducePlan>>,
    /// Once backward has reduced gradients for the next step: the nodes of the leaves whose
    /// gradients it has not, because they are not hooked.
    not_reduced: Mutex<Option<HashSet<u64>>>,
}

/// Of an optimizer over ranks that steps with a reducer: lives as long as it, or a clone of it.
#[derive(Debug)]
pub(crate) struct Owner;

/// How gradients are reduced.
struct Reduction {
    layout: Arc<Layout>,
    stage: Stage,
    op: ReduceOp,
    dtype: BufferDtype,
    tracker: MemoryTracker,
}

/// A gradient of this rank that is being copied to the host.
type Tracked = (HostRead, TrackedBytes);

enum Destination {
    Buckets(Buckets),
    Host(HostCopies),
}

impl GradientReducer {
    pub(crate) fn new(
        layout: Arc<Layout>,
        group: Arc<dyn ProcessGroup>,
        settings: &ZeroSettings,
        owner: Weak<Owner>,
    ) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        Self {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            group,
            owner,
            memory: settings.gradients,
            destination: Mutex::default(),
            steps: AtomicU64::new(0),
            step_plan: Arc::new(ReducePlan::in_order(layout.map(), &[])),
            backward_plan: OnceLock::new(),
            not_reduced: Mutex::default(),
            how: Arc::new(Reduction {
                layout,
                stage: settings.stage,
                op: settings.reduction,
                dtype: settings.communication_dtype,
                tracker: MemoryTracker::default(),
            }),
        }
    }

    /// Whether an optimizer over ranks steps with it.
    pub(crate) fn is_owned(&self) -> bool {
        self.owner.strong_count() > 0
    }

    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.how.layout
    }

    pub(crate) fn group(&self) -> &dyn ProcessGroup {
        &*self.group
    }

    pub(crate) fn shared_group(&self) -> &Arc<dyn ProcessGroup> {
        &self.group
    }

    /// Counts the gradients that this rank holds.
    pub(crate) fn tracker(&self) -> &MemoryTracker {
        &self.how.tracker
    }

    /// Whether gradients are reduced bucket by bucket during backward (stage 2), rather than in the
    /// optimizer's step, once a window of micro-batches. With one rank nothing is reduced.
    pub(crate) fn reduces_in_backward(&self) -> bool {
        self.how.stage.shards_gradients() && self.group.world_size() > 1
    }

    /// What this rank has of a gradient between backward and the step; `None` with one rank.
    pub(crate) fn gradient_part(&self) -> Option<GradientPart> {
        match (self.group.world_size(), self.reduces_in_backward()) {
            (1, _) => None,
            (_, true) => Some(GradientPart::Shard),
            (_, false) => Some(GradientPart::OwnBatch),
        }
    }

    /// A tensor of a gradient, in the memory where gradients are.
    pub(crate) fn placed<I: Backend>(
        &self,
        data: TensorData,
        device: &I::Device,
    ) -> FloatTensor<I> {
        match self.memory {
            Memory::Device => I::float_from_data(data, device),
            Memory::Host => on_host::<I>(data, device),
        }
    }

    /// Whether there is nothing to do before the step.
    pub(crate) fn is_idle(&self) -> bool {
        self.group.world_size() == 1 && self.memory == Memory::Device
    }

    /// Whether gradients leave the device during backward.
    pub(crate) fn takes_in_backward(&self) -> bool {
        self.reduces_in_backward() || self.memory == Memory::Host
    }

    /// Notes that the next step gets this rank's shards of reduced gradients, not gradients of this
    /// rank alone.
    pub(crate) fn set_reduced(&self) {
        self.not_reduced.lock().get_or_insert_default();
    }

    /// Notes that the gradient of the leaf of this node is of this rank alone, though others are
    /// reduced.
    pub(crate) fn set_not_reduced(&self, node: u64) {
        if let Some(nodes) = &mut *self.not_reduced.lock() {
            nodes.insert(node);
        }
    }

    /// Clears what [`set_reduced`](Self::set_reduced) has noted, and returns the exceptions if it
    /// was noted.
    pub(crate) fn take_reduced(&self) -> Option<HashSet<u64>> {
        self.not_reduced.lock().take()
    }

    /// As [`take_reduced`](Self::take_reduced), but does not clear it.
    pub(crate) fn reduced(&self) -> Option<HashSet<u64>> {
        self.not_reduced.lock().clone()
    }

    /// Counts a step of the optimizer, and returns its tag, in which learning rates of different
    /// bits have different texts.
    pub(crate) fn next_step(&self, lr: f64) -> StepTag {
        let number = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        format!("step {number}, lr {lr:?}").into()
    }

    /// Starts to collect the gradients of a backward pass, which are reduced in it, or copied to
    /// the host for the step. `order` returns the parameters that this rank's graph uses, in the
    /// expected order of their gradients.
    ///
    /// # Errors
    ///
    /// Those of the group: the first backward pass gathers the order of rank 0.
    pub(crate) fn begin_backward(
        &self,
        order: impl FnOnce() -> Vec<usize>,
    ) -> Result<(), ZeroError> {
        if self.reduces_in_backward() {
            let steps = self.steps.load(Ordering::Relaxed);
            let plan = self.plan_backward(order)?;
            self.begin(plan, format!("after step {steps}").into());
        } else {
            let copies = HostCopies::new(self.layout().parameters().len());
            *self.destination.lock() = Some(Destination::Host(copies));
        }
        Ok(())
    }

    /// The plan of all backward passes, fixed by the first in which rank 0's graph uses a
    /// parameter.
    fn plan_backward(
        &self,
        order: impl FnOnce() -> Vec<usize>,
    ) -> Result<Arc<ReducePlan>, ZeroError> {
        if let Some(plan) = self.backward_plan.get() {
            return Ok(plan.clone());
        }
        let own = match self.group.rank() {
            0 => order(),
            _ => Vec::new(),
        };
        let label = "order of the gradients";
        let all = self.group.gather_bytes(label, cast_slice(&own).to_vec())?;
        let order: Vec<usize> = pod_collect_to_vec(&all[0]);
        if order.is_empty() {
            return Ok(self.step_plan.clone());
        }
        let plan = || Arc::new(ReducePlan::in_order(self.layout().map(), &order));
        Ok(self.backward_plan.get_or_init(plan).clone())
    }

    /// Starts to collect the gradients of a step that are reduced in it: those of `parameters`,
    /// ascending.
    pub(crate) fn begin_step(&self, at: StepTag, parameters: &[usize]) {
        let plan = if parameters.len() == self.layout().parameters().len() {
            self.step_plan.clone()
        } else {
            let last_to_first = parameters.iter().rev().copied();
            Arc::new(ReducePlan::of(self.layout().map(), last_to_first))
        };
        self.begin(plan, at);
    }

    fn begin(&self, plan: Arc<ReducePlan>, at: StepTag) {
        let buckets = Destination::Buckets(Buckets {
            progress: Progress::new(&plan),
            gradients: vec![Vec::new(); plan.buckets().len()],
            given: VecDeque::new(),
            sum: Arc::new(Mutex::new(Sum::new(self.layout()))),
            plan,
            at,
            failed: None,
        });
        *self.destination.lock() = Some(buckets);
    }

    /// Whether gradients are being collected, and this parameter's was not submitted yet.
    pub(crate) fn takes(&self, parameter: usize) -> bool {
        match &*self.destination.lock() {
            None => false,
            Some(Destination::Buckets(buckets)) => !buckets.progress.has(parameter),
            Some(Destination::Host(copies)) => !copies.arrived[parameter],
        }
    }

    /// Submits a parameter's gradient, or `None` if it has none. Blocks if that fills a bucket
    /// while [`GIVEN_BUCKETS`] others are not reduced yet.
    pub(crate) fn submit(&self, parameter: usize, gradient: Option<HostRead>) {
        let mut destination = self.destination.lock();
        let bytes = self.layout().parameters()[parameter].bytes();
        let gradient = gradient.map(|read| (read, self.how.tracker.hold(bytes)));
        match &mut *destination {
            None => {}
            Some(Destination::Buckets(buckets)) => buckets.submit(self, parameter, gradient),
            Some(Destination::Host(copies)) => copies.submit(self.layout(), parameter, gradient),
        }
    }

    /// Ends the collection, and returns by parameter the reduced gradients (`None` where no rank
    /// has one), or this rank's gradients that were copied to the host. Parameters that were not
    /// submitted have no gradient on this rank.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn finish(&self) -> Result<Vec<Option<Reduced>>, ZeroError> {
        let destination = self.destination.lock().take();
        match destination {
            Some(Destination::Buckets(buckets)) => buckets.finish(self)?.finish(self),
            Some(Destination::Host(copies)) => copies.finish(self.layout()),
            None if self.reduces_in_backward() => Sum::new(self.layout()).finish(self),
            None => Ok(self.layout().parameters().iter().map(|_| None).collect()),
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

/// Gradients that are copied to the host, and not reduced before the step. The device holds at most
/// two buckets of them and one gradient.
struct HostCopies {
    /// By parameter.
    gradients: Vec<Option<Tracked>>,
    arrived: Vec<bool>,
    /// Parameters whose copies were started and not waited for, the oldest first.
    underway: VecDeque<usize>,
}

impl HostCopies {
    fn new(parameters: usize) -> Self {
        Self {
            gradients: (0..parameters).map(|_| None).collect(),
            arrived: vec![false; parameters],
            underway: VecDeque::new(),
        }
    }

    /// Keeps a started copy, and waits for the oldest copies while more than two buckets of
    /// elements are in transfer.
    fn submit(&mut self, layout: &Layout, parameter: usize, gradient: Option<Tracked>) {
        self.arrived[parameter] = true;
        if gradient.is_none() {
            return;
        }
        self.gradients[parameter] = gradient;
        self.underway.push_back(parameter);
        let most = layout.map().bucket_elements().saturating_mul(2);
        let elements = |&parameter: &usize| layout.parameters()[parameter].elements();
        while self.underway.len() > 1
            && self.underway.iter().map(elements).sum::<usize>() > most
            && let Some(oldest) = self.underway.pop_front()
        {
            let copy = self.gradients[oldest].take();
            self.gradients[oldest] = copy.map(|(read, held)| (read.arrived(), held));
        }
    }

    /// # Errors
    ///
    /// [`ZeroError::Read`] for the first gradient that could not be copied.
    fn finish(self, layout: &Layout) -> Result<Vec<Option<Reduced>>, ZeroError> {
        let copies = self.gradients.into_iter().zip(layout.parameters());
        let copied = copies.map(|(copy, parameter)| {
            let Some((read, _held)) = copy else {
                return Ok(None);
            };
            let failed = |error| not_read("the gradient", &parameter.path, &error);
            let data = read.wait().map_err(failed)?;
            Ok(Some(Reduced {
                data,
                is_finite: true,
            }))
        });
        copied.collect()
    }
}

/// Buckets submitted to the communication thread: one that is sent and one that waits. With the one
/// that backward fills there are three.
const GIVEN_BUCKETS: usize = 2;

/// Gradients that are reduced bucket by bucket.
struct Buckets {
    plan: Arc<ReducePlan>,
    progress: Progress,
    /// By bucket; emptied when the bucket is full.
    gradients: Vec<Vec<Arc<LocalGradient>>>,
    given: VecDeque<Pending<(), ZeroError>>,
    sum: Arc<Mutex<Sum>>,
    at: StepTag,
    failed: Option<ZeroError>,
}

/// A gradient of this rank that is being copied to the host, shared by all buckets that contain
/// elements of it.
struct LocalGradient {
    parameter: usize,
    /// The first use waits for the copy.
    elements: LazyLock<LocalElements, Box<dyn FnOnce() -> LocalElements + Send>>,
    _held: TrackedBytes,
}

/// The elements of a gradient, in f32.
type LocalElements = Result<Vec<f32>, ReadError>;

impl Buckets {
    fn submit(&mut self, reducer: &GradientReducer, parameter: usize, gradient: Option<Tracked>) {
        debug_assert!(!self.progress.has(parameter), "one gradient a parameter");
        if let Some((read, _held)) = gradient {
            let gradient = Arc::new(LocalGradient {
                parameter,
                elements: LazyLock::new(Box::new(|| read.wait().map(floats))),
                _held,
            });
            for &bucket in self.plan.buckets_of(parameter) {
                self.gradients[bucket].push(gradient.clone());
            }
        }
        for number in self.progress.arrive(&self.plan, parameter) {
            while self.given.len() >= GIVEN_BUCKETS {
                self.wait_for_oldest();
            }
            let (how, sum, plan) = (reducer.how.clone(), self.sum.clone(), self.plan.clone());
            let gradients = core::mem::take(&mut self.gradients[number]);
            let at = self.at.clone();
            let given = Pending::start(reducer.group(), move |ranks| {
                let bucket = &plan.buckets()[number];
                let name = how.layout.bucket_name(number, bucket, &at);
                let label = format!("gradients of {name}");
                sum.lock().add(&how, bucket, gradients, &label, ranks)
            });
            self.given.push_back(given);
        }
    }

    fn wait_for_oldest(&mut self) {
        if let Some(Err(error)) = self.given.pop_front().map(Pending::wait) {
            self.failed.get_or_insert(error);
        }
    }

    fn finish(mut self, reducer: &GradientReducer) -> Result<Sum, ZeroError> {
        for parameter in self.progress.missing() {
            self.submit(reducer, parameter, None);
        }
        while !self.given.is_empty() {
            self.wait_for_oldest();
        }
        match self.failed {
            Some(error) => Err(error),
            None => Ok(core::mem::take(&mut *self.sum.lock())),
        }
    }
}

/// This rank has a gradient.
const PRESENT: u8 = 1;
/// The reduced gradient is infinite or NaN in this rank's part.
const NON_FINITE: u8 = 2;

/// The reduced gradients, as far as their buckets are reduced.
#[derive(Default)]
struct Sum {
    /// By parameter: the elements that this rank holds, flat; empty before the first bucket.
    elements: Vec<Vec<f32>>,
    /// By parameter, this rank's flags: [`PRESENT`], [`NON_FINITE`].
    findings: Vec<u8>,
    held: Vec<TrackedBytes>,
}

impl Sum {
    fn new(layout: &Layout) -> Self {
        let parameters = layout.parameters().len();
        Self {
            elements: vec![Vec::new(); parameters],
            findings: vec![0; parameters],
            held: Vec::new(),
        }
    }

    /// Reduces a bucket whose gradients are all submitted, on the communication thread, and stores
    /// its elements.
    fn add(
        &mut self,
        how: &Reduction,
        bucket: &Bucket,
        gradients: Vec<Arc<LocalGradient>>,
        label: &str,
        ranks: &mut Collectives,
    ) -> Result<(), ZeroError> {
        // Zeros where this rank has no gradient.
        let mut buffer = vec![0.0; bucket.padded_elements()];
        for segment in bucket.segments() {
            let mut gradients = gradients.iter();
            if let Some(gradient) = gradients.find(|it| it.parameter == segment.parameter) {
                self.findings[segment.parameter] |= PRESENT;
                let elements = gradient.elements.as_ref().map_err(|error| {
                    let path = &how.layout.parameters()[segment.parameter].path;
                    not_read("the gradient", path, error)
                })?;
                buffer[segment.in_bucket()].copy_from_slice(&elements[segment.range.clone()]);
            }
        }
        // Freed before the bucket is sent, so that only the buffer is held meanwhile.
        drop(gradients);

        let buffer = HostBuffer::from_f32(how.dtype, buffer);
        let (rank, is_whole) = (how.layout.rank(), how.stage == Stage::DataParallel);
        let (first, elements) = if is_whole {
            (0, ranks.all_reduce(label, how.op, buffer)?)
        } else {
            let split = Split::Counts(bucket.counts());
            let elements = ranks.reduce_scatter(label, how.op, buffer, split)?;
            (bucket.part(rank).start, elements)
        };
        let elements = elements.into_f32();
        let segments = bucket.segments().iter();
        for segment in segments.filter(|segment| is_whole || segment.owner == rank) {
            let parameter = segment.parameter;
            let at = segment.start - first;
            let elements = &elements[at..at + segment.range.len()];
            // A finite sum may overflow in the type of the parameter.
            let is_finite = match how.layout.parameters()[parameter].dtype {
                DType::F16 => |element: &f32| f16::from_f32(*element).is_finite(),
                DType::BF16 => |element: &f32| bf16::from_f32(*element).is_finite(),
                _ => |element: &f32| element.is_finite(),
            };
            if !elements.iter().all(is_finite) {
                self.findings[parameter] |= NON_FINITE;
            }
            let (whole, held) = (&mut self.elements[parameter], how.layout.held(parameter));
            if whole.is_empty() {
                self.held.push(how.tracker.hold(held * size_of::<f32>()));
                whole.resize(held, 0.0);
            }
            let to = how.layout.position(parameter, segment.range.start);
            whole[to..to + elements.len()].copy_from_slice(elements);
        }
        Ok(())
    }

    /// Combines the findings of all ranks, in one collective.
    fn finish(self, reducer: &GradientReducer) -> Result<Vec<Option<Reduced>>, ZeroError> {
        let label = "which gradients there are, and which are non-finite";
        let findings = reducer.group.gather_bytes(label, self.findings)?;
        let parameters = reducer.layout().parameters().iter().enumerate();
        let own = parameters.zip(self.elements);
        let reduced = own.map(|((index, parameter), mut elements)| {
            let found = findings.iter().fold(0, |all, rank| all | rank[index]);
            if found & PRESENT == 0 {
                return None;
            }
            elements.resize(elements.len().max(1), 0.0);
            let is_finite = found & NON_FINITE == 0;
            if !is_finite {
                elements.fill(f32::NAN);
            }
            let shape = parameter.shard_shape(elements.len());
            let data = TensorData::new(elements, shape).convert_dtype(parameter.dtype);
            Some(Reduced { data, is_finite })
        });
        Ok(reduced.collect())
    }
}
