//! Gradient accumulation and clipping: the only file of the example that knows about windows of micro-batches.

use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::MetricsRenderer;
use burn::train::{LearningComponentsTypes, SupervisedTraining};
use burn_accum::{
    AccumConfig, AccumProgress, AccumulatingStrategy, ClipGlobalNorm, EpochTail, MicroBatchSearch,
    MultiSteps, PerUpdate, UpdateCounter, UpdatesMetric, find_micro_batch, host_memory_bytes,
    rehearse,
};
use burn_zero::ZeroStrategy;

use super::error::GptError;
use super::held::Held;
use super::loader::TokenBatch;
use super::model::Gpt;
use super::placement::Placed;
use super::precision::Precision;
use super::ranks::Rank;
use super::recompute::Recompute;
use super::settings::Settings;
use crate::backend::BackendName;
use crate::pools::{device_bytes, memory_probe};

/// The micro-batch that was found, with its trials.
pub type Found = burn_accum::MicroBatchFound;

/// Why no micro-batch was found.
pub type NotFound = burn_accum::FindError;

/// The micro-batches of an update, all of one size.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// Sequences in a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches in an update.
    pub steps: usize,
    /// How the size was found, if it was looked for.
    pub found: Option<Found>,
}

impl Window {
    /// The window that the settings ask for: with `--effective-batch` the largest micro-batch that fits into the memory, which
    /// is then set.
    ///
    /// # Errors
    ///
    /// [`GptError::MemoryUnknown`], [`GptError::MicroBatch`].
    pub fn settle<B: AutodiffBackend>(
        settings: &mut Settings,
        precision: &Precision,
        device: &B::Device,
    ) -> Result<Self, GptError> {
        let batch = settings.job.batch;
        let options = &settings.options;
        let Some(effective_batch) = options.effective_batch else {
            return Ok(Self {
                micro_batch: batch.micro as usize,
                steps: batch.steps as usize,
                found: None,
            });
        };
        let limit_bytes = options.memory_limit.map(|mebibytes| mebibytes << 20);
        let limit_bytes = limit_bytes.or_else(|| match options.backend {
            BackendName::Flex => host_memory_bytes(),
            device => device_bytes(device),
        });
        let limit_bytes = limit_bytes.ok_or(GptError::MemoryUnknown {
            backend: options.backend.name(),
        })?;
        let search = MicroBatchSearch::new(effective_batch, limit_bytes);
        let found = find::<B>(&search, settings, precision, device)?;
        let [micro_batch, steps] = [found.partition.micro_batch(), found.partition.steps()];
        settings.set_window(micro_batch, steps);
        Ok(Self {
            micro_batch,
            steps,
            found: Some(found),
        })
    }

    /// Makes an optimizer take one step a window, with the mean of its gradients.
    pub fn wrap<B, M, O>(&self, optimizer: O) -> (impl Optimizer<M, B> + use<B, M, O>, Updates)
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        accumulate(self.steps, optimizer)
    }
}

fn accumulate<B, M, O>(steps: usize, optimizer: O) -> (impl Optimizer<M, B> + use<B, M, O>, Updates)
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
{
    let optimizer =
        MultiSteps::new(optimizer, AccumConfig::mean(steps)).expect("a window has steps");
    let updates = Updates {
        counter: optimizer.updates(),
        steps,
    };
    (optimizer, updates)
}

/// Wraps an optimizer so that the norm of its gradients over all parameters is at most `max_norm`.
pub fn clipped<O>(optimizer: O, max_norm: Option<f64>) -> ClipGlobalNorm<O> {
    // Without clipping the limit is `f32::MAX`: gradients are multiplied with 1, which changes no bit, and the type is the same.
    let max_norm = max_norm.map_or(f32::MAX, |norm| norm as f32);
    ClipGlobalNorm::new(optimizer, max_norm).expect("settings have checked the norm")
}

/// How far the training is, in updates.
#[derive(Clone, Debug)]
pub struct Updates {
    counter: UpdateCounter,
    steps: usize,
}

impl Updates {
    /// The updates that were taken.
    pub fn taken(&self) -> u64 {
        self.counter.updates()
    }

    /// Makes a schedule follow the updates: the Learner steps it for each micro-batch.
    pub fn schedule<S: LrScheduler>(&self, schedule: S) -> impl LrScheduler + use<S> {
        PerUpdate::new(schedule, &self.counter)
    }

    /// Makes the Learner show and count updates. A window that a skipped micro-batch left open at the end of an epoch continues in the
    /// next, and is applied when the training ends.
    ///
    /// Over several ranks such a window is applied when its epoch ends, because a record holds only rank 0's part of it.
    pub fn drive<B, LC>(
        &self,
        training: SupervisedTraining<LC>,
        rank: &Rank,
        device: &B::Device,
    ) -> SupervisedTraining<LC>
    where
        B: AutodiffBackend,
        LC: LearningComponentsTypes<
                Backend = B,
                TrainingModel = Gpt<B>,
                InferenceModel = Gpt<B::InnerBackend>,
            > + 'static,
    {
        let strategy = if rank.world_size() == 1 {
            let strategy = AccumulatingStrategy::new(&self.counter);
            strategy.with_tail(EpochTail::Carry).into()
        } else {
            ZeroStrategy::process(rank.group().clone())
                .with_devices(vec![device.clone()])
                .into()
        };
        let training = training.with_training_strategy(strategy);
        match self.steps {
            1 => training,
            _ => training.metric_train_numeric(UpdatesMetric::new(&self.counter)),
        }
    }

    /// Makes a renderer show micro-batches beside the updates.
    pub fn show<R: MetricsRenderer>(&self, renderer: R) -> impl MetricsRenderer + use<R> {
        AccumProgress::new(renderer)
    }
}

/// Trains two windows of two micro-batches of this size and drops the result; `begins` is called before each micro-step, with
/// what is in force. Draws random numbers.
pub fn rehearsal<B: AutodiffBackend>(
    settings: &Settings,
    precision: &Precision,
    device: &B::Device,
    micro_batch: usize,
    begins: impl Fn(&Recompute),
) {
    let options = &settings.options;
    let tokens = Tensor::<B, 2, Int>::zeros([micro_batch, options.context], device);
    // The rehearsal has its own budget, scaler and optimizer, so the training's stay new.
    let recompute = Recompute::install(options.checkpoint);
    let precision = precision.renewed();
    let optimizer = Placed::<B>::new(&settings.job.config, 1, &Held::default());
    let (accumulated, _) = accumulate(2, optimizer.expect("the settings were checked"));
    let model: Gpt<B> = options.model().init(device);
    rehearse(model, precision.wrap(accumulated), || {
        begins(&recompute);
        TokenBatch {
            inputs: tokens.clone(),
            targets: tokens.clone(),
        }
    });
}

/// Finds the largest micro-batch by short trainings of the model that the options describe.
fn find<B: AutodiffBackend>(
    search: &MicroBatchSearch,
    settings: &Settings,
    precision: &Precision,
    device: &B::Device,
) -> Result<Found, GptError> {
    let rehearsal =
        |micro_batch: usize| rehearsal::<B>(settings, precision, device, micro_batch, |_| {});
    let mut probe = memory_probe(settings.options.backend);
    let found = find_micro_batch::<B, _>(search, device, &mut *probe, rehearsal);
    found.map_err(GptError::from)
}
