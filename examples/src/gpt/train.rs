//! The training itself: model, data, optimizer and schedule, put together in Burn's Learner.

use std::io::{IsTerminal, stdout};
use std::sync::{Arc, Mutex};

use burn::prelude::*;
use burn::tensor::backend::{AutodiffBackend, DeviceOps};
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::metric::{LearningRateMetric, LossMetric};
use burn::train::renderer::tui::TuiMetricsRendererWrapper;
use burn::train::{Interrupter, Learner, SupervisedTraining};
use burn_flex::Flex;
use burn_zero::group::launched;
use burn_zero::{ModelStates, SilentRenderer};

use super::accumulation::Window;
use super::error::GptError;
use super::held::Held;
use super::history::History;
use super::loader::WindowLoader;
use super::metric::Perplexity;
use super::model::Gpt;
use super::placement::Placed;
use super::precision::Precision;
use super::progress::Lines;
use super::ranks::{Expected, Rank, World};
use super::recompute::{Recompute, plot_memory};
use super::report::{Report, peak_bytes};
use super::run_dir::{REPORT, WholeFileRecorder, open};
use super::sample::sample;
use super::settings::Settings;
use super::text::Text;
use super::windows::{Batches, Windows};

/// Held-out sequences that a validation reads at most.
const VALIDATION_WINDOWS: usize = 256;

/// Bytes of text to show for the trained model.
const SAMPLE_BYTES: usize = 400;

/// Trains as the settings say, and reports where rank 0 is; the device is one of the backend that they name.
///
/// # Errors
///
/// Anything that [`GptError`] lists, the first of it before the first step wherever that is possible.
pub fn train<B: AutodiffBackend>(
    mut settings: Settings,
    world: World,
    device: B::Device,
) -> Result<Option<Report>, GptError> {
    let precision = {
        let config = &settings.job.config;
        Precision::install::<B>(config.amp, &config.scaler, &device)?
    };
    // Finds an invalid configuration before anything is written.
    Placed::<B>::new(&settings.job.config, world.size(), &Held::default())?;
    let text = Text::load(&settings.options.text)?;
    text.check(settings.options.context)?;
    let window = Window::settle::<B>(&mut settings, &precision, &device)?;
    if let Some(found) = &window.found {
        println!("{found}");
    }
    B::seed(&device, settings.options.seed);
    let run = Run {
        // Drawn once for the ranks of this process, which share its generator of random numbers.
        model: Mutex::new(settings.options.model().init::<B>(&device)),
        settings,
        precision,
        window,
        text,
        device,
    };
    world.run(|rank| run.train(&rank))
}

/// The values that the ranks of a process share.
struct Run<B: AutodiffBackend> {
    settings: Settings,
    precision: Precision,
    window: Window,
    text: Text,
    model: Mutex<Gpt<B>>,
    device: B::Device,
}

