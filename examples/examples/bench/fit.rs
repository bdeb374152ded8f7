//! The largest batch that fits into so much memory, by setting.

use std::fmt;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Instant;

use burn::prelude::Backend;
use burn_accum::{AccumError, MicroBatchFound, MicroBatchSearch, Normalization, find_micro_batch};
use burn_ranks::thread::model_thread;
use serde::{Deserialize, Serialize};

use super::error::BenchError;
use super::options::{Options, Workload};
use super::setting::Setting;
use super::table::{markdown, mebibytes};
use super::trainer::{Task, contender_here};
use examples::pools::memory_probe;

/// The largest batch that is tried, in sequences.
const MOST: usize = 1 << 20;

/// Steps of a trial: the optimizer allocates its state in the first.
const STEPS: usize = 2;

/// The results of `--fit`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FitReport {
    /// The bare backend's name.
    pub backend: String,
    /// The device's name in the backend.
    pub device: String,
    /// What a step works on; its batch means nothing here.
    pub workload: Workload,
    /// The limit for all memory in use at one time: parameters, optimizer, activations, gradients.
    pub limit_bytes: u64,
    /// One for each setting, in the order in which they were asked for.
    pub results: Vec<FitResult>,
}

/// What became of a setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FitResult {
    /// Its name.
    pub setting: String,
    /// What fits, and every size that was tried; or why nothing was found.
    pub found: Result<MicroBatchFound, String>,
}

/// Finds the largest batch of each setting, one after the other, each on its own thread, so that
/// settings share neither memory pools nor a budget.
pub fn search<B: Backend>(options: &Options, limit_bytes: u64, device: &B::Device) -> FitReport {
    let start = Instant::now();
    let results = options.settings.iter().map(|&setting| {
        if options
            .time_limit()
            .is_some_and(|limit| start.elapsed() > limit)
        {
            return FitResult {
                setting: setting.to_string(),
                found: Err("no time was left to look".into()),
            };
        }
        let found = thread::scope(|scope| {
            let find = || find::<B>(setting, options, limit_bytes, device);
            let search = model_thread("fit").spawn_scoped(scope, find);
            search.expect("the system starts a thread").join()
        });
        FitResult {
            setting: setting.to_string(),
            found: match found {
                Ok(found) => found.map_err(|error| error.to_string()),
                Err(_) => Err("the search panicked".into()),
            },
        }
    });
    FitReport {
        backend: B::name(device),
        device: format!("{device:?}"),
        workload: options.workload(),
        limit_bytes,
        results: results.collect(),
    }
}

fn find<B: Backend>(
    setting: Setting,
    options: &Options,
    limit_bytes: u64,
    device: &B::Device,
) -> Result<MicroBatchFound, AccumError> {
    // `Tokens` allows any size: the batch need not divide a window evenly.
    let search = MicroBatchSearch::new(MOST, limit_bytes).with_normalization(Normalization::Tokens);
    let steps = |batch: usize| {
        let task = Task::<B> {
            workload: Workload {
                batch,
                ..options.workload()
            },
            seed: options.seed,
            device: device.clone(),
            backend: options.backend,
        };
        let mut contender = contender_here(setting, &task)?;
        contender.enter();
        (0..STEPS).try_for_each(|_| contender.step().map(drop))
    };
    let mut probe = memory_probe(options.backend);
    find_micro_batch::<B, _>(&search, device, &mut *probe, steps)
}

impl FitReport {
    /// Writes it as JSON.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn write(&self, file: &Path) -> Result<(), BenchError> {
        let json = serde_json::to_string_pretty(self).expect("a report is plain data");
        fs::write(file, json + "\n").map_err(BenchError::io("write", file))
    }
}

impl fmt::Display for FitReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Workload {
            layers,
            heads,
            width,
            context,
            vocabulary,
            ..
        } = self.workload;
        writeln!(out, "{} on {}", self.backend, self.device)?;
        writeln!(
            out,
            "{layers} layers, {heads} heads, width {width}, context {context}, vocabulary {vocabulary}: the largest batch \
             below {}\n",
            mebibytes(self.limit_bytes)
        )?;
        let mut first = None;
        let rows = self.results.iter().map(|result| {
            let found = match &result.found {
                Ok(found) => found,
                Err(why) => {
                    let mut row = vec![String::new(); 6];
                    row[0] = format!("{}: {}", result.setting, why);
                    return row;
                }
            };
            let largest = found.largest_fitting;
            let times = largest as f64 / *first.get_or_insert(largest) as f64;
            vec![
                result.setting.clone(),
                largest.to_string(),
                format!("{times:.2}"),
                mebibytes(found.peak_bytes),
                mebibytes(found.fixed_bytes as u64),
                mebibytes(found.item_bytes as u64),
            ]
        });
        let headers = [
            "setting",
            "sequences",
            "times the first's",
            "peak",
            "of any batch",
            "of a sequence",
        ];
        write!(out, "{}", markdown(&headers, rows.collect::<Vec<_>>()))
    }
}
