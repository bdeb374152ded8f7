//! The directory of a run: what it was started with, its records and its metrics.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use burn::prelude::Backend;
use burn::record::{
    FileRecorder, FullPrecisionSettings, NamedMpkFileRecorder, Recorder, RecorderError,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::GptError;
use super::optimizer::OptimizerConfig;
use super::options::Options;
use super::scheduler::SchedulerConfig;
use super::settings::Settings;
use super::text::Text;
use super::windows::hash;

/// The settings that the figures of a run depend on.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Start {
    options: Options,
    /// Sequences in an update.
    effective_batch: usize,
    optimizer: Option<OptimizerConfig>,
    scheduler: Option<SchedulerConfig>,
    gradient_clipping: Option<f64>,
    text_bytes: usize,
    text_hash: u64,
}

/// Options that may change when a run is resumed, because its records stay valid and its updates the same. The number of sequences
/// in an update must stay, but not how they fall into micro-batches: epochs hold whole windows, and an optimizer's record can be
/// loaded under another window.
const FREE: [&str; 16] = [
    "accum",
    "amp",
    "backend",
    "batch",
    "checkpoint",
    "config",
    "effective_batch",
    "memory_limit",
    "memory_plot",
    "offload",
    "output",
    "ranks",
    "resume",
    "text",
    "workers",
    "zero",
];

/// Sections of the file of `--config` that may not change.
const FIXED: [&str; 3] = ["optimizer", "scheduler", "gradient_clipping"];

/// Names of the three records of an epoch, Burn's.
const RECORDS: [&str; 3] = ["model", "optim", "scheduler"];

/// Name of the report in the directory of a run.
pub const REPORT: &str = "report.json";

/// Prepares a new run and removes an earlier one from the directory; or, to resume, checks that the run there can continue and
/// returns the epoch of its last record.
///
/// # Errors
///
/// The directory cannot be written, or what is in it cannot be resumed with these settings.
pub fn open(settings: &Settings, text: &Text) -> Result<Option<usize>, GptError> {
    let options = &settings.options;
    let config = &settings.job.config;
    let run = RunDir {
        path: options.output.clone(),
    };
    let start = Start {
        options: options.clone(),
        effective_batch: settings.sequences_per_update(),
        optimizer: config.optimizer.clone(),
        scheduler: config.scheduler,
        gradient_clipping: config.zero.gradient_clipping,
        text_bytes: text.len(),
        text_hash: fingerprint(text),
    };
    if options.resume {
        let epoch = run.last_record()?;
        run.check_same(&start)?;
        if epoch >= options.plan().epochs() {
            return Err(GptError::AlreadyComplete {
                path: run.path,
                steps: options.steps,
            });
        }
        return Ok(Some(epoch));
    }
    run.clear()?;
    let json = serde_json::to_string_pretty(&start).expect("options are plain data");
    let file = run.start_file();
    fs::write(&file, json).map_err(GptError::io("write", file))?;
    Ok(None)
}

/// The directory of a run.
struct RunDir {
    path: PathBuf,
}

impl RunDir {
    fn start_file(&self) -> PathBuf {
        self.path.join("run.json")
    }

    fn records(&self) -> PathBuf {
        self.path.join("checkpoint")
    }

    /// Removes what an earlier run left: its records could be taken for this one's.
    fn clear(&self) -> Result<(), GptError> {
        fs::create_dir_all(&self.path).map_err(GptError::io("create", &self.path))?;
        for directory in ["checkpoint", "train", "valid"] {
            let path = self.path.join(directory);
            absent_is_fine(fs::remove_dir_all(&path)).map_err(GptError::io("remove", path))?;
        }
        for file in ["run.json", REPORT, "experiment.log"] {
            let path = self.path.join(file);
            absent_is_fine(fs::remove_file(&path)).map_err(GptError::io("remove", path))?;
        }
        Ok(())
    }

    /// The last epoch of which all records are there.
    fn last_record(&self) -> Result<usize, GptError> {
        let none = || GptError::NoRecord {
            path: self.records(),
        };
        let is_complete = |epoch: &usize| {
            RECORDS.iter().all(|name| {
                let file = format!("{name}-{epoch}.{EXTENSION}");
                self.records().join(file).is_file()
            })
        };
        fs::read_dir(self.records())
            .map_err(|_| none())?
            .filter_map(|entry| epoch_of(&entry.ok()?.path()))
            .filter(is_complete)
            .max()
            .ok_or_else(none)
    }

