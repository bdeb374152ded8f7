//! The training itself: model, data, optimizer and schedule, put together in Burn's Learner.

use std::io::{IsTerminal, stdout};
use std::sync::Arc;

use burn::optim::{AdamWConfig, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::{AutodiffBackend, DeviceOps};
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::metric::{LearningRateMetric, LossMetric};
use burn::train::{Interrupter, Learner, SupervisedTraining};
use burn_flex::Flex;

use super::accumulation::Window;
use super::error::GptError;
use super::history::History;
use super::loader::WindowLoader;
use super::metric::Perplexity;
use super::model::Gpt;
use super::options::Options;
use super::precision::Precision;
use super::progress::Lines;
use super::report::{Report, peak_bytes};
use super::run_dir::{RunDir, WholeFileRecorder};
use super::sample::sample;
use super::schedule::WarmupCosine;
use super::text::Text;
use super::windows::Windows;

/// Held-out sequences that a validation reads at most.
const VALIDATION_WINDOWS: usize = 256;

/// Bytes of text to show for the trained model.
const SAMPLE_BYTES: usize = 400;

/// Trains as the options say and reports; the device is one of the backend that they name.
///
/// # Errors
///
/// Anything that [`GptError`] lists, the first of it before the first step wherever that is possible.
pub fn train<B: AutodiffBackend>(options: &Options, device: B::Device) -> Result<Report, GptError> {
    let interrupter = Interrupter::new();
    let precision = Precision::install::<B>(options.amp, &device, &interrupter)?;
    let text = Text::load(&options.text)?;
    text.check(options.context)?;
    let window = Window::settle::<B>(options, &precision, &device)?;
    if let Some(found) = &window.found {
        println!("{found}");
    }
    let (run, resumed) = RunDir::open(options, &text)?;
    let plan = options.plan();
    let first_epoch = resumed.map_or(1, |epoch| epoch + 1);

    let (train_loader, valid_loader) = loaders::<B>(options, &window, &text, first_epoch, &device);
    let pace = train_loader.pace();
    B::seed(&device, options.seed);
    let model: Gpt<B> = options.model().init(&device);
    let parameters = model.num_params();
    println!(
        "{parameters} parameters, {} bytes of text ({} held out), updates {} to {} of {} x {} sequences in {} on {}, into {}",
        text.len(),
        text.valid.len(),
        plan.steps_of(first_epoch).start + 1,
        plan.steps(),
        window.steps,
        window.micro_batch,
        precision.name(),
        options.backend.name(),
        run.path().display(),
    );
    let (optimizer, updates) = window.wrap::<B, Gpt<B>, _>(optimizer());
    let schedule = WarmupCosine::new(options.lr, options.warmup(), plan.steps());
    let learner = Learner::new(model, precision.wrap(optimizer), updates.schedule(schedule));

    let history = History::default();
    let mut training =
        SupervisedTraining::new(run.path(), Arc::new(train_loader), Arc::new(valid_loader))
            .metrics((LossMetric::<Flex>::new(), Perplexity::default()))
            .metric_train_numeric(LearningRateMetric::new())
            .with_metric_logger(history.logger(run.path(), first_epoch))
            // Two, so that a whole one is there while the last is being written.
            .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
            .with_file_checkpointer(WholeFileRecorder::default())
            .with_interrupter(interrupter.clone())
            .num_epochs(plan.epochs());
    training = updates.watch(precision.watch(training));
    if let Some(epoch) = resumed {
        training = training.checkpoint(epoch);
    }
    // In a terminal Burn draws on the whole screen.
    if !stdout().is_terminal() {
        training = training.renderer(Lines::new(plan, window.steps));
    }
    let trained = training.launch(learner);
    // Gives the terminal back.
    drop(trained.renderer);

    let epochs = history.epochs();
    let last = epochs.last().copied().unwrap_or_default();
    if let Some(error) = precision.error() {
        return Err(error);
    }
    if interrupter.should_stop() {
        return Err(GptError::Stopped {
            steps: plan.steps_of(last.epoch.max(1)).start,
            reason: interrupter.get_message().unwrap_or_default(),
        });
    }
    let report = Report {
        train_loss: last.train.unwrap_or(f64::NAN),
        valid_loss: last.valid.unwrap_or(f64::NAN),
        tokens_per_second: pace.tokens_per_second(),
        peak_bytes: peak_bytes(),
        skipped_steps: precision.skipped_steps(),
        steps: plan.steps(),
        updates: updates.taken(),
        micro_batch: window.micro_batch,
        window: window.steps,
        effective_batch: window.effective_batch(),
        precision: precision.name().into(),
        backend: options.backend.name().into(),
        parameters,
        tokens: plan.steps() * window.effective_batch() * options.context,
        text_bytes: text.len(),
        valid_bytes: text.valid.len(),
        epochs,
        sample: sample(&trained.model, SAMPLE_BYTES, options.seed, device.inner()),
        options: Options {
            warmup: Some(options.warmup()),
            eval_every: Some(plan.longest()),
            batch: window.micro_batch,
            accum: window.steps,
            ..options.clone()
        },
        found: window.found,
    };
    report.write(&run.report())?;
    Ok(report)
}

/// Random batches of the training text, and the held-out text.
fn loaders<B: AutodiffBackend>(
    options: &Options,
    window: &Window,
    text: &Text,
    first_epoch: usize,
    device: &B::Device,
) -> (WindowLoader<B>, WindowLoader<B::InnerBackend>) {
    let Options {
        context,
        seed,
        workers,
        ..
    } = *options;
    let batches = [window.micro_batch, window.steps];
    let train = Windows::random(text.train.clone(), context, batches, seed, options.plan());
    let valid = Windows::spread(text.valid.clone(), context, batches, VALIDATION_WINDOWS);
    (
        WindowLoader::new(train, workers, first_epoch, device.clone()),
        WindowLoader::new(valid, workers, first_epoch, device.inner().clone()),
    )
}

/// AdamW with the moments of GPT-3 (Brown et al. 2020).
pub(super) fn optimizer<B: AutodiffBackend>() -> impl Optimizer<Gpt<B>, B> {
    AdamWConfig::new()
        .with_beta_2(0.95)
        .with_epsilon(1e-8)
        .with_weight_decay(0.01)
        .init()
}
