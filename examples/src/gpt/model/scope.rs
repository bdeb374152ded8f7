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
    /// The embedding of the tokens. Its scope keeps dropout's draw as bits, and the residual stream begins with it: a tensor can only be
    /// moved to the host if a scope has recorded it from its beginning.
    pub(super) fn of_embedding<R: Outputs>(self, forward: impl FnOnce() -> R) -> R {
        self.scope("embedding", forward)
    }

    /// The forward pass of the block with this number.
    pub(super) fn of_block<R: Outputs>(self, block: usize, forward: impl FnOnce() -> R) -> R {
        self.scope(format!("block {block}"), forward)
    }

    fn scope<R: Outputs>(self, label: impl Into<String>, forward: impl FnOnce() -> R) -> R {
        let policy = match self {
            Self::Keep => return forward(),
            Self::Recompute => Policy::Recompute,
            Self::KeepCompute => Policy::KeepCompute,
            Self::Offload => Policy::Offload,
        };
        checkpoint_labelled(label, policy, forward)
    }
}
