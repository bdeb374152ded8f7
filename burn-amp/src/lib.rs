//! Automatic mixed precision for [Burn](https://burn.dev) 0.21: autocast and dynamic loss scaling,
//! without a change in model code.
//!
//! # Autocast
//!
//! [`Autocast<B, P>`](Autocast) is a backend that wraps any backend. One table has a row per
//! operation, which says its precision: matmuls and convolutions in bf16 or f16, exponentials,
//! reductions, norms and losses in f32, the rest in the type of the operands. Parameters, gradients
//! and optimizer state stay f32. Formulas of Burn that leave the range of a low type are replaced,
//! so that no value or gradient is worse than PyTorch's autocast of the same operation.
//!
//! ```
//! use burn::backend::Autodiff;
//! use burn_amp::Autocast;
//! use burn_flex::Flex;
//!
//! // type B = Autodiff<Flex>;
//! type B = Autocast<Autodiff<Flex>>;
//! # fn backend<B: burn::tensor::backend::AutodiffBackend>() {}
//! # backend::<B>();
//! ```
//!
//! | policy | low type | |
//! |---|---|---|
//! | [`Bf16`] | bf16 | the default; f32's range, no loss scaling |
//! | [`F16`] | f16 | for devices without bf16; train it with a [`GradScaler`] |
//! | [`F32`] | none | raises f16 and bf16 operands to f32: for a part of a model, as `autocast::<F32, _>(\|\| head.forward(x))` |
//! | [`Off`] | none | bit for bit the inner backend |
//! | [`Configured`] | as [`AmpConfig::install`] says | for a choice at run time; reaches every thread |
//!
//! [`autocast`] overrides the policy for a scope of this thread. [`op_table`] is the table.
//! [`CastCache`] below `Autodiff` casts a weight that is used many times in a step once.
//! [`custom_op`] applies the table's rules to a kernel of your own.
//!
//! # Loss scaling
//!
//! f16 gradients underflow. With a scale an update multiplies the loss inside of `backward`, and
//! gradients are unscaled where they are read, so the training loop does not change; only the
//! optimizer's line does:
//!
//! ```
//! # use burn::{backend::Autodiff, nn::Linear, optim::{AdamConfig, Optimizer}};
//! # use burn_amp::{Autocast, F16, GradScalerConfig};
//! # use burn_flex::Flex;
//! # use burn_update::Update;
//! # type B = Autocast<Autodiff<Flex>, F16>;
//! # fn train<O: Optimizer<Linear<B>, B>>(_: O) {}
//! let update = Update::new(AdamConfig::new().init()).scale(GradScalerConfig::default())?;
//! # train(update);
//! # Ok::<(), burn_update::UpdateError>(())
//! ```
//!
//! A step with a non-finite gradient changes nothing, bit for bit; the parameters with such
//! gradients are in the log and in [`GradScaler::last_overflow`]. With [`Watch`] below `Autodiff`
//! and [`explain_overflow`] in `TrainStep::step`, so is the first operation that overflowed.
//!
//! # Where things are
//!
//! `cast.rs` is the rule, `policy.rs` says which low type and where, `table.rs` is the table as
//! data, `decorator/` makes the backend from it; `loss_scale.rs` is the state machine and `scaler/`
//! everything around it; `watch.rs` finds the operation that overflowed first.

mod cast;
mod cast_cache;
mod config;
mod decorator;
mod error;
mod loss_scale;
mod policy;
mod scaler;
mod table;
mod watch;

pub use cast::{Cast, Lineage, Owner};
pub use cast_cache::{CachedTensor, CastCache};
pub use config::{AmpConfig, PolicyName};
pub use decorator::{Autocast, AutocastTensor, ScaledGradients, custom_op};
pub use error::AmpError;
pub use loss_scale::{LossScale, LossScaleState, ScaleUpdate};
pub use policy::{Bf16, Configured, F16, F32, Mode, Off, Policy, autocast};
pub use scaler::{
    GradScaler, GradScalerConfig, LossScaleMetric, Overflow, OverflowCause, SkippedStepsMetric,
    UpdateScale,
};
pub use table::{OpRow, op_table};
pub use watch::{
    FirstNonFinite, Watch, WatchedTensor, explain_overflow, explained, first_non_finite,
};
