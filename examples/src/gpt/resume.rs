//! The records of a run, and going on from them.

use std::io::BufReader;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::job::Job;
use super::loader::hash;
use super::options::Options;
use super::text::Text;
use crate::training::error::TrainingError;
use crate::training::precision::Amp;
use crate::training::settings;

/// Prepares the directory of a new run, and removes an earlier one's records and metrics from it;
/// or, to resume, checks that the run there can go on with these settings. Returns the first epoch.
///
/// # Errors
///
/// [`TrainingError::Io`], [`TrainingError::Resume`].
pub fn open(options: &Options, job: &Job, text: &Text) -> Result<usize, TrainingError> {
    let directory = &options.output;
    let now = of(options, job, text);
    if !options.resume {
        fs::create_dir_all(directory)?;
        for part in ["checkpoint", "train", "valid", "tensorboard"] {
            let part = directory.join(part);
            if part.exists() {
                fs::remove_dir_all(part)?;
            }
        }
        settings::begin(directory, &now)?;
        return Ok(1);
    }
    let records = directory.join("checkpoint");
    let last = last_record(&records).ok_or_else(|| {
        let place = records.display();
        let none = format!("there is no complete record in {place}; run without --resume first");
        TrainingError::Resume(none)
    })?;
    let place = directory.display();
    let then = settings::begun(directory)?;
    let is_older = |then: &Value| then[RECORDS] != OF_UPDATES;
    if serde_json::from_str(&then).is_ok_and(|then| is_older(&then)) {
        let older = format!(
            "the records in {place} are of an older version of this program, whose optimizer has others: resume with that version, \
             or start anew without --resume"
        );
        return Err(TrainingError::Resume(older));
    }
    settings::check(directory, &then, &now)?;
    if last >= options.plan().epochs() {
        let all = format!(
            "all {} steps are in {place}; see its report.json",
            options.steps
        );
        return Err(TrainingError::Resume(all));
    }
    Ok(last + 1)
}

/// The form of the optimizer's records, as a setting.
const RECORDS: &str = "records";

/// Those of a `burn_update::Update`.
const OF_UPDATES: &str = "of updates";

/// What must stay the same. The number of sequences in an update must, but not how they fall into
/// micro-batches and ranks.
fn of(options: &Options, job: &Job, text: &Text) -> Value {
    let bytes = text.train.iter().chain(&text.valid);
    let text_hash = bytes.fold(0, |state, byte| hash(state, u64::from(*byte)));
    json!({
        "--steps": options.steps,
        "--eval-every": options.plan().epoch,
        "--seed": options.seed,
        "--context": options.context,
        "--layers": options.layers,
        "--heads": options.heads,
        "--width": options.width,
        "--dropout": options.dropout,
        "--loss": options.loss,
        "--warmup": options.warmup(),
        "--lr": job.lr,
        // The records of a run in f16 have a scale, those of others none.
        "--amp f16": job.amp == Amp::F16,
        "optimizer": job.config.adamw,
        "gradient clipping": job.config.zero.gradient_clipping,
        "sequences in an update": job.batch.train,
        "bytes of text": text.bytes(),
        "hash of the text": text_hash,
        RECORDS: OF_UPDATES,
    })
}

/// The last epoch of which all three records of Burn's Learner are there and whole: a run that is
/// killed while it writes one leaves a part.
fn last_record(records: &Path) -> Option<usize> {
    let epoch = |path: PathBuf| -> Option<usize> {
        let name = path.file_stem()?.to_str()?;
        name.strip_prefix("model-")?.parse().ok()
    };
    let has_all = |epoch: &usize| {
        let record = |name| records.join(format!("{name}-{epoch}.mpk"));
        let mut names = ["model", "optim", "scheduler"].into_iter();
        names.all(|name| is_whole(&record(name)))
    };
    let entries = fs::read_dir(records).ok()?;
    let mut epochs: Vec<_> = entries
        .filter_map(|entry| epoch(entry.ok()?.path()))
        .collect();
    epochs.sort_unstable();
    epochs.into_iter().rev().find(has_all)
}

/// Whether a record is there and can be read to its end.
fn is_whole(record: &Path) -> bool {
    let read = |file| rmp_serde::from_read::<_, IgnoredAny>(BufReader::new(file));
    match fs::File::open(record).map(read) {
        Ok(Ok(_)) => true,
        Ok(Err(error)) => {
            burn_decorator::warn_user!("{} is not whole: {error}", record.display());
            false
        }
        Err(_) => false,
    }
}