    fn check_same(&self, now: &Start) -> Result<(), GptError> {
        let file = self.start_file();
        let json = fs::read(&file).map_err(GptError::io("read", &file))?;
        let mut then: Value = serde_json::from_slice(&json)
            .map_err(io::Error::from)
            .map_err(GptError::io("read", file))?;
        let mut now = serde_json::to_value(now).expect("options are plain data");
        for start in [&mut then, &mut now] {
            // It is among the options.
            if let Some(optimizer) = start["optimizer"].as_object_mut() {
                optimizer.remove("lr");
            }
        }

        let options = now["options"].as_object().expect("options are an object");
        let mut differences: Vec<_> = options
            .keys()
            .filter(|key| !FREE.contains(&key.as_str()))
            .filter(|key| then["options"][key.as_str()] != options[key.as_str()])
            .map(|key| {
                let option = key.replace('_', "-");
                format!(
                    "--{option} was {} and is {}",
                    then["options"][key.as_str()],
                    options[key.as_str()]
                )
            })
            .collect();
        let fixed = FIXED.into_iter().filter(|key| then[key] != now[key]);
        differences.extend(fixed.map(|key| format!("{key} was {} and is {}", then[key], now[key])));
        // Runs with one batch per update did not write it.
        let sequences = |start: &Value| {
            let written = start["effective_batch"].as_u64();
            written.or_else(|| start["options"]["batch"].as_u64())
        };
        if sequences(&then) != sequences(&now) {
            differences.push(format!(
                "an update (--batch times --accum times --ranks, or --effective-batch) was {} sequences and is {}",
                sequences(&then).unwrap_or_default(),
                sequences(&now).unwrap_or_default()
            ));
        }
        if then["text_hash"] != now["text_hash"] {
            differences.push(format!(
                "the text was {} bytes and is {}, or other bytes",
                then["text_bytes"], now["text_bytes"]
            ));
        }
        if differences.is_empty() {
            return Ok(());
        }
        Err(GptError::OptionsChanged {
            path: self.path.clone(),
            differences: differences.join(", "),
        })
    }
}

/// The epoch of a file named `model-<epoch>.mpk`.
fn epoch_of(path: &Path) -> Option<usize> {
    path.file_stem()?
        .to_str()?
        .strip_prefix("model-")?
        .parse()
        .ok()
}

fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn fingerprint(text: &Text) -> u64 {
    let bytes = text.train.iter().chain(&text.valid);
    bytes.fold(0, |state, byte| hash(state, u64::from(*byte)))
}

/// Burn's named MessagePack files in full precision, written atomically: a training that is killed while it writes leaves the
/// earlier records intact.
#[derive(Clone, Debug, Default)]
pub struct WholeFileRecorder(NamedMpkFileRecorder<FullPrecisionSettings>);

const EXTENSION: &str = "mpk";

impl<B: Backend> FileRecorder<B> for WholeFileRecorder {
    fn file_extension() -> &'static str {
        EXTENSION
    }
}

impl<B: Backend> Recorder<B> for WholeFileRecorder {
    type Settings = FullPrecisionSettings;
    type RecordArgs = PathBuf;
    type RecordOutput = ();
    type LoadArgs = PathBuf;

    fn save_item<I: Serialize>(&self, item: I, path: PathBuf) -> Result<(), RecorderError> {
        let unknown = |error: io::Error| RecorderError::Unknown(error.to_string());
        let whole = path.with_extension(EXTENSION);
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        // Without an extension: the wrapped recorder sets it.
        let partial = path.with_file_name(format!("partial-{name}"));
        Recorder::<B>::save_item(&self.0, item, partial.clone())?;
        let partial = partial.with_extension(EXTENSION);
        // Opened for writing: not every system flushes a file that was opened for reading.
        fs::File::options()
            .append(true)
            .open(&partial)
            .and_then(|file| file.sync_all())
            .map_err(unknown)?;
        fs::rename(&partial, &whole).map_err(unknown)
    }

    fn load_item<I: DeserializeOwned>(&self, path: &mut PathBuf) -> Result<I, RecorderError> {
        Recorder::<B>::load_item(&self.0, path)
    }
}
