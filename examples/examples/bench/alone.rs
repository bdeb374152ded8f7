//! Each setting in a process of its own.

use std::env;
use std::fs;
use std::process::Command;

use super::error::BenchError;
use super::options::Options;
use super::report::{BenchReport, Outcome, SettingResult};
use super::setting::Setting;

/// In these processes glibc gives each allocation of at least this size pages of its own and
/// returns them when it is freed. By default the size follows the program, up to 32 MiB, and
/// smaller allocations leave gaps that stay with the process: its memory then depends on the order
/// of allocations, and is not what is alive.
const RETURNED_BYTES: &str = "65536";

/// Measures time and memory of the settings one after the other, each in a new process of this
/// program. Times are not of the same rounds, and an allocator that returns memory at once takes
/// time, so there are no ratios.
///
/// # Errors
///
/// A process cannot be started, or its results cannot be read.
pub fn each(options: &Options) -> Result<BenchReport, BenchError> {
    let mut together: Option<BenchReport> = None;
    let mut results = Vec::new();
    for &setting in &options.settings {
        match one(options, setting)? {
            Ok(report) => {
                results.extend(report.results.clone());
                // One that was refused does not know the number of parameters.
                if together.as_ref().is_none_or(|it| it.parameters.is_none()) {
                    together = Some(report);
                }
            }
            Err(why) => results.push(SettingResult {
                setting: setting.to_string(),
                outcome: Outcome::Failed(why),
            }),
        }
    }
    for result in &mut results {
        if let Outcome::Measured(figures) = &mut result.outcome {
            figures.ratio = None;
            figures.same_bits = None;
        }
    }
    Ok(BenchReport {
        results,
        reference: None,
        ..together.unwrap_or_else(|| nobody(options))
    })
}

/// The process's report, or how it ended if it wrote none.
fn one(options: &Options, setting: Setting) -> Result<Result<BenchReport, String>, BenchError> {
    let file = env::temp_dir().join(format!("bench-{}-{setting}.json", std::process::id()));
    let program = env::current_exe().map_err(BenchError::io("find", "this program".as_ref()))?;
    // Its table is on standard output; ours is the one to read.
    let output = Command::new(&program)
        .env("MALLOC_MMAP_THRESHOLD_", RETURNED_BYTES)
        .args(options.alone(setting, &file))
        .stderr(std::process::Stdio::inherit())
        .output()
        .map_err(BenchError::io("start", &program))?;
    if !file.exists() {
        return Ok(Err(format!("its process ended with {}", output.status)));
    }
    let report = BenchReport::read(&file);
    fs::remove_file(&file).map_err(BenchError::io("remove", &file))?;
    report.map(Ok)
}

/// The report if no process wrote one.
fn nobody(options: &Options) -> BenchReport {
    BenchReport {
        framework: "burn 0.21.0".into(),
        backend: options.backend.name().into(),
        device: "an unknown device".into(),
        optimized: !cfg!(debug_assertions),
        workload: options.workload(),
        parameters: None,
        reference: None,
        results: Vec::new(),
    }
}
