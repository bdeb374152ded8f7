//! Errors of the strategy.

use thiserror::Error;

use super::Loaders;

/// Errors of [`ZeroStrategy`](crate::ZeroStrategy), all but the last two before the first step.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum StrategyError {
    /// The Learner's optimizer contains no `ZeroOptimizer`.
    #[error(
        "ZeroStrategy trains a Learner with one `ZeroOptimizer::in_learner(optimizer, settings)`, alone or inside of other \
         wrappers, but {optimizer} has {found} of them"
    )]
    NoZeroOptimizer {
        /// Type of the Learner's optimizer.
        optimizer: &'static str,
        /// How many were found.
        found: usize,
    },

    /// Burn's own accumulation does not support ranks.
    #[error(
        "the Learner accumulates gradients itself (`grads_accumulation({steps})`), which knows nothing of ranks: use burn-accum's \
         `MultiSteps` around the ZeroOptimizer"
    )]
    SecondAccumulation {
        /// Its micro-batches.
        steps: usize,
    },

    /// The data cannot be cut into equal parts.
    #[error(
        "{items} items cannot be cut into {ranks} equal parts, and `Uneven::Refuse` asks for that: choose `Uneven::Repeat` or \
         `Uneven::Drop`"
    )]
    Uneven {
        /// Items of the training data.
        items: usize,
        /// Parts.
        ranks: usize,
    },

    /// Processes that load their own parts have different numbers of items.
    #[error(
        "the processes have {items:?} items to train on, rank by rank, and `Uneven::Refuse` asks for equally many: load equal parts, or \
         choose `Uneven::Repeat` or `Uneven::Drop`"
    )]
    UnevenParts {
        /// Items of each rank.
        items: Vec<usize>,
    },

    /// A process that loads its own part has none.
    #[error(
        "rank {rank} has no items to train on, but others have {items:?}, rank by rank: every process needs a part"
    )]
    NoItems {
        /// The rank.
        rank: usize,
        /// Items of each rank.
        items: Vec<usize>,
    },

    /// Validation data is in parts, and no rank has all of it.
    #[error(
        "each process has its part of the validation data (`Loaders::Split`), and rank 0 sees its own only: add `.sharing_items()`, or \
         load all of the validation data everywhere and say `Loaders::TrainSplit`"
    )]
    ItemsStay,

    /// Ranks that are threads share one loader.
    #[error(
        "ranks that are threads share one loader, which the strategy cuts: `Loaders::{loaders:?}` is for `ZeroStrategy::process`, where \
         each process loads its own part"
    )]
    OneLoader {
        /// The setting.
        loaders: Loaders,
    },

    /// As many devices as ranks are needed.
    #[error("there are {devices} devices for {ranks} ranks: name one for each")]
    Devices {
        /// Devices that were named.
        devices: usize,
        /// Ranks.
        ranks: usize,
    },

    /// A loader gave fewer batches than those of the other ranks.
    #[error(
        "rank {rank} has no batch left after {steps} steps of epoch {epoch}, but others have, and `Uneven::Refuse` asks for equally \
         many"
    )]
    RanOut {
        /// The rank.
        rank: usize,
        /// Steps of the epoch.
        steps: usize,
        /// The epoch.
        epoch: usize,
    },

    /// An item of another rank cannot be read.
    #[error("an item of rank {rank} cannot be read: {reason}")]
    Item {
        /// The rank.
        rank: usize,
        /// What is wrong.
        reason: String,
    },
}
