//! A few steps that are thrown away: they find the largest micro-batch that fits, and show the
//! memory of a step.

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn_accum::{MicroBatchFound, MicroBatchSearch, find_micro_batch, rehearse};
use burn_checkpoint::snapshot::{Snapshot, chrome_trace};
use burn_checkpoint::{InstalledBudget, MemoryBudget, apart, record_all};
use burn_estimate::{Meta, estimate_run};
use burn_update::Update;
use burn_zero::{BatchConfig, FromDeepSpeed, SingleRank};

use super::job::Job;
use super::loader::TokenBatch;
use super::options::Options;
use crate::memory_plot::MemoryPlot;
use crate::pools::{device_bytes, memory_probe};
use crate::training::error::TrainingError;
use crate::training::precision::Training;

/// Trains two windows of two micro-batches of this size and drops the result; `begins` is called
/// before each micro-step, with the budget in force. Budget and update are its own, so the
/// training's stay new; the thread is to be [`apart`]. Draws random numbers.
fn rehearsal<B: AutodiffBackend>(
    options: &Options,
    job: &Job,
    device: &B::Device,
    micro_batch: usize,
    begins: impl Fn(Option<&InstalledBudget>),
) {
    const CHECKED: &str = "the settings were checked";
    let tokens = Tensor::<B, 2, Int>::zeros([micro_batch, options.context], device);
    let budget = options
        .memory
        .checkpoint
        .budget()
        .map(MemoryBudget::install);
    let batch = BatchConfig {
        train_batch_size: None,
        train_micro_batch_size_per_gpu: Some(micro_batch as u64),
        gradient_accumulation_steps: Some(2),
    };
    let mut config = job.config.clone();
    config.zero.batch = batch;
    let alone = Arc::new(SingleRank::new());
    let mut update = Update::from_deepspeed(&config, alone).expect(CHECKED);
    let model = job.model::<B>(options, device).expect(CHECKED);
    let model = update.prepare(model);
    rehearse(model.expect(CHECKED), update, || {
        begins(budget.as_ref());
        TokenBatch {
            inputs: tokens.clone(),
            targets: tokens.clone(),
        }
    });
}

/// Finds the largest micro-batch for `--effective-batch` that fits into the memory, and sets it in
/// the job. Returns the trials.
///
/// # Errors
///
/// [`TrainingError::Options`], [`TrainingError::MicroBatch`].
pub fn find_window<B: AutodiffBackend>(
    options: &Options,
    job: &mut Job,
    device: &B::Device,
) -> Result<Option<MicroBatchFound>, TrainingError> {
    let Some(effective_batch) = options.effective_batch else {
        return Ok(None);
    };
    let _apart = apart();
    let limit_bytes = options.memory_limit.map(|mebibytes| mebibytes << 20);
    let limit_bytes = limit_bytes.or_else(|| device_bytes(options.memory.backend));
    let backend = options.memory.backend.name();
    let unknown = format!("it is not known how much memory {backend} has: give --memory-limit");
    let limit_bytes = limit_bytes.ok_or(TrainingError::Options(unknown))?;
    let meta = options.memory.backend.meta();
    // The same steps without data.
    let estimate = |micro_batch| {
        let step = || rehearsal::<Training<Meta>>(options, job, &meta, micro_batch, |_| {});
        estimate_run(meta, step).0.peak_bytes
    };
    let search = MicroBatchSearch::new(effective_batch, limit_bytes).starting_at(estimate);
    let mut probe = memory_probe(options.memory.backend);
    let step = |micro_batch: usize| rehearsal::<B>(options, job, device, micro_batch, |_| {});
    let found = find_micro_batch::<B, _>(&search, device, &mut *probe, step)
        .map_err(TrainingError::MicroBatch)?;
    job.set_window(found.partition.micro_batch(), found.partition.steps());
    Ok(Some(found))
}

/// Draws what a step holds in memory, one operation after the other, into an SVG file, or writes it
/// into a JSON file that Perfetto opens. Prints what holds the most at the peak.
///
/// # Errors
///
/// [`TrainingError::Io`].
pub fn plot_memory<B: AutodiffBackend>(
    file: &Path,
    options: &Options,
    job: &Job,
    device: &B::Device,
) -> Result<(), TrainingError> {
    let _apart = apart();
    let recording = record_all();
    let limit_bytes = Cell::new(None);
    let micro_batch = job.batch.micro as usize;
    rehearsal::<B>(options, job, device, micro_batch, |budget| {
        // The last step is drawn, and the limit that it kept.
        recording.take();
        let limits = budget.map_or_else(Vec::new, InstalledBudget::limit_bytes);
        limit_bytes.set(limits.first().copied().flatten());
    });
    let events = recording.finish();
    let title = format!(
        "A step of {micro_batch} sequences, --checkpoint {}",
        options.memory.checkpoint
    );
    let mut plot = MemoryPlot::new(&events).title(title);
    if let Some(bytes) = limit_bytes.get() {
        plot = plot.budget_bytes(bytes);
    }
    if let Some(snapshot) = Snapshot::at_peak(&events) {
        println!("{snapshot}");
    }
    let written = match file
        .extension()
        .is_some_and(|extension| extension == "json")
    {
        true => chrome_trace(&events),
        false => plot.svg(),
    };
    Ok(fs_err::write(file, written)?)
}
