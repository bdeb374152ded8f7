//! Where optimizer state lives.

use serde::{Deserialize, Serialize};

/// Where the optimizer state of a rank's shard lives and is updated (ZeRO-Offload, Ren et al., arXiv 2101.06840).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum OptimizerOffload {
    /// On the device.
    #[default]
    None,
    /// In host memory, updated by the host's processor.
    Host {
        /// The part of the elements that is offloaded, 0 to 1; the rest stays on the device.
        ratio: f64,
    },
}

impl OptimizerOffload {
    /// The part of the elements that is offloaded.
    pub fn ratio(&self) -> f64 {
        match self {
            Self::None => 0.0,
            Self::Host { ratio } => *ratio,
        }
    }
}
