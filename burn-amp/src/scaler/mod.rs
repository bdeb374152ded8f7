//! Dynamic loss scaling: `backward` multiplies the loss, gradients are unscaled where they are
//! read, and an update skips the steps that overflowed.
//!
//! | file | idea |
//! |---|---|
//! | `config` | how the scale moves |
//! | `handle` | [`GradScaler`], the handle that everything shares |
//! | `state` | what a step's outcome does to scale, counters and errors |
//! | `shared_scale` | one scale for several updates: it moves once an iteration |
//! | `registry` | finds the scaler of a loss: by its parameters, by the thread, by the process |
//! | `models` | what a scaler knows of the models that it trains |
//! | `active` | the scale that `backward` uses |
//! | `pending` | steps whose outcome only the device knows |
//! | `part` | [`UpdateScale`], the scaler as a part of a [`burn_update::Update`] |
//! | `overflow` | what is known about a skipped step |
//! | `metric` | what the Learner shows |

mod active;
mod config;
mod handle;
mod metric;
mod models;
mod overflow;
mod part;
mod pending;
mod registry;
mod shared_scale;
mod state;

pub(crate) use active::{active_scale, is_watching, saying, see, watching};
pub use config::GradScalerConfig;
pub use handle::GradScaler;
pub use metric::{LossScaleMetric, SkippedStepsMetric};
pub use overflow::{Overflow, OverflowCause};
pub use part::UpdateScale;
pub(crate) use pending::Factor;