impl<B: AutodiffBackend> Run<B> {
    /// Trains one rank.
    fn train(&self, rank: &Rank) -> Result<Option<Report>, GptError> {
        let Self {
            settings,
            window,
            text,
            ..
        } = self;
        let options = &settings.options;
        let agreed = format!("{:?}, {:?}", settings.job, options.start());
        rank.check_same("settings", &agreed)?;
        let device = rank.device::<B>(&self.device);
        let interrupter = Interrupter::new();
        let precision = self.precision.renewed().with_interrupter(&interrupter);
        if let (Some(file), true) = (&options.memory_plot, rank.is_first()) {
            plot_memory::<B>(file, settings, &precision, &device, window.micro_batch)?;
            println!("memory over one step: {}", file.display());
        }
        let first_epoch = self.open(rank)?;
        let resumed = first_epoch.checked_sub(1).filter(|epoch| *epoch > 0);
        let plan = options.plan();

        let (train_loader, valid_loader) = self.loaders(first_epoch, &device);
        let pace = train_loader.pace();
        let model = self.model.lock().expect("no holder panics").clone();
        let parameters = model.num_params();
        let expected = Expected::of(ModelStates::of::<B, _>(&model), &settings.job);
        if rank.is_first() {
            self.announce(parameters, first_epoch, &expected);
        }
        let held = Held::default();
        let mut optimizer = Placed::<B>::new(&settings.job.config, rank.world_size(), &held)?;
        if launched().is_none() {
            optimizer = optimizer.with_seed(options.seed);
        }
        let (optimizer, updates) = window.wrap::<B, Gpt<B>, _>(optimizer);
        let schedule = updates.schedule(settings.schedule());
        let learner = Learner::new(model, precision.wrap(optimizer), schedule);

        let history = History::default();
        let directory = &options.output;
        let mut training =
            SupervisedTraining::new(directory, Arc::new(train_loader), Arc::new(valid_loader))
                .metrics((LossMetric::<Flex>::new(), Perplexity::default()))
                .metric_train_numeric(LearningRateMetric::new())
                // Two, so that one is complete while the last is being written.
                .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
                .with_file_checkpointer(WholeFileRecorder::default())
                .with_interrupter(interrupter.clone())
                .num_epochs(plan.epochs());
        training = updates.drive::<B, _>(precision.watch(training), rank, &device);
        if let Some(epoch) = resumed {
            training = training.checkpoint(epoch);
        }
        training = if !rank.is_first() {
            training
                .with_application_logger(None)
                .renderer(SilentRenderer)
        } else if stdout().is_terminal() && launched().is_none() {
            // A launcher gives its processes terminals without a keyboard or a size.
            let screen = TuiMetricsRendererWrapper::new(interrupter.clone(), resumed);
            match rank.world_size() {
                1 => training.renderer(updates.show(screen)),
                // With several ranks, iterations are batches, as in Burn.
                _ => training.renderer(screen),
            }
        } else {
            let [sequences, steps] = [window.micro_batch, window.steps];
            training.renderer(Lines::new(plan, sequences, steps, rank.world_size()))
        };
        if rank.is_first() {
            training = training.with_metric_logger(history.logger(directory, first_epoch));
        }
        let recompute = Recompute::install(options.checkpoint);
        training = Recompute::watch(options.checkpoint, training);
        let trained = training.launch(learner);
        // Restores the terminal.
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
        let ranks = rank.figures(&held)?;
        if !rank.is_first() {
            return Ok(None);
        }
        let report = Report {
            train_loss: last.train.unwrap_or(f64::NAN),
            valid_loss: last.valid.unwrap_or(f64::NAN),
            tokens_per_second: pace.tokens_per_second() * rank.world_size() as f64,
            peak_bytes: peak_bytes(),
            skipped_steps: precision.skipped_steps(),
            replayed: recompute.replayed(),
            steps: plan.steps(),
            updates: updates.taken(),
            micro_batch: window.micro_batch,
            window: window.steps,
            effective_batch: settings.sequences_per_update(),
            stage: settings.job.config.zero.stage.number(),
            expected,
            ranks,
            precision: precision.name().into(),
            backend: options.backend.name().into(),
            parameters,
            tokens: plan.steps() * settings.sequences_per_update() * options.context,
            text_bytes: text.len(),
            valid_bytes: text.valid.len(),
            epochs,
            sample: sample(&trained.model, SAMPLE_BYTES, options.seed, device.inner()),
            options: options.clone(),
            found: window.found.clone(),
        };
        report.write(&options.output.join(REPORT))?;
        Ok(Some(report))
    }

    /// Rank 0 prepares the directory; all go on from the same epoch.
    fn open(&self, rank: &Rank) -> Result<usize, GptError> {
        let first_epoch = match rank.is_first() {
            true => open(&self.settings, &self.text)?.map_or(1, |epoch| epoch + 1),
            false => 0,
        };
        rank.number_of_first("first epoch", first_epoch)
    }

    /// Prints the settings of the training before it begins.
    fn announce(&self, parameters: usize, first_epoch: usize, expected: &Expected) {
        let Self {
            settings,
            window,
            text,
            precision,
            ..
        } = self;
        let options = &settings.options;
        let plan = options.plan();
        print!("{}", settings.job);
        println!("{expected}");
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
            options.output.display(),
        );
    }

    /// Random batches of the training text for all ranks, and the held-out text.
    fn loaders(
        &self,
        first_epoch: usize,
        device: &B::Device,
    ) -> (WindowLoader<B>, WindowLoader<B::InnerBackend>) {
        let Self { window, text, .. } = self;
        let options = &self.settings.options;
        let batches = Batches {
            size: window.micro_batch,
            accum: window.steps,
            ranks: self.settings.job.batch.world_size,
        };
        let context = options.context;
        let plan = options.plan();
        let train = Windows::random(text.train.clone(), context, batches, options.seed, plan);
        let valid = Windows::spread(text.valid.clone(), context, batches, VALIDATION_WINDOWS);
        let workers = options.workers;
        (
            WindowLoader::new(train, workers, first_epoch, device.clone()),
            WindowLoader::new(valid, workers, first_epoch, device.inner().clone()),
        )
    }
}
