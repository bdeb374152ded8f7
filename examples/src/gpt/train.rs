//! The training itself: model, data, optimizer and schedule, put together in Burn's Learner.

use std::io::{IsTerminal, stdout};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder};
use burn::tensor::backend::{AutodiffBackend, DeviceOps};
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::metric::{LearningRateMetric, LossMetric};
use burn::train::{Interrupter, Learner, SupervisedTraining};
use burn_accum::MicroBatchFound;
use burn_checkpoint::{MemoryBudget, RematMetric, RematStats, end_step};
use burn_flex::Flex;
use burn_ranks::launched;
use burn_tensorboard::TensorBoard;
use burn_update::Update;
use burn_zero::{DeepSpeedParts, FromDeepSpeed, ModelStates, SilentRenderer, estimate};

use super::job::Job;
use super::loader::{Cut, Loader};
use super::log::Log;
use super::model::Gpt;
use super::options::Options;
use super::rehearsal::{find_window, plot_memory};
use super::report::Report;
use super::resume::open;
use super::sample::sample;
use super::text::Text;
use crate::pools::{bytes_in_use, peak_bytes};
use crate::training::error::TrainingError;
use crate::training::ranks::{Rank, device_of, run_ranks};
use crate::training::recompute::Checkpoint;

/// Held-out sequences that a validation reads at most.
const VALIDATION_SEQUENCES: usize = 256;

/// Bytes of text to show for the trained model.
const SAMPLE_BYTES: usize = 400;

/// Trains, and reports where rank 0 is; the device is one of the backend that the options name.
///
/// # Errors
///
/// Anything that [`TrainingError`] lists, the first of it before the first step wherever that is
/// possible.
pub fn train<B: AutodiffBackend>(
    options: &Options,
    mut job: Job,
    device: B::Device,
) -> Result<Option<Report>, TrainingError> {
    let ranks = job.batch.world_size;
    let policy = job.config.precision.amp();
    policy.check::<B>(&device)?;
    policy.install()?;
    // Finds an invalid configuration before anything is written.
    Update::<Gpt<B>, B>::from_deepspeed_in_learner(&job.config, ranks)?;
    job.schedule(options)?;
    let text = Text::load(&options.text, options.context)?;
    let found = find_window::<B>(options, &mut job, &device)?;
    if let Some(found) = &found {
        println!("{found}");
    }
    B::seed(&device, options.seed);
    let run = Run {
        // Drawn once for the ranks of this process, which share its generator of random numbers.
        model: Mutex::new(job.model::<B>(options, &device)?),
        options,
        job,
        found,
        text,
        device,
    };
    // Each rank of this process accounts for itself.
    let budget = options.memory.checkpoint.budget();
    let _budget = budget.map(MemoryBudget::install);
    run_ranks(ranks, |rank| run.train(&rank))
}

/// The values that the ranks of a process share.
struct Run<'a, B: AutodiffBackend> {
    options: &'a Options,
    job: Job,
    found: Option<MicroBatchFound>,
    text: Text,
    model: Mutex<Gpt<B>>,
    device: B::Device,
}

