//! The thread that reduces buckets, or waits for them, while backward goes on.

use core::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};

use burn_backend::TensorData;
use parking_lot::Mutex;

use super::layout::Layout;
use super::memory_tracker::{MemoryTracker, TrackedBytes};
use super::reduced::{Reduced, State};
use super::step_tag::StepTag;
use crate::group::{BufferDtype, HostBuffer, ProcessGroup, ReduceOp, Split};
use crate::host::{HostRead, floats};
use crate::{Memory, Stage, ZeroError};

/// The gradient of a parameter, on its way to the host, for all buckets that it is in.
pub(super) struct Arrival {
    parameter: usize,
    gradient: Mutex<Gradient>,
    /// What it weighs.
    _holding: Option<TrackedBytes>,
}

enum Gradient {
    /// This rank has none.
    Missing,
    Underway(HostRead),
    Here(Arc<Vec<f32>>),
    /// In its own type.
    Landed(TensorData),
}

impl Arrival {
    /// Of a parameter whose gradient has so many bytes.
    pub(super) fn new(
        parameter: usize,
        gradient: Option<HostRead>,
        bytes: usize,
        tracker: &MemoryTracker,
    ) -> Self {
        let holding = gradient.is_some().then(|| tracker.hold(bytes));
        let gradient = gradient.map_or(Gradient::Missing, Gradient::Underway);
        Self {
            parameter,
            gradient: Mutex::new(gradient),
            _holding: holding,
        }
    }

    /// Waits for the elements; `None` if there are none.
    fn elements(&self) -> Option<Arc<Vec<f32>>> {
        let mut gradient = self.gradient.lock();
        let elements = match core::mem::replace(&mut *gradient, Gradient::Missing) {
            Gradient::Missing => return None,
            Gradient::Underway(read) => Arc::new(read.wait()),
            Gradient::Here(elements) => elements,
            Gradient::Landed(data) => Arc::new(floats(data)),
        };
        *gradient = Gradient::Here(elements.clone());
        Some(elements)
    }

    /// Waits until it is on the host: its memory on the device is free then.
    fn land(&self) {
        let mut gradient = self.gradient.lock();
        *gradient = match core::mem::replace(&mut *gradient, Gradient::Missing) {
            Gradient::Underway(read) => Gradient::Landed(read.data()),
            there => there,
        };
    }

    /// Waits for the gradient and takes it, as it is; `None` if there is none.
    pub(super) fn data(&self) -> Option<TensorData> {
        self.land();
        match core::mem::replace(&mut *self.gradient.lock(), Gradient::Missing) {
            Gradient::Landed(data) => Some(data),
            _ => None,
        }
    }
}

/// What a worker needs to know.
pub(super) struct Orders {
    pub(super) layout: Layout,
    pub(super) group: Arc<dyn ProcessGroup>,
    pub(super) stage: Stage,
    pub(super) op: ReduceOp,
    pub(super) dtype: BufferDtype,
    pub(super) memory: Memory,
    pub(super) tracker: MemoryTracker,
}

/// What becomes of a bucket that is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// All ranks add it up.
    Reduce,
    /// It stays on the host.
    Land,
}

enum Job {
    Bucket {
        task: Task,
        bucket: usize,
        arrivals: Vec<Arc<Arrival>>,
        at: StepTag,
    },
    Finish,
}

type Outcome = Result<Vec<Reduced>, ZeroError>;

/// Buckets that wait while one is reduced. Whoever brings a further one waits: so many bound the memory.
const WAITING_BUCKETS: usize = 1;

/// A handle of the thread. It ends with the handle.
pub(super) struct Worker {
    /// `None` once the handle is dropped.
    jobs: Option<SyncSender<Job>>,
    outcomes: Mutex<Receiver<Outcome>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(super) fn start(orders: Arc<Orders>) -> Self {
        let (jobs, queue) = sync_channel(WAITING_BUCKETS);
        let (results, outcomes) = channel();
        let name = format!("zero rank {}", orders.group.rank());
        let thread = thread::Builder::new()
            .name(name)
            .spawn(move || work(&orders, &queue, &results))
            .expect("the system can start a thread");
        Self {
            jobs: Some(jobs),
            outcomes: Mutex::new(outcomes),
            thread: Some(thread),
        }
    }

    pub(super) fn send(&self, task: Task, bucket: usize, arrivals: Vec<Arc<Arrival>>, at: StepTag) {
        self.order(Job::Bucket {
            task,
            bucket,
            arrivals,
            at,
        });
    }

    /// Waits for all buckets that were reduced since the last call.
    pub(super) fn finish(&self) -> Outcome {
        self.order(Job::Finish);
        self.outcomes.lock().recv().expect(ENDED)
    }

    fn order(&self, job: Job) {
        let jobs = self.jobs.as_ref().expect(ENDED);
        jobs.send(job).expect(ENDED);
    }
}

impl Drop for Worker {
    /// Waits for the thread: it holds the group, and a process that ends before the last holder let go of an MPI group ends its job
    /// as failed. Not where this rank panics, for the thread may wait for others.
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take()
            && !thread::panicking()
        {
            // A panic of the thread was met where its outcome was.
            let _ = thread.join();
        }
    }
}

