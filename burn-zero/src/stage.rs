//! What is sharded.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What is sharded over ranks: the stages of ZeRO (Rajbhandari et al., arXiv 1910.02054, section 5).
///
/// Written to files as its number, as in DeepSpeed's JSON.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(try_from = "u8", into = "u8")]
#[non_exhaustive]
pub enum Stage {
    /// 0: nothing; plain data parallel.
    #[default]
    DataParallel,
    /// 1: optimizer state.
    OptimizerState,
    /// 2: optimizer state and gradients.
    Gradients,
}

impl Stage {
    /// All there are, ascending.
    pub const ALL: [Self; 3] = [Self::DataParallel, Self::OptimizerState, Self::Gradients];

    /// Its number in the paper and in DeepSpeed.
    pub fn number(self) -> u8 {
        match self {
            Self::DataParallel => 0,
            Self::OptimizerState => 1,
            Self::Gradients => 2,
        }
    }

    /// Whether the optimizer state is sharded.
    pub fn shards_optimizer_state(self) -> bool {
        self >= Self::OptimizerState
    }

    /// Whether the gradients are sharded.
    pub fn shards_gradients(self) -> bool {
        self >= Self::Gradients
    }
}

impl TryFrom<u8> for Stage {
    type Error = String;

    fn try_from(number: u8) -> Result<Self, Self::Error> {
        let found = Self::ALL.into_iter().find(|stage| stage.number() == number);
        found.ok_or_else(|| {
            format!("ZeRO stage {number}, but there are 0, 1 and 2; stage 3 comes later")
        })
    }
}

impl From<Stage> for u8 {
    fn from(stage: Stage) -> Self {
        stage.number()
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = match self {
            Self::DataParallel => "plain data parallel",
            Self::OptimizerState => "optimizer state sharded",
            Self::Gradients => "optimizer state and gradients sharded",
        };
        write!(formatter, "ZeRO stage {} ({shared})", self.number())
    }
}