impl<B: AutodiffBackend> Run<'_, B> {
    /// Trains one rank.
    fn train(&self, rank: &Rank) -> Result<Option<Report>, TrainingError> {
        let Self {
            options, job, text, ..
        } = self;
        let (ranks, is_first) = (rank.world_size(), rank.rank() == 0);
        rank.agree_equal("settings", &format!("{job:?}, {options:?}"))?;
        let device = device_of::<B>(rank, &self.device);
        if let (Some(file), true) = (&options.memory_plot, is_first) {
            plot_memory::<B>(file, options, job, &device)?;
            println!("memory over one step: {}", file.display());
        }
        // Rank 0 prepares the directory; all go on from the same epoch.
        let first_epoch = match is_first {
            true => open(options, job, text)?,
            false => 0,
        };
        let first_epoch = rank.gather_f64("first epoch", first_epoch as f64)?[0] as usize;

        let plan = options.plan();
        let (batch, context, seed) = (job.batch, options.context, options.seed);
        let cut = Cut::new(&text.train, context);
        let train = Arc::new(Loader::<B>::new(cut, batch, plan, seed, &device));
        let cut = Cut::new(&text.valid, context);
        let spread = InMemDataset::new(cut.spread(&batch, VALIDATION_SEQUENCES));
        let valid = DataLoaderBuilder::new(cut).batch_size(batch.micro as usize);
        let valid = valid.set_device(device.inner().clone()).build(spread);

        let model = self.model.lock().expect("no holder panics").clone();
        let parameters = model.num_params();
        let estimate = estimate(&ModelStates::of::<B, _>(&model), &job.config.zero, ranks);
        if is_first {
            let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
            let device = mebibytes(estimate.peak_device_bytes());
            let host = mebibytes(estimate.kept_host_bytes());
            let sent = mebibytes(estimate.sent_bytes);
            println!(
                "{job}{parameters} parameters, {} bytes of text, updates {} to {}, into {}\na rank holds {device:.2} MiB on the device \
                 and {host:.2} MiB on the host, activations apart, and sends {sent:.2} MiB an update",
                text.bytes(),
                plan.updates_of(first_epoch).start + 1,
                plan.steps,
                options.output.display(),
            );
        }

        let interrupter = Interrupter::new();
        let mut parts = DeepSpeedParts::in_learner(&job.config, ranks)?;
        if launched().is_none() {
            // Threads share the generator of their process.
            parts.reduction = parts.reduction.with_seed(seed);
        }
        parts.scaler = parts.scaler.with_interrupter(interrupter.clone());
        let scaler = parts.scaler.clone();
        let update = parts.into_update()?;
        let updates = update.progress();
        let strategy = update
            .strategy()
            .process(rank.clone())
            .with_devices(vec![device.clone()])
            .with_bytes_in_use(bytes_in_use(options.memory.backend))
            // It goes on with the epoch of a record, on any number of ranks.
            .with_train_loader(train.clone());
        let schedule = update.per_update(job.schedule(options)?);
        let learner = Learner::new(model, update, schedule);

        let directory = &options.output;
        let mut training = SupervisedTraining::new(directory, train, valid)
            .metrics((LossMetric::<Flex>::new(),))
            .metric_train_numeric(LearningRateMetric::new())
            .metrics(strategy.metrics())
            // Two, so that one is complete while the last is being written.
            .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
            .with_file_checkpointer(NamedMpkFileRecorder::<FullPrecisionSettings>::default())
            .with_training_strategy(strategy.into())
            .with_interrupter(interrupter.clone())
            .num_epochs(plan.epochs());
        if options.memory.checkpoint != Checkpoint::None {
            training = training
                .metric_train_numeric(RematMetric::peak_bytes())
                .metric_train_numeric(RematMetric::replayed_operations());
        }
        if first_epoch > 1 {
            training = training.checkpoint(first_epoch - 1);
        }
        // A launcher gives its processes terminals without a keyboard or a size.
        let has_screen = stdout().is_terminal() && launched().is_none();
        if !(is_first && has_screen) {
            training = training.renderer(SilentRenderer);
        }
        let (log, epochs) = Log::new(directory, first_epoch, !has_screen);
        training = match is_first {
            true => {
                let events = TensorBoard::new(log, directory.join("tensorboard"))?;
                let done = plan.updates_of(first_epoch).start * ranks;
                training.with_metric_logger(events.with_steps(done as u64 * batch.steps))
            }
            false => {
                drop(log);
                training.with_application_logger(None)
            }
        };

        let began = Instant::now();
        // A budget does not count what was made so far.
        end_step();
        RematStats::reset_thread();
        let trained = training.launch(learner);
        let seconds = began.elapsed().as_secs_f64();
        // Restores the terminal.
        drop(trained.renderer);

        let epochs: Vec<_> = epochs.iter().collect();
        if let Some(error) = scaler.error() {
            return Err(error.into());
        }
        // Burn's terminal display resets the flag when it ends, but not the message.
        if interrupter.should_stop() || interrupter.get_message().is_some() {
            let recorded = epochs.last().map_or(first_epoch - 1, |last| last.epoch);
            return Err(TrainingError::Stopped {
                steps: plan.updates_of(recorded + 1).start,
                reason: interrupter.get_message().unwrap_or_default(),
            });
        }
        if !is_first {
            return Ok(None);
        }
        let last = epochs
            .last()
            .expect("a run that was not stopped has an epoch");
        let own_updates = plan.steps - plan.updates_of(first_epoch).start;
        let tokens = own_updates * batch.train as usize * context;
        let stats = RematStats::of_thread();
        let report = Report {
            train_loss: last.train,
            valid_loss: last.valid,
            tokens_per_second: tokens as f64 / seconds,
            peak_bytes: peak_bytes(),
            skipped_steps: scaler.skipped_steps(),
            replayed_operations: stats.replayed_operations,
            uploaded_bytes: stats.uploaded_bytes,
            steps: plan.steps,
            updates: updates.updates(),
            micro_batch: batch.micro,
            window: batch.steps,
            effective_batch: batch.train,
            found: self.found.clone(),
            precision: job.amp.dtype().into(),
            parameters,
            ranks,
            stage: job.config.zero.stage.number(),
            estimate,
            epochs,
            sample: sample(&trained.model, SAMPLE_BYTES, seed, device.inner()),
        };
        report.write(&directory.join("report.json"))?;
        Ok(Some(report))
    }
}
