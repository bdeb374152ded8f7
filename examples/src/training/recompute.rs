//! What becomes of activations until backward.

use std::fmt;
use std::str::FromStr;

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn_checkpoint::{
    CheckpointedUnits, MemoryBudget, Outputs, Policy, RematError, checkpoint_labelled,
    checkpoint_units,
};
use serde::{Deserialize, Serialize};

/// What `--checkpoint` chooses from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Checkpoint {
    /// Activations stay in memory.
    #[default]
    None,
    /// The activations of a block are dropped at its end and computed once more in backward.
    Block,
    /// As `Block`, by scopes that begin and end by themselves, of blocks whose code is not changed.
    Units,
    /// As `Block`, but the results of matrix products are kept.
    KeepCompute,
    /// The activations of a block are moved to the host at its end.
    Offload,
    /// Activations beyond this many mebibytes are dropped, the cheapest to compute once more first.
    BudgetMib(u64),
    /// As `BudgetMib`, in percent of the memory of a step without a budget.
    BudgetPercent(u8),
}

impl Checkpoint {
    /// Runs a part of the forward pass in its scope. Without `Remat` below autodiff all its
    /// activations are kept.
    pub fn scope<R: Outputs>(self, label: &str, forward: impl FnOnce() -> R) -> R {
        let policy = match self {
            Self::Block => Policy::Recompute,
            Self::KeepCompute => Policy::KeepCompute,
            Self::Offload => Policy::Offload,
            Self::None | Self::Units | Self::BudgetMib(_) | Self::BudgetPercent(_) => {
                return forward();
            }
        };
        checkpoint_labelled(label, policy, forward)
    }

    /// The model with the scopes of its units, if they are chosen, and these. An optimizer that is not
    /// burn-zero's has to keep its parameters in them: [`CheckpointedUnits::wrap`].
    ///
    /// # Errors
    ///
    /// Those of [`checkpoint_units`].
    pub fn with_units<B: AutodiffBackend, M: AutodiffModule<B>>(
        self,
        model: M,
    ) -> Result<(M, Option<CheckpointedUnits>), RematError> {
        if self != Self::Units {
            return Ok((model, None));
        }
        let (model, units) = checkpoint_units::<B, M>(model)?;
        Ok((model, Some(units)))
    }

    /// Why the units of a model of so many blocks could have no scopes, if they are chosen.
    pub fn refused_of(self, blocks: usize) -> Option<String> {
        let is_refused = self == Self::Units && blocks < 2;
        is_refused.then(|| format!("{self} needs two blocks or more: --layers is {blocks}"))
    }

    /// The limit for activations, to be [installed](MemoryBudget::install) before the ranks begin.
    pub fn budget(self) -> Option<MemoryBudget> {
        match self {
            Self::BudgetMib(mebibytes) => Some(MemoryBudget::bytes(mebibytes << 20)),
            Self::BudgetPercent(percent) => {
                let budget = MemoryBudget::fraction(f64::from(percent) / 100.0);
                Some(budget.expect("between 1 and 100 percent"))
            }
            _ => None,
        }
    }
}

impl fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Block => f.write_str("block"),
            Self::Units => f.write_str("units"),
            Self::KeepCompute => f.write_str("keep-compute"),
            Self::Offload => f.write_str("offload"),
            Self::BudgetMib(mebibytes) => write!(f, "budget={mebibytes}"),
            Self::BudgetPercent(percent) => write!(f, "budget={percent}%"),
        }
    }
}

impl FromStr for Checkpoint {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        let budget = |amount: &str| match amount.strip_suffix('%') {
            Some(percent) => match percent.parse() {
                Ok(percent @ 1..=100) => Some(Self::BudgetPercent(percent)),
                _ => None,
            },
            None => match amount.parse() {
                Ok(mebibytes @ 1..=MOST_MEBIBYTES) => Some(Self::BudgetMib(mebibytes)),
                _ => None,
            },
        };
        let found = match text {
            "none" => Some(Self::None),
            "block" => Some(Self::Block),
            "units" => Some(Self::Units),
            "keep-compute" => Some(Self::KeepCompute),
            "offload" => Some(Self::Offload),
            _ => text.strip_prefix("budget=").and_then(budget),
        };
        found.ok_or(
            "expected none, block, units, keep-compute, offload, budget=MIB or budget=1% to budget=100%",
        )
    }
}

/// Their bytes fit into a `u64`.
const MOST_MEBIBYTES: u64 = u64::MAX >> 20;
