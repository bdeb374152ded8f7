//! What was found, and what was tried for it.

use core::fmt;

use serde::{Deserialize, Serialize};

use super::{MicroBatchSearch, Partition};
use crate::{AccumConfig, AccumError, Normalization};

/// The largest micro-batch that fits, and how it was found. Displayed it is a table of all trials.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MicroBatchFound {
    /// What was looked for.
    pub search: MicroBatchSearch,
    /// The micro-batches of a window.
    pub partition: Partition,
    /// The most bytes in use with a micro-batch of this size, measured.
    pub peak_bytes: u64,
    /// The largest size that was measured to fit, even if the normalization does not allow it for
    /// this effective batch.
    pub largest_fitting: usize,
    /// Bytes in use that do not depend on the size: parameters, gradients, optimizer, and all else
    /// that the process holds. Computed from the largest size that fits and a smaller one.
    pub fixed_bytes: f64,
    /// Bytes that each item adds.
    pub item_bytes: f64,
    /// Every trial, in order.
    pub trials: Vec<Trial>,
}

/// One size that was tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trial {
    /// The size.
    pub micro_batch: usize,
    /// Its result.
    pub outcome: TrialOutcome,
}

/// The result of a trial.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrialOutcome {
    /// It stayed below the limit and its margin.
    Fits {
        /// The most bytes in use.
        peak_bytes: u64,
    },
    /// It took more, but the step succeeded.
    Exceeds {
        /// The most bytes in use.
        peak_bytes: u64,
    },
    /// The step failed: out of memory, or for another reason that it names.
    Failed {
        /// Its panic, its error or that of the device.
        reason: String,
    },
}

impl TrialOutcome {
    /// The most bytes in use, if the step succeeded.
    pub fn peak_bytes(&self) -> Option<u64> {
        match self {
            Self::Fits { peak_bytes } | Self::Exceeds { peak_bytes } => Some(*peak_bytes),
            Self::Failed { .. } => None,
        }
    }
}

impl MicroBatchFound {
    /// The window for [`Update::accumulate`](burn_update::Update::accumulate).
    ///
    /// # Errors
    ///
    /// [`AccumError::UnevenMean`], only for a partition that was set by hand:
    /// [`find_micro_batch`](super::find_micro_batch) never returns such a one.
    pub fn config(&self) -> Result<AccumConfig, AccumError> {
        self.partition.config(self.search.normalization)
    }

    /// The largest size that is predicted to fit, even if the normalization does not allow it for
    /// this effective batch.
    pub fn predicted_most(&self) -> usize {
        let free = self.search.usable_bytes() as f64 - self.fixed_bytes;
        let most = (free / self.item_bytes) as usize;
        let most = if self.item_bytes > 0.0 {
            most
        } else {
            usize::MAX
        };
        let failed = self.trials.iter().filter_map(|trial| match trial.outcome {
            TrialOutcome::Fits { .. } => None,
            _ => Some(trial.micro_batch - 1),
        });
        let most = most.min(self.search.effective_batch);
        failed.fold(most, usize::min).max(self.largest_fitting)
    }
}

impl fmt::Display for MicroBatchFound {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MicroBatchSearch {
            effective_batch,
            limit_bytes,
            margin,
            normalization,
            ..
        } = self.search;
        writeln!(
            out,
            "effective batch {effective_batch} below {}, {:.0} % of it free",
            mebibytes(limit_bytes),
            margin * 100.0
        )?;
        writeln!(
            out,
            "{:>11}  {:>12}  {:>8}",
            "micro-batch", "peak", "of limit"
        )?;
        for trial in &self.trials {
            write_trial(out, trial, limit_bytes)?;
        }
        let [fixed, item] =
            [self.fixed_bytes, self.item_bytes].map(|bytes| mebibytes(bytes as u64));
        writeln!(out, "fixed part {fixed}, an item {item}")?;

        let steps = self.partition.steps();
        let micro_batch = self.partition.micro_batch();
        let last = match self.partition.is_even() {
            true => String::new(),
            false => format!(", the last of {}", self.partition.last()),
        };
        writeln!(out, "window: {steps} x {micro_batch}{last}")?;
        let most = self.predicted_most();
        if normalization == Normalization::Mean && most > micro_batch {
            writeln!(
                out,
                "up to {most} would fit, but do not divide {effective_batch}: for that use Normalization::Tokens, or \
                 another effective batch"
            )?;
        }
        Ok(())
    }
}

fn write_trial(out: &mut fmt::Formatter<'_>, trial: &Trial, limit_bytes: u64) -> fmt::Result {
    write!(out, "{:>11}  ", trial.micro_batch)?;
    let verdict = match &trial.outcome {
        TrialOutcome::Fits { .. } => "fits",
        TrialOutcome::Exceeds { .. } => "too much",
        TrialOutcome::Failed { reason } => {
            let first = reason.lines().next().unwrap_or_default();
            return writeln!(out, "{:>12}  {:>8}  failed: {first}", "", "");
        }
    };
    let peak_bytes = trial.outcome.peak_bytes().unwrap_or_default();
    let share = 100.0 * peak_bytes as f64 / limit_bytes as f64;
    writeln!(
        out,
        "{:>12}  {share:>6.1} %  {verdict}",
        mebibytes(peak_bytes)
    )
}

/// In MiB.
pub(crate) fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
