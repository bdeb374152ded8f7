//! The largest micro-batch that fits into memory.
//!
//! `request` is what the caller asks for, `search` chooses the sizes to try, `trial` runs one try,
//! `probe` measures it, `rehearse` is the step of a usual training, `partition` and `report` are
//! the result, `host` is the memory of the machine.

mod host;
mod partition;
mod probe;
mod rehearse;
mod report;
mod request;
mod search;
mod trial;

use burn::tensor::backend::Backend;

use crate::AccumError;
pub use host::host_memory_bytes;
pub use partition::Partition;
pub use probe::{MemoryProbe, PeakCounter, SampledGauge};
pub use rehearse::rehearse;
pub(crate) use report::mebibytes;
pub use report::{MicroBatchFound, Trial, TrialOutcome};
pub use request::{EstimatedStart, MicroBatchSearch};
use search::Measured;
pub use trial::StepResult;

/// Finds the largest micro-batch with which a step stays below a limit, and the window that keeps
/// the effective batch exactly (Accelerate's `find_executable_batch_size`, Lightning's
/// `scale_batch_size`, DeepSpeed's autotuner; here from measurements, not from crashes).
///
/// `step` takes a size and does what training does with a micro-batch of that size, best with
/// [`rehearse`], which leaves the training as it was, also given clones. A `step` of another form
/// only borrows the training's state, but Burn shares running statistics, such as those of
/// BatchNorm, between clones: let it run [`independent(&model)`](crate::independent) in place of
/// `model.clone()`. `probe` measures the most bytes in use during a step.
///
/// Sizes are doubled until one does not fit, and then halved in between. Size 1 runs once
/// unmeasured before, because what a process sets up once is no part of a step. A size that is
/// predicted not to fit, from the fixed part and the bytes per item that were measured, is not
/// tried: the largest that is predicted to fit is. The size that is returned was itself measured
/// below the limit less the [margin](MicroBatchSearch::margin). With an
/// [estimate](MicroBatchSearch::starting_at) the search begins at what that says instead, and ends
/// after one to three trials where that is near what is measured. At most 40 trials, about
/// `log2(effective batch)` where memory grows linearly.
///
/// A size does not fit if its step panics, returns an error or leaves the device with one: the
/// panic is not printed, the device is synchronised and its unused memory released, and the search
/// continues with smaller sizes. The reason is in the [report](MicroBatchFound) and the log. A
/// panic of any thread during a trial counts as its failure, because a device may allocate on its
/// own thread. burn-fusion never frees what is dropped during a panic: a trial that panics leaves
/// memory on such a device, unless burn-checkpoint's `Remat` is in the backend, which drops after
/// the panic; where `step` can, it returns an error. On the CPU such a failure cannot be handled: a
/// failed allocation aborts the process, and the system kills a process that holds too much. There
/// the limit must be below the available memory.
///
/// ```
/// use burn_accum::{MicroBatchSearch, Normalization, PeakCounter, find_micro_batch};
/// use burn_flex::Flex;
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// // Instead of a counting allocator and a training:
/// let in_use = AtomicU64::new(0);
/// let mut probe = PeakCounter::new(|| in_use.store(0, Ordering::Relaxed), || in_use.load(Ordering::Relaxed));
/// let step = |micro_batch: usize| in_use.store(600 + 50 * micro_batch as u64, Ordering::Relaxed);
///
/// let search = MicroBatchSearch::new(20, 1000).with_normalization(Normalization::Tokens);
/// let found = find_micro_batch::<Flex, _>(&search, &Default::default(), &mut probe, step)?;
///
/// assert_eq!(found.partition.sizes().collect::<Vec<_>>(), [7, 7, 6]); // 600 + 7 * 50 = 950
/// assert_eq!(found.config()?.steps, 3); // update.accumulate(found.config()?)?
/// println!("{found}");
/// # Ok::<(), burn_accum::AccumError>(())
/// ```
///
/// # Errors
///
/// [`AccumError::InvalidValue`], [`AccumError::LimitTooSmall`], [`AccumError::StepFails`] with a
/// micro-batch of one, [`AccumError::NothingMeasured`], [`AccumError::PeaksMissed`].
pub fn find_micro_batch<B, R>(
    search: &MicroBatchSearch,
    device: &B::Device,
    probe: &mut (impl MemoryProbe + ?Sized),
    step: impl Fn(usize) -> R,
) -> Result<MicroBatchFound, AccumError>
where
    B: Backend,
    R: StepResult,
{
    search.validate()?;
    trial::<B, R>(device, &step, 1).map_err(|reason| AccumError::StepFails { reason })?;
    search::run(search, |micro_batch| {
        let before_bytes = probe.begin();
        let result = trial::<B, R>(device, &step, micro_batch);
        let peak_bytes = probe.end();
        if let Err(reason) = result {
            log::warn!("the step fails with a micro-batch of {micro_batch}: {reason}");
            return Ok(Measured::Failed(reason));
        }
        if peak_bytes <= before_bytes {
            return Err(AccumError::NothingMeasured {
                micro_batch,
                before_bytes,
                peak_bytes,
            });
        }
        Ok(Measured::Peak(peak_bytes))
    })
}

/// One try, after which the device is idle and holds nothing of it.
fn trial<B: Backend, R: StepResult>(
    device: &B::Device,
    step: &impl Fn(usize) -> R,
    micro_batch: usize,
) -> Result<(), String> {
    let synced = || B::sync(device).map_err(|error| error.to_string());
    // Lazy backends report an error only when the host waits for them.
    let result = trial::attempt(|| match step(micro_batch).failure() {
        Some(reason) => Err(reason),
        None => synced(),
    });
    if result.is_err() && micro_batch > 1 {
        // Autodiff keeps the tape of a failed forward pass until the next backward pass.
        let _ = trial::attempt(|| step(1));
    }
    // Work that a failed step left in the queue may fail here too; afterwards the queue is empty.
    let _ = trial::attempt(synced);
    let cleaned = trial::attempt(|| B::memory_cleanup(device));
    result.and(cleaned)
}

#[cfg(test)]
mod tests {
    use parking_lot::{Mutex, MutexGuard};

    /// A trial sees the panics of all threads of the process, so tests with panics run one at a
    /// time.
    pub(super) fn panics() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        TURN.lock()
    }
}
