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
//! `.accumulate(AccumConfig::mean(8))?` makes an update of a window of micro-batches: a part of
//! burn-update's [`Update`](burn_update::Update). It sums their gradients in f32, in place, and the
//! optimizer takes one step; until then parameters and optimizer are untouched, bit for bit. Model
//! code and `TrainStep` do not change:
//!
//! ```
//! use burn::{backend::Autodiff, optim::AdamWConfig, prelude::*};
//! use burn_accum::{AccumConfig, ClipByNorm};
//! use burn_update::Update;
//!
//! type B = Autodiff<burn_flex::Flex>;
//! let device = Default::default();
//! let mut model = nn::LinearConfig::new(4, 2).init::<B>(&device);
//! let mut update = Update::new(AdamWConfig::new().init())
//!     .clip_norm(1.0)?
//!     .accumulate(AccumConfig::mean(8))?;
//!
//! for _ in 0..8 {
//!     let loss = model.forward(Tensor::<B, 2>::ones([8, 4], &device)).powi_scalar(2).mean();
//!     let gradients = update.backward(&model, loss);
//!     model = update.step(1e-3, model, gradients)?; // the model changes at the eighth
//! }
//! assert_eq!(update.updates(), 1);
//! # Ok::<(), burn_update::UpdateError>(())
//! ```
//!
//! [`Accumulation`] is the same with handles and further settings. Clipping ([`ClipNorm`]) sees the
//! update's gradient, not a micro-batch's.
//!
//! | [`Normalization`] | the update's gradient | one batch of the union if |
//! |---|---|---|
//! | `Mean` | sum / micro-batches in the window | all micro-batches hold equally many items |
//! | `Tokens` | sum of loss sums / items in the window | always; each micro-batch says its items: [`Counted`] |
//! | `Sum` | sum | the loss is itself a share of the update's |
//!
//! # With a loss scale
//!
//! With `.scale(..)` of burn-amp a micro-batch that overflowed is dropped, and the scale lowered
//! before the next; the window is complete when it has 8 finite micro-batches. The device decides,
//! and the host reads the outcomes once, when the window is full.
//!
//! # In the Learner
//!
//! An update works in Burn's `Learner` as it is. Burn's own loop leaves the last window of an epoch
//! open. With `update.strategy()` it is applied with its true weights before the model is validated
//! and recorded, and `iteration` in the progress counts updates. With `update.per_update(schedule)`
//! the learning rate follows updates.
//!
//! ```
//! # use burn::{backend::Autodiff, data::dataloader::DataLoader, lr_scheduler::{LrScheduler, cosine::CosineAnnealingLrSchedulerConfig}};
//! # use burn::{module::AutodiffModule, optim::AdamWConfig, train::{InferenceStep, Learner, SupervisedTraining, TrainStep}};
//! # use burn_flex::Flex;
//! # use std::{fmt::Display, sync::Arc};
//! use burn_accum::AccumConfig;
//! use burn_update::Update;
//! # type B = Autodiff<Flex>;
//! # fn train<M>(
//! #     model: M,
//! #     train: Arc<dyn DataLoader<B, M::Input>>,
//! #     valid: Arc<dyn DataLoader<Flex, <M::InnerModule as InferenceStep>::Input>>,
//! # ) -> Result<(), burn_update::UpdateError>
//! # where
//! #     M: TrainStep + AutodiffModule<B> + Display + 'static,
//! #     M::InnerModule: InferenceStep,
//! # {
//! # let cosine = CosineAnnealingLrSchedulerConfig::new(1e-3, 10_000).init().unwrap();
//!
//! let update = Update::new(AdamWConfig::new().init()).accumulate(AccumConfig::mean(8))?;
//! let (strategy, schedule) = (update.strategy(), update.per_update(cosine));
//!
//! SupervisedTraining::new("artifacts", train, valid)
//!     .metrics(strategy.metrics())
//!     .with_training_strategy(strategy.into())
//!     .launch(Learner::new(model, update, schedule));
//! # Ok(())
//! # }
//! ```
//!
//! # Where things are
//!
//! `accumulation` is a window as a state machine, `part` it and the clipping as parts of a
//! [`burn_update::Update`], `tally` its arithmetic as integers, `sums` the accumulators, `counted` is
//! how a count of items travels, `progress` what others may see. `clip` and `norm` are the global
//! norm; `lr_scaling` is the learning rate. `find` is [`find_micro_batch`].

mod accumulation;
mod clip;
mod config;
mod counted;
mod error;
mod find;
mod lr_scaling;
mod norm;
mod part;
mod progress;
mod sums;
mod tally;

pub use accumulation::Accumulation;
pub use burn_decorator::module::independent;
pub use burn_update::{EpochTail, PerUpdate, PerUpdateRecord};
pub use clip::ClipNorm;
pub use config::{AccumConfig, NonFinite, Normalization};
pub use counted::{CountSlot, Counted, Items};
pub use error::AccumError;
pub use find::{
    EstimatedStart, MemoryProbe, MicroBatchFound, MicroBatchSearch, Partition, PeakCounter,
    SampledGauge, StepResult, Trial, TrialOutcome, find_micro_batch, host_memory_bytes, rehearse,
};
pub use lr_scaling::{LrScaling, ScaledLr};
pub use norm::{GradNorm, GradNormMetric};
pub use part::ClipByNorm;
pub use progress::{Dropped, UpdateCounter, UpdatesMetric};
