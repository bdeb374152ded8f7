//! Errors of sharded training.

use burn_backend::DType;
use thiserror::Error;

/// Errors of sharded training, found before anything is sent wherever that is possible.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ZeroOptimizerError {
    /// A step before the optimizer knows the model.
    #[error(
        "the ZeroOptimizer has no model yet: call `let model = optimizer.prepare(model)?` before the first forward, so that all \
         ranks start from the same weights"
    )]
    NotPrepared,

    /// A step in a Learner whose strategy has set no rank context.
    #[error(
        "this ZeroOptimizer was made for a Learner (`ZeroOptimizer::in_learner`) whose strategy brings the ranks: pass \
         `ZeroStrategy::threads(n).into()` or `ZeroStrategy::process(group).into()` to `with_training_strategy`, or make it \
         with `ZeroOptimizer::new(inner, group, settings)`"
    )]
    NoStrategy,

    /// The model has other parameters than the one that was prepared.
    #[error(
        "parameter {index} of the module is {found}, but that of the prepared model is {expected}: prepare the model again \
         after changing it"
    )]
    OtherModel {
        /// Position in the order of the module.
        index: usize,
        /// Path and shape, or "none".
        found: String,
        /// Path and shape, or "none".
        expected: String,
    },

    /// A parameter that the module holds at two paths has become two leaves.
    #[error(
        "{again} is {first} held again, but the two are separate leaves now, and Burn keeps the gradient of one of them only: \
         `load_record` and `fork` take tied parameters apart, so prepare the model again after them"
    )]
    TiedApart {
        /// The first path, under which the parameter is sharded.
        first: String,
        /// The later path.
        again: String,
    },

    /// A gradient that is neither whole nor this rank's shard, unlike the others of the step.
    #[error(
        "the gradient of {path} has {elements} elements where {expected} belong: all gradients of a step come from \
         the model that the ZeroOptimizer prepared or returned last; after loading weights prepare it again"
    )]
    ForeignGradient {
        /// Path of the parameter.
        path: String,
        /// Elements of the gradient.
        elements: usize,
        /// Elements that it should have.
        expected: usize,
    },

    /// A gradient or state of another shape than the parameter's.
    #[error(
        "{what} of {path} is {found:?}, but the parameter is {expected:?}: it belongs to another model"
    )]
    OtherShape {
        /// The gradient, or the optimizer's state.
        what: &'static str,
        /// Path of the parameter.
        path: String,
        /// Its shape.
        found: Vec<usize>,
        /// The parameter's shape.
        expected: Vec<usize>,
    },

    /// A backend without hooks.
    #[error("{what}, which the backend {backend} cannot: use `Sharded<Autodiff<..>>`")]
    NotSharded {
        /// What needs hooks.
        what: &'static str,
        /// Name of the backend.
        backend: String,
    },

    /// A backend that cannot hold parameters in host memory.
    #[error(
        "parameters in host memory are uploaded at each use, which the backend {backend} cannot: put a `Remat` below autodiff, \
         `Autodiff<Remat<..>>`"
    )]
    NoRemat {
        /// Name of the backend.
        backend: String,
    },

    /// A type that neither collectives nor the optimizer on the host support.
    #[error(
        "{path} is {dtype:?}: only f32, bf16 and f16 are exchanged between ranks and updated on the host"
    )]
    UnsupportedDtype {
        /// Path of the parameter.
        path: String,
        /// Its type.
        dtype: DType,
    },

    /// A parameter with more dimensions than a whole shard can have.
    #[error(
        "{path} has {dimensions} dimensions: with `partition: Partition::Whole`, and on the host's backend, the optimizer meets \
         parameters in their shape, and Burn's optimizers keep state of tensors of at most 8; hold it in fewer dimensions and \
         reshape it in `forward`"
    )]
    TooManyDimensions {
        /// Path of the parameter.
        path: String,
        /// How many it has.
        dimensions: usize,
    },

    /// The optimizer is not elementwise: its update would differ if parameters were cut at any element.
    #[error(
        "{optimizer} does not update each element by itself, so that pieces of tensors would be updated in another way than whole \
         ones (seen on a trial tensor: {whole:?} whole, {cut:?} in pieces): set `partition: Partition::Whole`, \
         and clip by the global norm instead of tensor by tensor"
    )]
    NotElementwise {
        /// Type of the optimizer.
        optimizer: String,
        /// The trial tensor, updated whole.
        whole: Vec<f32>,
        /// The same, updated in shards.
        cut: Vec<f32>,
    },

    /// State of an optimizer that cannot be taken apart or put together.
    #[error("state of the optimizer: {reason}")]
    State {
        /// What is wrong, and with which entry.
        reason: String,
    },

    /// The update of a tensor depends on other tensors, which may be on other ranks.
    #[error(
        "{optimizer} updates a tensor in a way that depends on all it meets, which is one rank's shard (seen on trial \
         tensors: {together:?} together, {alone:?} with one optimizer each): if it clips by the global norm, hand it the norm over \
         all ranks, `let norm = clip.norm();` and `ZeroOptimizer::new(clip, ..)?.with_norm(move |value| norm.provide(value))`; \
         otherwise it trains without ranks only"
    )]
    Coupled {
        /// Type of the optimizer.
        optimizer: String,
        /// The trial tensors, updated by one optimizer.
        together: Vec<f32>,
        /// The same, each updated by an optimizer of its own.
        alone: Vec<f32>,
    },

    /// A layer inside the sharded optimizer that decides about whole steps: there it sees one rank's shards.
    #[error(
        "a {layer} is inside the ZeroOptimizer: put it outside, as in `scaler.wrap(MultiSteps::new(zero, accumulation)?)`"
    )]
    LayerInside {
        /// Which one.
        layer: &'static str,
    },

    /// An optimizer that cannot be tried.
    #[error(
        "clones of {optimizer} share what their updates depend on, so that a trial with clones cannot show whether \
         ranks would update as one: keep such state in the optimizer itself, and accumulation outside of the ZeroOptimizer"
    )]
    SharedState {
        /// Type of the optimizer.
        optimizer: String,
    },
}
