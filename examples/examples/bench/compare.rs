//! One table of the results of this benchmark and of torch_gpt.py.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::error::BenchError;
use super::report::{BenchReport, Outcome};
use super::statistics::Quartiles;
use super::table::{markdown, mebibytes};

/// Reads the files and makes one Markdown table of them. A figure that is in several files is taken
/// from the first: so times may come from a run side by side, and memory from one in which every
/// setting was alone.
///
/// # Errors
///
/// A file cannot be read, or holds something else.
pub fn table(files: &[PathBuf]) -> Result<String, BenchError> {
    let mut rows: Vec<Row> = Vec::new();
    for file in files {
        for row in read(file)? {
            match rows.iter_mut().find(|known| known.is_of(&row)) {
                Some(known) => known.fill_in(row),
                None => rows.push(row),
            }
        }
    }
    let headers = [
        "framework",
        "setting",
        "ms a step",
        "ratio to its first (quartiles)",
        "times as fast as its f32",
        "times as fast as PyTorch",
        "a step's peak",
        "of its f32's",
        "replayed",
        "peak in use",
        "less than its f32",
        "peak reserved",
        "last loss",
        "skipped",
    ];
    Ok(markdown(&headers, rows.iter().map(|row| row.cells(&rows))))
}

/// What can be in a file.
#[derive(Deserialize)]
#[serde(untagged)]
enum Results {
    Burn(BenchReport),
    Torch(Vec<TorchResult>),
}

/// One object of what torch_gpt.py writes.
#[derive(Deserialize)]
struct TorchResult {
    framework: String,
    setting: String,
    milliseconds: f64,
    /// Where all settings were side by side.
    ratio: Option<Quartiles>,
    peak_bytes: Option<u64>,
    peak_in_use_bytes: Option<u64>,
    step_bytes: Option<u64>,
    loss: f64,
}

/// What is known of a setting of a framework.
#[derive(Clone, Debug, Default, PartialEq)]
struct Row {
    framework: String,
    setting: String,
    /// Why there are no figures.
    remark: Option<String>,
    milliseconds: Option<f64>,
    ratio: Option<Quartiles>,
    step_bytes: Option<u64>,
    replayed_operations: Option<u64>,
    in_use_bytes: Option<u64>,
    reserved_bytes: Option<u64>,
    loss: Option<f64>,
    skipped_steps: Option<u64>,
}

fn read(file: &Path) -> Result<Vec<Row>, BenchError> {
    let json = fs::read(file).map_err(BenchError::io("read", file))?;
    let results = serde_json::from_slice(&json).map_err(|source| BenchError::NotResults {
        path: file.to_owned(),
        source,
    })?;
    Ok(match results {
        Results::Burn(report) => of_burn(report),
        Results::Torch(results) => results.into_iter().map(of_torch).collect(),
    })
}

fn of_burn(report: BenchReport) -> Vec<Row> {
    let framework = report.framework;
    let of_setting = |result: super::report::SettingResult| {
        let row = Row {
            framework: framework.clone(),
            setting: result.setting,
            ..Row::default()
        };
        match result.outcome {
            Outcome::Measured(figures) => Row {
                milliseconds: Some(figures.milliseconds.median),
                ratio: figures.ratio,
                step_bytes: figures.step_bytes,
                replayed_operations: figures.replayed_operations.filter(|&number| number > 0),
                in_use_bytes: figures.memory.map(|memory| memory.in_use_bytes),
                reserved_bytes: figures.memory.and_then(|memory| memory.reserved_bytes),
                loss: Some(figures.loss),
                skipped_steps: Some(figures.skipped_steps),
                ..row
            },
            Outcome::Refused(why) => Row {
                remark: Some(format!("refused: {why}")),
                ..row
            },
            Outcome::Failed(why) => Row {
                remark: Some(format!("failed: {why}")),
                ..row
            },
        }
    };
    report.results.into_iter().map(of_setting).collect()
}

fn of_torch(result: TorchResult) -> Row {
    Row {
        framework: result.framework,
        setting: result.setting,
        milliseconds: Some(result.milliseconds),
        ratio: result.ratio,
        step_bytes: result.step_bytes,
        in_use_bytes: result.peak_in_use_bytes,
        reserved_bytes: result.peak_bytes,
        loss: Some(result.loss),
        ..Row::default()
    }
}

impl Row {
    fn is_of(&self, other: &Self) -> bool {
        (&self.framework, &self.setting) == (&other.framework, &other.setting)
    }

    fn fill_in(&mut self, other: Self) {
        self.milliseconds = self.milliseconds.or(other.milliseconds);
        self.ratio = self.ratio.or(other.ratio);
        self.step_bytes = self.step_bytes.or(other.step_bytes);
        self.replayed_operations = self.replayed_operations.or(other.replayed_operations);
        self.in_use_bytes = self.in_use_bytes.or(other.in_use_bytes);
        self.reserved_bytes = self.reserved_bytes.or(other.reserved_bytes);
        self.loss = self.loss.or(other.loss);
        self.skipped_steps = self.skipped_steps.or(other.skipped_steps);
        self.remark = self.remark.take().or(other.remark);
    }

