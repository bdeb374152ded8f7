//! Keeps, recomputes or offloads the activations of a block between forward and backward.

use burn_checkpoint::{Outputs, Policy, checkpoint_labelled};
use serde::{Deserialize, Serialize};

/// Where backward gets a block's activations from. Without `Remat` below autodiff they are always kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activations {
    /// In memory.
    #[default]
    Keep,
    /// Computed once more.
    Recompute,
    /// The results of matrix products in memory, the rest computed once more.
    KeepCompute,
    /// On the host.
    Offload,
}

impl Activations {
    /// The embedding of the tokens. Its scope saves no memory, but the residual stream begins with it, and a tensor can only be moved
    /// to the host if a scope has recorded it from its beginning.
    pub(super) fn of_embedding<R: Outputs>(self, forward: impl FnOnce() -> R) -> R {
        match self {
            Self::Offload => checkpoint_labelled("embedding", Policy::Offload, forward),
            Self::Keep | Self::Recompute | Self::KeepCompute => forward(),
        }
    }

    /// The forward pass of the block with this number.
    pub(super) fn of_block<R: Outputs>(self, block: usize, forward: impl FnOnce() -> R) -> R {
        let policy = match self {
            Self::Keep => return forward(),
            Self::Recompute => Policy::Recompute,
            Self::KeepCompute => Policy::KeepCompute,
            Self::Offload => Policy::Offload,
        };
        checkpoint_labelled(format!("block {block}"), policy, forward)
    }
}
