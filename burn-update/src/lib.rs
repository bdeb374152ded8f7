//! The update of a training with Burn 0.21 as one pipeline: scale, accumulate, clip, any optimizer,
//! groups of parameters, an average of the weights.
//!
//! ```
//! use burn::{backend::Autodiff, optim::AdamWConfig, prelude::*};
//! use burn_accum::{AccumConfig, ClipByNorm};
//! use burn_amp::{Autocast, F16, GradScalerConfig};
//! use burn_update::{AverageConfig, Update};
//!
//! type B = Autocast<Autodiff<burn_flex::Flex>, F16>;
//! let device = Default::default();
//! let mut model = nn::LinearConfig::new(4, 2).init::<B>(&device);
//!
//! let mut update = Update::new(AdamWConfig::new().init())
//!     .clip_norm(1.0)?
//!     .accumulate(AccumConfig::mean(4))?
//!     .scale(GradScalerConfig::default())?
//!     .average(AverageConfig::new(0.999))?;
//!
//! for _ in 0..8 {
//!     let loss = model.forward(Tensor::<B, 2>::ones([8, 4], &device)).powi_scalar(2).mean();
//!     let gradients = update.backward(&model, loss);
//!     model = update.step(1e-3, model, gradients)?;
//! }
//! assert!(update.updates() >= 1); // a micro-batch that overflows in f16 counts for nothing
//! let _to_validate_with = update.averaged(&model)?;
//! # Ok::<(), burn_update::UpdateError>(())
//! ```
//!
//! The parts are of several crates: burn-amp has the scale, burn-accum the accumulation and the
//! clipping; this crate has the order, the [groups](Groups) of parameters, the
//! [average](AverageConfig) and the record. None of them knows another: what one part must know of
//! another is a value of the [`Step`], which each method gets as an argument.
//!
//! In Burn's `Learner` an [`Update`] stands in place of the optimizer, and `update.strategy()` is
//! the training loop: see [`UpdateStrategy`]. It also answers burn-accum's `flush`.
//!
//! # Where things are
//!
//! | file | idea |
//! |---|---|
//! | `update` | [`Update`], the pipeline: the order of the parts |
//! | `part` | what each kind of part is asked, and when |
//! | `step` | [`Step`], what one part must know of another |
//! | `arrived` | the gradients of one micro-step, from one device or several |
//! | `loss` | what is differentiated |
//! | `optimizer` | Burn's optimizers as a part, and an update as one of Burn's optimizers |
//! | `last` | clipping, optimizer and average, for a reduction that runs them on shards |
//! | `ranks` | what parts ask other ranks, and what a loop over ranks asks of an update |
//! | `tree` | an optimizer's record, as a tree |
//! | `groups` | parameters by path, each group with its optimizer |
//! | `average` | the average of the weights |
//! | `gradients` | gradients by path, for parts of one's own |
//! | `record` | the saved state of all parts |
//! | `progress` | how far an update is, for others |
//! | `per_update` | a learning rate that follows updates |
//! | `strategy` | [`UpdateStrategy`], the training loop of the Learner, with one rank or many |
//!
//! # For maintainers: the place of a reduction over ranks
//!
//! It is burn-zero's, between the accumulation and the clipping:
//!
//! - Its optimizer updates other parameters than the model: this rank's shards, a module of its
//!   own. So a reduction is an [`Optimize`] of the model around the [`LastParts`] of another update,
//!   which has the clipping, the optimizer and the average: it reduces, updates and publishes.
//! - With a scale, a sum that overflows on any rank leaves the update out on all:
//!   [`Optimize::update`] puts the names into [`Step::overflowed`] and sets [`Step::outcome`] back to
//!   [`StepOutcome::Waits`], and the accumulation and the scale see it.
//! - The norm to clip by is over the shards of all ranks, so it is in [`Step::norm`] before the
//!   clipping runs.
//! - The accumulation and the check of a scale ask all ranks which gradients are not finite, and how
//!   many items they have: [`Step::ranks`].

mod arrived;
mod average;
mod error;
mod gradients;
mod groups;
mod last;
mod loss;
mod optimizer;
mod part;
mod per_update;
mod progress;
mod ranks;
mod record;
mod short_name;
mod step;
mod strategy;
#[doc(hidden)]
pub mod tensor_fields;
mod tree;
mod update;

pub use arrived::{Arrived, items_id};
pub(crate) use average::Average;
pub use average::{AverageConfig, Averages};
pub use error::UpdateError;
pub use gradients::map_gradients;
pub use groups::{Group, Groups, Paths};
pub use last::LastParts;
pub use loss::Loss;
pub use optimizer::BurnOptimizer;
pub use part::{Accumulate, IntoAccumulate, IntoScale, Optimize, Parameter, Part, Scale, Stateful};
pub use per_update::{PerUpdate, PerUpdateRecord};
pub use progress::{CountsUpdates, UpdateProgress};
pub use ranks::{LoopRequest, Ranks};
pub use record::{PartState, UpdateItem, UpdateRecord};
pub use step::{HalfPrecision, Step, StepOutcome};
pub use strategy::{
    BatchSums, DistributedSampler, Driver, EpochItems, EpochOfRank, EpochTail, Position,
    RankDriver, RankItem, RankLoader, SampledLoader, SilentRenderer, SummedOutput, Tail,
    UpdateStrategy, WriteRecord,
};
pub use update::Update;
