//! Dynamic loss scaling: `backward` multiplies the loss, gradients are unscaled where they are
//! read, and a wrapped optimizer skips the steps that overflowed.
//!
//! | file | idea |
//! |---|---|
//! | `config` | how the scale moves |
//! | `handle` | [`GradScaler`], the handle that everything shares |
//! | `state` | what a step's outcome does to scale, counters and errors |
//! | `shared_scale` | one scale for several optimizers: an update an iteration |
//! | `registry` | finds the scaler of a loss: by its parameters, by the thread, by the process |
//! | `models` | what a scaler knows of the models that it trains |
//! | `active` | the scale that `backward` uses |
//! | `gradients` | the gradients of one step, from one device or several |
//! | `deferred` | flags that are read one step late |
//! | `optimizer` | [`ScaledOptimizer`], the wrapper |
//! | `part` | [`UpdateScale`], the scaler as a part of a [`burn_update::Update`] |
//! | `record` | its saved state |
//! | `overflow` | what is known about a skipped step |
//! | `metric` | what the Learner shows |

mod active;
mod config;
mod deferred;
mod gradients;
mod handle;
mod metric;
mod models;
mod optimizer;
mod overflow;
mod part;
mod record;
mod registry;
mod shared_scale;
mod state;

pub(crate) use active::{active_scale, is_watching, saying, see, watching};
pub use config::{Detection, GradScalerConfig};
pub(crate) use deferred::Factor;
pub use handle::GradScaler;
pub use metric::{LossScaleMetric, SkippedStepsMetric};
pub use optimizer::ScaledOptimizer;
pub use overflow::{Overflow, OverflowCause};
pub use part::UpdateScale;
pub use record::ScaledRecord;
pub use state::ScalerState;
