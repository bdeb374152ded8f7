//! Buckets of gradients on the communication thread: filled, reduced over the ranks, and distributed to their parameters.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::layout::Layout;
use super::memory_tracker::{MemoryTracker, TrackedBytes};
use super::reduced::{Reduced, State};
use super::step_tag::StepTag;
use crate::group::{BufferDtype, Collectives, HostBuffer, ProcessGroup, ReduceOp, Split};
use crate::host::HostRead;
use crate::shard::ReducePlan;
use crate::{Stage, ZeroError};

/// A gradient of this rank that is being copied to the host, shared by all buckets that contain elements of it.
pub(super) struct LocalGradient {
    parameter: usize,
    read: Mutex<Option<HostRead>>,
    elements: OnceLock<Vec<f32>>,
    _held: TrackedBytes,
}

impl LocalGradient {
    pub(super) fn new(parameter: usize, read: HostRead, held: TrackedBytes) -> Self {
        Self {
            parameter,
            read: Mutex::new(Some(read)),
            elements: OnceLock::new(),
            _held: held,
        }
    }

    /// The elements; the first call waits for the copy.
    fn elements(&self) -> &[f32] {
        self.elements.get_or_init(|| {
            let read = self.read.lock().take();
            read.map(HostRead::wait).unwrap_or_default()
        })
    }
}

/// How gradients are reduced.
pub(super) struct Reduction {
    pub(super) layout: Layout,
    pub(super) stage: Stage,
    pub(super) op: ReduceOp,
    pub(super) dtype: BufferDtype,
    pub(super) tracker: MemoryTracker,
}

/// A bucket whose gradients are all submitted.
pub(super) struct FullBucket {
    pub(super) plan: Arc<ReducePlan>,
    /// Its place in the plan.
    pub(super) number: usize,
    pub(super) gradients: Vec<Arc<LocalGradient>>,
    pub(super) at: StepTag,
}

/// This rank has a gradient.
const PRESENT: u8 = 1;
/// The reduced gradient is infinite or NaN in this rank's part.
const NON_FINITE: u8 = 2;

/// The reduced gradients of one pass, as far as its buckets are reduced.
pub(super) struct Sum {
    reduced: Vec<Reduced>,
    /// By parameter, this rank's flags: [`PRESENT`], [`NON_FINITE`].
    findings: Vec<u8>,
    held: Vec<TrackedBytes>,
}

impl Sum {
    pub(super) fn new(layout: &Layout) -> Self {
        let parameters = layout.parameters().len();
        Self {
            reduced: vec![Reduced::default(); parameters],
            findings: vec![0; parameters],
            held: Vec::new(),
        }
    }

    /// Reduces a bucket and stores its elements.
    pub(super) fn add(
        &mut self,
        how: &Reduction,
        bucket: FullBucket,
        ranks: &mut dyn Collectives,
    ) -> Result<(), ZeroError> {
        let FullBucket {
            plan,
            number,
            gradients,
            at,
        } = bucket;
        let bucket = &plan.buckets()[number];
        let label = format!("gradients of {}", how.layout.name_of(number, bucket, at));

        // Zeros where this rank has no gradient.
        let mut buffer = vec![0.0; bucket.padded_elements()];
        for segment in bucket.segments() {
            let mut gradients = gradients.iter();
            if let Some(gradient) = gradients.find(|g| g.parameter == segment.parameter) {
                self.findings[segment.parameter] |= PRESENT;
                let elements = &gradient.elements()[segment.range.clone()];
                buffer[segment.in_bucket()].copy_from_slice(elements);
            }
        }
        // Freed before the bucket is sent, so that only the buffer is held meanwhile.
        drop(gradients);

        let buffer = HostBuffer::from_f32(how.dtype, buffer);
        let (part, elements) = match how.stage {
            Stage::DataParallel => {
                let all = 0..buffer.len();
                (all, ranks.all_reduce(&label, how.op, buffer)?)
            }
            Stage::OptimizerState | Stage::Gradients => {
                let split = Split::Counts(bucket.counts());
                let elements = ranks.reduce_scatter(&label, how.op, buffer, &split)?;
                (bucket.part(how.layout.rank()), elements)
            }
        };
        let elements = elements.into_f32();
        for segment in bucket.segments_in(part.clone()) {
            let parameter = segment.parameter;
            let at = segment.start - part.start;
            let elements = &elements[at..at + segment.range.len()];
            if elements.iter().any(|element| !element.is_finite()) {
                self.findings[parameter] |= NON_FINITE;
            }
            let (whole, held) = (
                &mut self.reduced[parameter].elements,
                how.layout.held(parameter),
            );
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
    pub(super) fn finish(self, group: &dyn ProcessGroup) -> Result<Vec<Reduced>, ZeroError> {
        let label = "which gradients there are, and which are non-finite";
        let findings = group.gather_bytes(label, self.findings)?;
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