const ENDED: &str = "the thread that reduces gradients lives as long as its handle";

fn work(orders: &Orders, queue: &Receiver<Job>, results: &Sender<Outcome>) {
    let mut pass = Pass::new(orders);
    for job in queue {
        match job {
            Job::Bucket {
                task: Task::Reduce,
                bucket,
                arrivals,
                at,
            } => pass.reduce(bucket, arrivals, at),
            Job::Bucket {
                task: Task::Land,
                arrivals,
                ..
            } => arrivals.iter().for_each(|arrival| arrival.land()),
            Job::Finish => {
                let outcome = core::mem::replace(&mut pass, Pass::new(orders)).finish();
                if results.send(outcome).is_err() {
                    return;
                }
            }
        }
    }
}

/// This rank has a gradient.
const PRESENT: u8 = 1;
/// The reduced gradient is infinite or NaN in this rank's part.
const NON_FINITE: u8 = 2;

/// The buckets of one pass.
struct Pass<'a> {
    orders: &'a Orders,
    reduced: Vec<Reduced>,
    /// By parameter, what this rank can tell.
    findings: Vec<u8>,
    /// What is reduced, until it is handed over.
    holdings: Vec<TrackedBytes>,
    failed: Option<ZeroError>,
}

impl<'a> Pass<'a> {
    fn new(orders: &'a Orders) -> Self {
        let parameters = orders.layout.parameters().len();
        Self {
            orders,
            reduced: vec![Reduced::default(); parameters],
            findings: vec![0; parameters],
            holdings: Vec::new(),
            failed: None,
        }
    }

    fn reduce(&mut self, bucket: usize, arrivals: Vec<Arc<Arrival>>, at: StepTag) {
        if self.failed.is_some() {
            return;
        }
        if let Err(error) = self.try_reduce(bucket, arrivals, at) {
            self.failed = Some(error);
        }
    }

    fn try_reduce(
        &mut self,
        bucket: usize,
        arrivals: Vec<Arc<Arrival>>,
        at: StepTag,
    ) -> Result<(), ZeroError> {
        let Orders {
            layout,
            group,
            stage,
            op,
            dtype,
            ..
        } = self.orders;
        let buffer = HostBuffer::from_f32(*dtype, self.fill(bucket, arrivals));
        let label = format!("gradients of {}", layout.bucket_name(bucket, at));
        let (part, elements) = match stage {
            Stage::DataParallel => {
                let all = 0..buffer.len();
                (all, group.all_reduce(&label, *op, buffer)?)
            }
            Stage::OptimizerState | Stage::Gradients => {
                let split = Split::Counts(layout.buckets()[bucket].counts());
                let elements = group.reduce_scatter(&label, *op, buffer, split)?;
                (layout.own_part(bucket), elements)
            }
        };
        self.distribute(bucket, part, &elements.into_f32());
        Ok(())
    }

    /// The bucket's buffer; zeros where this rank has no gradient. The gradients are gone then, before anything is sent.
    fn fill(&mut self, bucket: usize, arrivals: Vec<Arc<Arrival>>) -> Vec<f32> {
        let layout = &self.orders.layout;
        let mut buffer = vec![0.0; layout.buckets()[bucket].padded_elements()];
        let all = 0..buffer.len();
        for slot in layout.slots(bucket, all) {
            let mut arrivals = arrivals.iter();
            let arrival = arrivals.find(|arrival| arrival.parameter == slot.parameter);
            if let Some(elements) = arrival.and_then(|arrival| arrival.elements()) {
                self.findings[slot.parameter] |= PRESENT;
                buffer[slot.at].copy_from_slice(&elements[slot.range]);
            }
        }
        buffer
    }

    /// Hands the reduced elements of a part of the bucket to their parameters.
    fn distribute(&mut self, bucket: usize, part: Range<usize>, elements: &[f32]) {
        let layout = &self.orders.layout;
        for slot in layout.slots(bucket, part.clone()) {
            let from = slot.at.start - part.start..slot.at.end - part.start;
            let elements = &elements[from];
            if elements.iter().any(|element| !element.is_finite()) {
                self.findings[slot.parameter] |= NON_FINITE;
            }
            let piece = &mut self.reduced[slot.parameter].elements;
            if piece.is_empty() {
                let bytes = layout.held(slot.parameter) * size_of::<f32>();
                self.holdings.push(self.orders.tracker.hold(bytes));
            }
            piece.resize(layout.held(slot.parameter), 0.0);
            let to = layout.position(slot.parameter, slot.range.start);
            piece[to..to + elements.len()].copy_from_slice(elements);
        }
    }

    fn finish(self) -> Outcome {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let label = "which gradients there are, and which are non-finite";
        let findings = self.orders.group.gather_bytes(label, self.findings)?;
        let mut reduced = self.reduced;
        for (parameter, reduced) in reduced.iter_mut().enumerate() {
            let all = findings.iter().fold(0, |all, rank| all | rank[parameter]);
            reduced.state = match (all & PRESENT != 0, all & NON_FINITE != 0) {
                (false, _) => State::Missing,
                (true, false) => State::Finite,
                (true, true) => State::NonFinite,
            };
        }
        Ok(reduced)
    }
}
