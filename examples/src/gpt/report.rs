//! The figures of a run, as a table and as JSON.

use std::fmt;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::accumulation::Found;
use super::error::GptError;
use super::history::EpochLosses;
use super::options::Options;
use super::ranks::{Expected, RankFigures};
use super::recompute::Replayed;

/// The content of `report.json`.
///
/// Losses, skipped steps and sample are the same on every run with the same options, text and machine; speed and memory
/// are measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Mean training loss of the last epoch, in nats a byte.
    pub train_loss: f64,
    /// Loss on the held-out text after the last step, in nats a byte.
    pub valid_loss: f64,
    /// Bytes of text trained on in a second, without validation and records; of this process only when it resumed a run.
    pub tokens_per_second: f64,
    /// The peak of this process's resident memory on the host; `None` where the system does not report it.
    pub peak_bytes: Option<u64>,
    /// Micro-batches that were skipped because a gradient was not finite.
    pub skipped_steps: u64,
    /// Activations that were recomputed or uploaded for backward, as `--checkpoint` chose.
    pub replayed: Replayed,
    /// Windows in total: updates, had nothing been skipped.
    pub steps: usize,
    /// Updates that were taken.
    pub updates: u64,
    /// Sequences in a micro-batch of a rank.
    pub micro_batch: usize,
    /// Micro-batches of a rank in an update.
    pub window: usize,
    /// Sequences in an update, over all ranks.
    pub effective_batch: usize,
    /// How the micro-batch was found, if it was looked for.
    pub found: Option<Found>,
    /// `f32`, `bf16` or `f16`: what `--amp` chose.
    pub precision: String,
    /// What `--backend` was.
    pub backend: String,
    /// Trained numbers.
    pub parameters: usize,
    /// Bytes of text trained on, repetitions included.
    pub tokens: usize,
    /// Bytes of the text, the held-out part included.
    pub text_bytes: usize,
    /// Bytes of the held-out part.
    pub valid_bytes: usize,
    /// ZeRO stage: what `--zero` chose.
    pub stage: u8,
    /// What a rank was expected to hold and send.
    pub expected: Expected,
    /// What each rank sent and held; of this process only when it resumed a run.
    pub ranks: Vec<RankFigures>,
    /// Losses of every epoch; of this process only when it resumed a run.
    pub epochs: Vec<EpochLosses>,
    /// Text that the model wrote.
    pub sample: String,
    /// All options, defaults filled in.
    pub options: Options,
}

impl Report {
    /// Writes it as JSON.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn write(&self, file: &Path) -> Result<(), GptError> {
        let json = serde_json::to_string_pretty(self).expect("a report is plain data");
        fs::write(file, json + "\n").map_err(GptError::io("write", file))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = self.peak_bytes.map_or("unknown".into(), |bytes| {
            format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20))
        });
        let rows = [
            ("training loss", format!("{:.4} nats/byte", self.train_loss)),
            (
                "validation loss",
                format!("{:.4} nats/byte", self.valid_loss),
            ),
            (
                "tokens per second",
                format!("{:.0}", self.tokens_per_second),
            ),
            ("peak resident memory", memory),
            (
                "skipped steps",
                format!("{} of {}", self.skipped_steps, self.steps * self.window),
            ),
            (
                "effective batch",
                match self.ranks.len() {
                    1 => format!(
                        "{} ({} x {})",
                        self.effective_batch, self.window, self.micro_batch
                    ),
                    ranks => format!(
                        "{} ({} x {} on {ranks} ranks)",
                        self.effective_batch, self.window, self.micro_batch
                    ),
                },
            ),
            ("updates", self.updates.to_string()),
            ("checkpoint", self.options.checkpoint.to_string()),
            ("operations replayed", self.replayed.operations.to_string()),
            ("precision", self.precision.clone()),
            ("backend", self.backend.clone()),
            ("parameters", self.parameters.to_string()),
        ];
        for (name, value) in rows {
            writeln!(out, "{name:<22}{value}")?;
        }
        if self.ranks.len() == 1 {
            return Ok(());
        }
        writeln!(
            out,
            "ZeRO stage {}        rank   sent elements an update   in bytes    bytes in all   optimizer state   gradients",
            self.stage
        )?;
        for (rank, figures) in self.ranks.iter().enumerate() {
            let updates = figures.updates.max(1);
            writeln!(
                out,
                "{:>24}{:>26}{:>11}{:>16}{:>18}{:>12}",
                rank,
                figures.sent_elements / updates,
                figures.sent_data_bytes / updates,
                figures.sent_bytes,
                figures.state_bytes,
                figures.gradient_bytes,
            )?;
        }
        let expected = &self.expected;
        writeln!(
            out,
            "{:>24}{:>26}{:>11}{:>16}{:>18}{:>12}",
            "estimate",
            expected.0.sent_elements,
            expected.0.sent_bytes,
            "",
            expected.0.optimizer_bytes + expected.0.host_bytes,
            expected.gradient_bytes(),
        )
    }
}