    /// Name in torch_gpt.py.
    fn precision(&self) -> &str {
        match &*self.setting {
            "bare" | "off" => "f32",
            setting if setting.starts_with("f16") => "f16",
            setting => setting,
        }
    }

    fn cells(&self, rows: &[Self]) -> Vec<String> {
        if let (Some(why), None) = (&self.remark, self.milliseconds) {
            let mut cells = vec![String::new(); 14];
            cells[0] = format!("{} {}: {why}", self.framework, self.setting);
            return cells;
        }
        let f32 = rows
            .iter()
            .find(|row| row.framework == self.framework && row.precision() == "f32");
        let torch = rows.iter().find(|row| {
            row.framework.starts_with("torch")
                && row.framework != self.framework
                && row.precision() == self.precision()
        });
        let speed = |other: Option<&Self>| {
            let times = other?.milliseconds? / self.milliseconds?;
            Some(format!("{times:.2}"))
        };
        let saved = f32
            .and_then(|f32| f32.in_use_bytes)
            .zip(self.in_use_bytes)
            .map(|(f32, own)| format!("{:.0} %", 100.0 * (1.0 - own as f64 / f32 as f64)));
        let step_part = f32
            .and_then(|f32| f32.step_bytes)
            .zip(self.step_bytes)
            .map(|(f32, own)| format!("{:.0} %", 100.0 * own as f64 / f32 as f64));
        let cells = [
            Some(self.framework.clone()),
            Some(self.setting.clone()),
            self.milliseconds.map(|time| format!("{time:.2}")),
            self.ratio.map(|ratio| ratio.to_string()),
            speed(f32),
            speed(torch),
            self.step_bytes.map(mebibytes),
            step_part,
            self.replayed_operations.map(|number| number.to_string()),
            self.in_use_bytes.map(mebibytes),
            saved,
            self.reserved_bytes.map(mebibytes),
            self.loss.map(|loss| format!("{loss:.4}")),
            self.skipped_steps.map(|steps| steps.to_string()),
        ];
        cells.map(Option::unwrap_or_default).to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Memory, Place};
    use crate::report::tests::report;

    #[test]
    fn burn_and_torch_are_one_table() {
        let directory = tempfile::tempdir().unwrap();
        let files = ["timing", "memory", "torch"].map(|name| directory.path().join(name));
        let timing = report();
        timing.write(&files[0]).unwrap();
        let mut memory = report();
        for (result, mebibytes) in memory.results.iter_mut().zip([40, 30, 20]) {
            if let Outcome::Measured(figures) = &mut result.outcome {
                figures.milliseconds.median = 1e9;
                figures.memory = Some(Memory {
                    place: Place::Device,
                    in_use_bytes: mebibytes << 20,
                    reserved_bytes: Some(64 << 20),
                });
            }
        }
        memory.write(&files[1]).unwrap();
        let torch = r#"[
            {"framework": "torch 2", "setting": "f32", "milliseconds": 15.0, "peak_bytes": null, "step_bytes": 2097152, "loss": 5.25, "parameters": 9},
            {"framework": "torch 2", "setting": "f16", "milliseconds": 5.0, "ratio": {"lower": 0.25, "median": 0.5, "upper": 0.75}, "step_bytes": 1048576, "peak_bytes": 1048576, "peak_in_use_bytes": 1048576, "loss": 5.0, "parameters": 9}
        ]"#;
        fs::write(&files[2], torch).unwrap();

        let text = table(&files).unwrap();
        let rows: Vec<Vec<_>> = text
            .lines()
            .skip(2)
            .map(|line| {
                line.trim_matches('|')
                    .split('|')
                    .map(str::trim)
                    .collect::<Vec<_>>()
            })
            .collect();
        #[rustfmt::skip]
        let expected = [
            vec!["burn 0.21.0", "bare", "20.00", "1.000 (1.000 to 1.000)", "1.00", "0.75", "", "", "40.0 MiB", "0 %", "64.0 MiB", "5.5000", "1"],
            vec!["burn 0.21.0 bf16: refused: no bf16 here", "", "", "", "", "", "", "", "", "", "", "", ""],
            vec!["burn 0.21.0", "f16", "10.00", "0.500 (0.500 to 0.500)", "2.00", "0.50", "", "", "20.0 MiB", "50 %", "64.0 MiB", "5.5000", "1"],
            vec!["torch 2", "f32", "15.00", "", "1.00", "", "2.0 MiB", "100 %", "", "", "", "5.2500", ""],
            vec!["torch 2", "f16", "5.00", "0.500 (0.250 to 0.750)", "3.00", "", "1.0 MiB", "50 %", "1.0 MiB", "", "1.0 MiB", "5.0000", ""],
        ];
        assert_eq!(rows, expected);
    }

    #[test]
    fn a_file_of_something_else_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("other.json");
        fs::write(&file, "{}").unwrap();
        let error = table(std::slice::from_ref(&file)).unwrap_err().to_string();
        assert!(error.contains("other.json is neither"), "{error}");
        let error = table(&["missing.json".into()]).unwrap_err().to_string();
        assert!(error.starts_with("cannot read missing.json"), "{error}");
    }
}
