//! The results, as JSON and as a table.

use std::fmt;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::BenchError;
use super::memory::{Memory, Place};
use super::options::Workload;
use super::statistics::Quartiles;
use super::table::{markdown, mebibytes};

/// What `--output` writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchReport {
    /// Name and version.
    pub framework: String,
    /// The bare backend's name.
    pub backend: String,
    /// The device's name in the backend.
    pub device: String,
    /// Whether this workspace was compiled with optimization: times without it mean little.
    pub optimized: bool,
    /// What a step works on.
    pub workload: Workload,
    /// Trained numbers; nothing where no setting could be measured.
    pub parameters: Option<usize>,
    /// The setting that ratios are to: the first that could be measured.
    pub reference: Option<String>,
    /// One for each setting, in the order in which they were asked for.
    pub results: Vec<SettingResult>,
}

/// What became of a setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SettingResult {
    /// Its name.
    pub setting: String,
    /// What became of it.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What can become of a setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It was measured.
    Measured(Figures),
    /// The device cannot do it: why.
    Refused(String),
    /// It broke off: why.
    Failed(String),
}

/// What was measured of a setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Time of a whole step.
    pub milliseconds: Quartiles,
    /// Time of a step divided by that of the reference's step in the same round; `None` with a
    /// single setting.
    pub ratio: Option<Quartiles>,
    /// Tokens trained on in a second, by the median step.
    pub tokens_per_second: f64,
    /// Loss of the last step that was timed, in nats per token.
    pub loss: f64,
    /// Steps, warm-up included, that were skipped because a gradient was not finite.
    pub skipped_steps: u64,
    /// Time of the first step, in which kernels are compiled and chosen.
    pub first_step_seconds: Option<f64>,
    /// The peak in a few steps; only if a setting was alone in its process.
    pub memory: Option<Memory>,
    /// The peak of a few steps beyond what was in use before them (parameters, optimizer):
    /// activations, gradients, temporaries. It counts tensors on a GPU, and the whole heap on the
    /// CPU.
    #[serde(default)]
    pub step_bytes: Option<u64>,
    /// Operations that a step computed once more; nothing without burn-checkpoint.
    #[serde(default)]
    pub replayed_operations: Option<u64>,
    /// Whether every loss, and every gradient of a step after the last that was timed, has the
    /// reference's bits.
    #[serde(default)]
    pub same_bits: Option<bool>,
    /// Every step that was timed, in their order.
    pub step_milliseconds: Vec<f64>,
}

impl BenchReport {
    /// The settings that could be measured.
    pub fn measured(&self) -> impl Iterator<Item = (&str, &Figures)> {
        self.results
            .iter()
            .filter_map(|result| match &result.outcome {
                Outcome::Measured(figures) => Some((&*result.setting, figures)),
                _ => None,
            })
    }

    /// Writes it as JSON.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn write(&self, file: &Path) -> Result<(), BenchError> {
        let json = serde_json::to_string_pretty(self).expect("a report is plain data");
        fs::write(file, json + "\n").map_err(BenchError::io("write", file))
    }

    /// Reads what [`write`](Self::write) wrote.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or holds something else.
    pub fn read(file: &Path) -> Result<Self, BenchError> {
        let json = fs::read(file).map_err(BenchError::io("read", file))?;
        serde_json::from_slice(&json).map_err(|source| BenchError::NotResults {
            path: file.to_owned(),
            source,
        })
    }
}

impl fmt::Display for BenchReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Workload {
            layers,
            heads,
            width,
            context,
            batch,
            vocabulary,
            dropout,
        } = self.workload;
        writeln!(
            out,
            "{}, {} on {}{}",
            self.framework,
            self.backend,
            self.device,
            if self.optimized {
                ""
            } else {
                ", without optimization"
            },
        )?;
        writeln!(
            out,
            "{layers} layers, {heads} heads, width {width}, context {context}, batch {batch}, vocabulary {vocabulary}, dropout {dropout}: \
             {} parameters\n",
            self.parameters.unwrap_or_default(),
        )?;
        let to = self.reference.as_deref().unwrap_or("the first");
        let headers = [
            "setting",
            "ms a step",
            &format!("ratio to {to} (quartiles)"),
            "tokens/s",
            "last loss",
            "skipped",
            "first step s",
            "a step's peak",
            &format!("of {to}'s"),
            "replayed",
            &format!("bits of {to}"),
            "peak memory",
        ];
        let reference = self.reference.as_deref();
        let reference_bytes = self
            .measured()
            .find(|(setting, _)| Some(*setting) == reference)
            .and_then(|(_, figures)| figures.step_bytes);
        let rows = self
            .results
            .iter()
            .map(|result| row(result, reference_bytes).to_vec());
        write!(out, "{}", markdown(&headers, rows))
    }
}

