//! Activation recomputation. Only this file and [`Activations`] depend on it.

use std::cell::Cell;
use std::fmt;
use std::fs;
use std::path::Path;
use std::str::FromStr;

use burn::tensor::backend::AutodiffBackend;
use burn::train::{LearningComponentsTypes, SupervisedTraining};
use burn_checkpoint::plot::MemoryPlot;
use burn_checkpoint::{InstalledBudget, MemoryBudget, RematMetric, RematStats, trace};
use serde::{Deserialize, Serialize};

use super::accumulation::rehearsal;
use super::error::GptError;
use super::model::Activations;
use super::precision::Precision;
use super::settings::Settings;

/// What `--checkpoint` chooses from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Checkpoint {
    /// Activations stay in memory.
    #[default]
    None,
    /// The activations of a block are dropped at its end and computed once more in backward.
    Block,
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
    /// What becomes of the activations of a block.
    pub fn activations(self) -> Activations {
        match self {
            Self::Block => Activations::Recompute,
            Self::KeepCompute => Activations::KeepCompute,
            Self::Offload => Activations::Offload,
            Self::None | Self::BudgetMib(_) | Self::BudgetPercent(_) => Activations::Keep,
        }
    }

    pub(crate) fn budget(self) -> Option<MemoryBudget> {
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
            Self::KeepCompute => f.write_str("keep-compute"),
            Self::Offload => f.write_str("offload"),
            Self::BudgetMib(mebibytes) => write!(f, "budget={mebibytes}"),
            Self::BudgetPercent(percent) => write!(f, "budget={percent}%"),
        }
    }
}

impl FromStr for Checkpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const EXPECTED: &str =
            "expected none, block, keep-compute, offload, budget=MIB or budget=1% to budget=100%";
        let budget = || {
            let amount = text.strip_prefix("budget=")?;
            match amount.strip_suffix('%') {
                Some(percent) => percent
                    .parse()
                    .ok()
                    .filter(|percent| (1..=100).contains(percent))
                    .map(Self::BudgetPercent),
                None => amount
                    .parse()
                    .ok()
                    .filter(|mebibytes| (1..=u64::MAX >> 20).contains(mebibytes))
                    .map(Self::BudgetMib),
            }
        };
        match text {
            "none" => Ok(Self::None),
            "block" => Ok(Self::Block),
            "keep-compute" => Ok(Self::KeepCompute),
            "offload" => Ok(Self::Offload),
            _ => budget().ok_or_else(|| EXPECTED.to_owned()),
        }
    }
}

impl TryFrom<String> for Checkpoint {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Checkpoint> for String {
    fn from(checkpoint: Checkpoint) -> Self {
        checkpoint.to_string()
    }
}

/// The budget for activations on this thread, in force until this is dropped.
pub struct Recompute {
    budget: Option<InstalledBudget>,
}

impl Recompute {
    /// Puts a budget into force on this thread, if there is one, and starts to count recomputation.
    pub fn install(checkpoint: Checkpoint) -> Self {
        RematStats::reset_thread();
        Self {
            budget: checkpoint.budget().map(MemoryBudget::install),
        }
    }

    /// Shows the memory of activations and how much was recomputed or uploaded, unless all are kept.
    pub fn watch<LC: LearningComponentsTypes>(
        checkpoint: Checkpoint,
        training: SupervisedTraining<LC>,
    ) -> SupervisedTraining<LC> {
        if checkpoint == Checkpoint::None {
            return training;
        }
        let metrics = [
            RematMetric::peak_bytes(),
            RematMetric::replayed_operations(),
        ];
        metrics
            .into_iter()
            .fold(training, SupervisedTraining::metric_train_numeric)
    }

    /// The limit of a budget; `None` without one, and while a fraction is measured.
    pub fn limit_bytes(&self) -> Option<u64> {
        let limits = self.budget.as_ref()?.limit_bytes();
        limits.first().copied().flatten()
    }

    /// What came back since this was installed.
    pub fn replayed(&self) -> Replayed {
        let stats = RematStats::of_thread();
        Replayed {
            operations: stats.replayed_operations,
            bytes: stats.replayed_bytes,
            uploaded_bytes: stats.uploaded_bytes,
        }
    }
}

/// Activations that were not kept and were recomputed or uploaded for backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replayed {
    /// Operations that were computed once more.
    pub operations: u64,
    /// Bytes of their results.
    pub bytes: u64,
    /// Bytes that came back from the host.
    pub uploaded_bytes: u64,
}

/// Draws what a step with micro-batches of this size holds in memory, one operation after the other, into an SVG file.
///
/// # Errors
///
/// [`GptError::Io`].
pub fn plot_memory<B: AutodiffBackend>(
    file: &Path,
    settings: &Settings,
    precision: &Precision,
    device: &B::Device,
    micro_batch: usize,
) -> Result<(), GptError> {
    // Under a budget all tensors are seen. This one, of any size, is in force where the options bring none.
    let _all = MemoryBudget::bytes(u64::MAX).install();
    let recording = trace::record();
    let limit_bytes = Cell::new(None);
    rehearsal::<B>(settings, precision, device, micro_batch, |recompute| {
        // The last step is drawn, and the limit that it kept.
        recording.take();
        limit_bytes.set(recompute.limit_bytes());
    });
    let events = recording.finish();
    let checkpoint = settings.options.checkpoint;
    let title = format!("A step of {micro_batch} sequences, --checkpoint {checkpoint}");
    let mut plot = MemoryPlot::new(&events).title(title);
    if let Some(bytes) = limit_bytes.get() {
        plot = plot.budget_bytes(bytes);
    }
    fs::write(file, plot.svg()).map_err(GptError::io("write", file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_written_as_it_is_read() {
        for text in [
            "none",
            "block",
            "keep-compute",
            "offload",
            "budget=300",
            "budget=40%",
        ] {
            let checkpoint: Checkpoint = text.parse().unwrap();
            assert_eq!(checkpoint.to_string(), text);
            let json = serde_json::to_string(&checkpoint).unwrap();
            assert_eq!(json, format!("\"{text}\""));
            assert_eq!(
                serde_json::from_str::<Checkpoint>(&json).unwrap(),
                checkpoint
            );
        }
    }

    #[test]
    fn what_is_no_budget_is_refused() {
        for text in [
            "",
            "budget",
            "budget=",
            "budget=0",
            "budget=0%",
            "budget=101%",
            "budget=1.5",
            "blocks",
        ] {
            let error = text.parse::<Checkpoint>().unwrap_err();
            assert!(error.contains("budget=MIB"), "{text}: {error}");
        }
    }
}
