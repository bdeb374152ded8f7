//! The stages of ZeRO.

use serde::{Deserialize, Serialize};

/// What ranks do not all hold ("ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5). All
/// stages give the same parameters, bit for bit; elements that a rank sends a step with `P` parameters and `N` ranks are
/// `2 P (N - 1) / N` in all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "u8", try_from = "u8")]
pub enum Stage {
    /// Nothing is sharded: plain data parallel training. Each rank holds all.
    Zero,
    /// The optimizer's state is.
    #[default]
    One,
    /// The gradients are, too: each leaves for its shard during backward. Needs a [`Sharded`](crate::Sharded) backend.
    Two,
}

impl From<Stage> for u8 {
    fn from(stage: Stage) -> Self {
        match stage {
            Stage::Zero => 0,
            Stage::One => 1,
            Stage::Two => 2,
        }
    }
}

impl TryFrom<u8> for Stage {
    type Error = super::ShardingError;

    fn try_from(stage: u8) -> Result<Self, Self::Error> {
        match stage {
            0 => Ok(Self::Zero),
            1 => Ok(Self::One),
            2 => Ok(Self::Two),
            _ => Err(super::ShardingError::UnknownStage { stage }),
        }
    }
}