const COLUMNS: usize = 12;

fn row(result: &SettingResult, reference_bytes: Option<u64>) -> [String; COLUMNS] {
    let setting = result.setting.clone();
    let without_figures = |what: &str, why: &str| {
        let mut row = <[String; COLUMNS]>::default();
        row[0] = format!("{setting}: {what}: {why}");
        row
    };
    let figures = match &result.outcome {
        Outcome::Measured(figures) => figures,
        Outcome::Refused(why) => return without_figures("refused", why),
        Outcome::Failed(why) => return without_figures("failed", why),
    };
    let ratio = figures.ratio.map(|ratio| ratio.to_string());
    [
        setting,
        format!("{:.2}", figures.milliseconds.median),
        ratio.unwrap_or_default(),
        format!("{:.0}", figures.tokens_per_second),
        format!("{:.4}", figures.loss),
        figures.skipped_steps.to_string(),
        figures
            .first_step_seconds
            .map_or(String::new(), |seconds| format!("{seconds:.1}")),
        figures.step_bytes.map(mebibytes).unwrap_or_default(),
        figures
            .step_bytes
            .zip(reference_bytes)
            .map(|(own, reference)| format!("{:.0} %", 100.0 * own as f64 / reference as f64))
            .unwrap_or_default(),
        figures
            .replayed_operations
            .filter(|&operations| operations > 0)
            .map_or(String::new(), |operations| operations.to_string()),
        match figures.same_bits {
            Some(true) => "all".into(),
            Some(false) => "not all".into(),
            None => String::new(),
        },
        figures.memory.map_or(String::new(), |memory| {
            let place = match memory.place {
                Place::Device => "in use on the device",
                Place::Process => "resident in the process",
            };
            format!("{} {place}", mebibytes(memory.in_use_bytes))
        }),
    ]
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn report() -> BenchReport {
        let figures = |milliseconds: f64| Figures {
            milliseconds: Quartiles::of([milliseconds]),
            ratio: Some(Quartiles::of([milliseconds / 20.0])),
            tokens_per_second: 1e6,
            loss: 5.5,
            skipped_steps: 1,
            first_step_seconds: Some(12.34),
            memory: None,
            step_bytes: None,
            replayed_operations: Some(0),
            same_bits: Some(true),
            step_milliseconds: vec![milliseconds],
        };
        let result = |setting: &str, outcome| SettingResult {
            setting: setting.into(),
            outcome,
        };
        BenchReport {
            framework: "burn 0.21.0".into(),
            backend: "flex".into(),
            device: "Cpu".into(),
            optimized: true,
            workload: Workload {
                layers: 1,
                heads: 2,
                width: 8,
                context: 4,
                batch: 2,
                vocabulary: 11,
                dropout: 0.0,
            },
            parameters: Some(1234),
            reference: Some("bare".into()),
            results: vec![
                result("bare", Outcome::Measured(figures(20.0))),
                result("bf16", Outcome::Refused("no bf16 here".into())),
                result("f16", Outcome::Measured(figures(10.0))),
            ],
        }
    }

    #[test]
    fn comes_back_from_its_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("report.json");
        report().write(&file).unwrap();
        assert_eq!(BenchReport::read(&file).unwrap(), report());
        let json: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        assert_eq!(json["results"][1]["refused"], "no bf16 here");
    }

    #[test]
    fn the_table_has_a_row_for_each_setting() {
        let mut report = report();
        let Outcome::Measured(figures) = &mut report.results[2].outcome else {
            unreachable!()
        };
        figures.memory = Some(Memory {
            place: Place::Device,
            in_use_bytes: 3 << 20,
            reserved_bytes: Some(4 << 20),
        });
        figures.step_bytes = Some(1 << 20);
        figures.replayed_operations = Some(7);
        figures.same_bits = Some(false);
        let Outcome::Measured(figures) = &mut report.results[0].outcome else {
            unreachable!()
        };
        figures.step_bytes = Some(2 << 20);
        let text = report.to_string();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3 + 2 + 3, "{text}");
        assert!(lines[1].ends_with("vocabulary 11, dropout 0: 1234 parameters"));
        assert!(lines[6].starts_with("| bf16: refused: no bf16 here |"));
        let cells: Vec<_> = lines[7].split('|').map(str::trim).collect();
        let expected = [
            "",
            "f16",
            "10.00",
            "0.500 (0.500 to 0.500)",
            "1000000",
            "5.5000",
            "1",
            "12.3",
            "1.0 MiB",
            "50 %",
            "7",
            "not all",
            "3.0 MiB in use on the device",
            "",
        ];
        assert_eq!(cells, expected);
    }
}
