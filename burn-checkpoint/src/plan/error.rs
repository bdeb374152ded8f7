//! What can go wrong with a plan, with the values.

use thiserror::Error;

/// Errors of planning and of carrying a plan out.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// No nesting of scopes fits the limit.
    #[error(
        "no schedule of these {blocks} blocks fits {limit_bytes} bytes: at least {least_bytes} are needed; \
         split the largest block, make the micro-batch smaller or offload"
    )]
    DoesNotFit {
        /// Number of blocks.
        blocks: usize,
        /// The refused limit.
        limit_bytes: u64,
        /// The smallest limit that [`plan`](super::plan) accepts.
        least_bytes: u64,
    },
    /// The plan is for a longer or shorter chain.
    #[error("the plan is for {planned} blocks, but the chain has {blocks}")]
    Length {
        /// Blocks that the plan knows.
        planned: usize,
        /// Blocks there are.
        blocks: usize,
    },
    /// A profile of tensors that are not counted, because their backend has no `Remat`.
    #[error(
        "block {block} cannot be measured: its backend has no `Remat` in it; use `Autodiff<Remat<B>>` in place of \
         `Autodiff<B>`"
    )]
    NoRemat {
        /// The block.
        block: usize,
    },
    /// A plan, read by serde, whose blocks are not numbered from 0 in their order.
    #[error(
        "block {found} of a plan stands where block {expected} must: a plan is a list such as [0, [1, 2], 3]"
    )]
    Order {
        /// The number that the block must have.
        expected: usize,
        /// The number that it has.
        found: usize,
    },
}