/// The peak of this process's resident memory, which only Linux records.
pub fn peak_bytes() -> Option<u64> {
    parse_peak(&fs::read_to_string("/proc/self/status").ok()?)
}

fn parse_peak(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::settings::Settings;
    use clap::Parser;

    fn report() -> Report {
        let settings = Settings::new(&Options::parse_from(["gpt"]), 1).unwrap();
        Report {
            train_loss: 1.25,
            valid_loss: 1.5,
            tokens_per_second: 6789.4,
            peak_bytes: Some(300 << 20),
            skipped_steps: 2,
            stage: 2,
            expected: Expected::of(burn_zero::ModelStates::adam(12_345), &settings.job),
            ranks: vec![RankFigures::default()],
            replayed: Replayed {
                operations: 17,
                ..Default::default()
            },
            steps: 100,
            updates: 100,
            micro_batch: 2,
            window: 4,
            effective_batch: 8,
            found: None,
            precision: "f16".into(),
            backend: "flex".into(),
            parameters: 12_345,
            tokens: 102_400,
            text_bytes: 5_000,
            valid_bytes: 500,
            epochs: vec![EpochLosses {
                epoch: 1,
                train: Some(1.25),
                valid: Some(1.5),
            }],
            sample: "/// a \"sample\"\n".into(),
            options: settings.options,
        }
    }

    #[test]
    fn comes_back_from_its_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("report.json");
        report().write(&file).unwrap();
        let read: Report = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        assert_eq!(read, report());
    }

    #[test]
    fn the_table_has_every_figure() {
        assert_eq!(
            report().to_string(),
            "training loss         1.2500 nats/byte\n\
             validation loss       1.5000 nats/byte\n\
             tokens per second     6789\n\
             peak resident memory  300 MiB\n\
             skipped steps         2 of 400\n\
             effective batch       8 (4 x 2)\n\
             updates               100\n\
             checkpoint            none\n\
             operations replayed   17\n\
             precision             f16\n\
             backend               flex\n\
             parameters            12345\n"
        );
    }

    #[test]
    fn several_ranks_are_beside_the_estimate() {
        let figures = RankFigures {
            updates: 100,
            sent_elements: 1_234_500,
            sent_data_bytes: 4_938_000,
            sent_bytes: 5_000_000,
            updated_elements: 6_173,
            state_bytes: 49_384,
            gradient_bytes: 49_380,
        };
        let options = Options::parse_from(["gpt", "--zero", "2"]);
        let settings = Settings::new(&options, 2).unwrap();
        let report = Report {
            ranks: vec![figures; 2],
            expected: Expected::of(burn_zero::ModelStates::adam(12_345), &settings.job),
            ..report()
        };
        let text = report.to_string();
        assert!(
            text.ends_with(
                "ZeRO stage 2        rank   sent elements an update   in bytes    bytes in all   optimizer state   gradients\n\
                 \x20                      0                     12345      49380         5000000             49384       49380\n\
                 \x20                      1                     12345      49380         5000000             49384       49380\n\
                 \x20               estimate                     12346      49384                             49384       49380\n"
            ),
            "{text}"
        );
        assert!(text.contains("8 (4 x 2 on 2 ranks)"), "{text}");
    }

    #[test]
    fn the_peak_is_read_as_linux_writes_it() {
        let status = "VmPeak:\t  999 kB\nVmHWM:\t    2048 kB\nVmRSS:\t 1 kB\n";
        assert_eq!(parse_peak(status), Some(2 << 20));
        assert_eq!(parse_peak("VmRSS:\t 1 kB\n"), None);
        #[cfg(target_os = "linux")]
        assert!(peak_bytes().unwrap() > 1 << 20);
    }
}
