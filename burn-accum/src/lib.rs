//! Gradient accumulation for [Burn](https://burn.dev) 0.21: a window of micro-batches is one exact
//! update.
//!
//! Exact is the update of the whole batch, to f32 rounding. That holds for a model that computes
//! each item by itself. A `BatchNorm` normalises by the micro-batch that it sees, as it does in
//! PyTorch, and a loss between the items of a batch (contrastive learning) sees the micro-batch's
//! only.
//!
//! # A window
//!
//! [`MultiSteps`] is an optimizer that wraps any optimizer. It sums the gradients of `steps`
//! micro-batches in f32, in place, then takes one step of the wrapped optimizer; until then
//! parameters and optimizer are untouched, bit for bit. Model code, `TrainStep` and the training
//! loop do not change:
//!
//! ```
//! # use burn::{backend::Autodiff, nn::Linear, optim::{AdamWConfig, Optimizer}};
//! # use burn_flex::Flex;
//! use burn_accum::{AccumConfig, MultiSteps};
//! # type B = Autodiff<Flex>;
//! # fn train<O: Optimizer<Linear<B>, B>>(_: O) {}
//!
//! // let optimizer = AdamWConfig::new().init();
//! let optimizer = MultiSteps::new(AdamWConfig::new().init(), AccumConfig::mean(8))?;
//! # train(optimizer);
//! # Ok::<(), burn_accum::AccumError>(())
//! ```
//!
//! | [`Normalization`] | the update's gradient | one batch of the union if |
//! |---|---|---|
//! | `Mean` | sum / micro-batches in the window | all micro-batches hold equally many items |
//! | `Tokens` | sum of loss sums / items in the window | always; each micro-batch says its items: [`Counted`] |
//! | `Sum` | sum | the loss is itself a share of the update's |
//!
//! # The order of layers
//!
//! From the outside in: loss scaler, accumulation, clipping, optimizer.
//!
//! ```
//! # use burn::{backend::Autodiff, nn::Linear, optim::{AdamWConfig, Optimizer}};
//! # use burn_flex::Flex;
//! use burn_accum::{AccumConfig, ClipGlobalNorm, MultiSteps};
//! use burn_amp::GradScaler;
//! # type B = Autodiff<Flex>;
//! # fn train<O: Optimizer<Linear<B>, B>>(_: O) {}
//!
//! let scaler = GradScaler::default();
//! let clipped = ClipGlobalNorm::new(AdamWConfig::new().init(), 1.0)?;
//! let optimizer = scaler.wrap(MultiSteps::new(clipped, AccumConfig::mean(8))?);
//! # train(optimizer);
//! # Ok::<(), burn_accum::AccumError>(())
//! ```
//!
//! A micro-batch that overflowed is dropped, and the scale lowered before the next; the window is
//! complete when it has 8 finite micro-batches. The device decides, and the host reads the outcomes
//! once, when the window is full. Inside of a `MultiSteps` that itself drops non-finite
//! micro-batches the scaler would never see an overflow, so that order panics at its first step
//! ([`AccumError::ScalerInside`]). Clipping sees the update's gradient, not a micro-batch's.
//!
//! # In the Learner
//!
//! A [`MultiSteps`] works in Burn's `Learner` as it is. Burn's own loop leaves the last window of
//! an epoch open. With one line more, an [`AccumulatingStrategy`], it is applied with its true
//! weights before the model is validated and recorded, and `iteration` in the progress counts
//! updates. With [`PerUpdate`] the learning rate follows updates.
//!
//! ```
//! # use burn::{backend::Autodiff, data::dataloader::DataLoader, lr_scheduler::{LrScheduler, cosine::CosineAnnealingLrSchedulerConfig}};
//! # use burn::{module::AutodiffModule, optim::AdamWConfig, train::{InferenceStep, Learner, SupervisedTraining, TrainStep}};
//! # use burn_flex::Flex;
//! # use std::{fmt::Display, sync::Arc};
//! use burn_accum::{AccumConfig, AccumulatingStrategy, MultiSteps, PerUpdate, UpdatesMetric};
//! # type B = Autodiff<Flex>;
//! # fn train<M>(
//! #     model: M,
//! #     train: Arc<dyn DataLoader<B, M::Input>>,
//! #     valid: Arc<dyn DataLoader<Flex, <M::InnerModule as InferenceStep>::Input>>,
//! # ) -> Result<(), burn_accum::AccumError>
//! # where
//! #     M: TrainStep + AutodiffModule<B> + Display + 'static,
//! #     M::InnerModule: InferenceStep,
//! # {
//! # let cosine = CosineAnnealingLrSchedulerConfig::new(1e-3, 10_000).init().unwrap();
//!
//! let optimizer = MultiSteps::new(AdamWConfig::new().init(), AccumConfig::mean(8))?;
//! let updates = optimizer.updates();
//! let learner = Learner::new(model, optimizer, PerUpdate::new(cosine, &updates));
//!
//! SupervisedTraining::new("artifacts", train, valid)
//!     .metric_train_numeric(UpdatesMetric::new(&updates))
//!     .with_training_strategy(AccumulatingStrategy::new(&updates).into())
//!     .launch(learner);
//! # Ok(())
//! # }
//! ```
//!
//! # Where things are
//!
//! `accumulation` is a window as a state machine, `multi_steps` the wrapper around it, `part` it as a
//! part of a [`burn_update::Update`], `tally` its arithmetic as integers, `sums` the accumulators,
//! `counted` is how a count of items travels, `record`
//! the saved state, `progress` what others may see. `clip` and `norm` are the global norm;
//! `lr_scaling` is the learning rate; `strategy` makes burn-update's loop of the `Learner` follow windows. `find` is
//! [`find_micro_batch`].

mod accumulation;
mod clip;
mod config;
mod counted;
mod error;
mod find;
mod lr_scaling;
mod multi_steps;
mod norm;
mod part;
mod progress;
mod record;
mod strategy;
mod sums;
mod tally;

pub use accumulation::Accumulation;
pub use burn_decorator::module::independent;
pub use burn_update::{EpochTail, PerUpdate, PerUpdateRecord};
pub use clip::{ClipGlobalNorm, ClipNorm};
pub use config::{AccumConfig, NonFinite, Normalization, WindowSchedule};
pub use counted::{CountSlot, Counted, Items};
pub use error::{AccumError, InvalidValue};
pub use find::{
    EstimatedStart, FindError, MemoryProbe, MicroBatchFound, MicroBatchSearch, Partition,
    PeakCounter, SampledGauge, StepResult, Trial, TrialOutcome, find_micro_batch,
    host_memory_bytes, rehearse,
};
pub use lr_scaling::{LrScaling, ScaledLr};
pub use multi_steps::{MultiSteps, flush};
pub use norm::{GradNorm, GradNormMetric};
pub use part::ClipByNorm;
pub use progress::{Dropped, UpdateCounter, UpdatesMetric};
pub use record::{AccumRecord, PartialWindow};
pub use strategy::{AccumProgress, AccumulatingStrategy};
