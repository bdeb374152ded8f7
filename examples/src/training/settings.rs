//! The settings that a run began with, in the `run.json` of its directory: a resumed run has to have
//! the same.

use std::path::Path;

use fs_err as fs;
use serde_json::Value;

use super::error::TrainingError;

const FILE: &str = "run.json";

/// Notes the settings of a run that begins.
///
/// # Errors
///
/// [`TrainingError::Io`].
pub fn begin(directory: &Path, settings: &Value) -> Result<(), TrainingError> {
    fs::create_dir_all(directory)?;
    Ok(fs::write(directory.join(FILE), format!("{settings:#}"))?)
}

/// The settings that a run began with, as [`check`] takes them.
///
/// # Errors
///
/// [`TrainingError::Resume`] if none began there, [`TrainingError::Io`].
pub fn begun(directory: &Path) -> Result<String, TrainingError> {
    let file = directory.join(FILE);
    if !file.exists() {
        let place = directory.display();
        let none = format!("no run began in {place}; run without --resume first");
        return Err(TrainingError::Resume(none));
    }
    Ok(fs::read_to_string(file)?)
}

/// Whether a run of these settings may go on with one that began with others. A line of the file is
/// a setting.
///
/// # Errors
///
/// [`TrainingError::Resume`] with each setting that differs, and both values.
pub fn check(directory: &Path, then: &str, now: &Value) -> Result<(), TrainingError> {
    let (place, now) = (directory.display(), format!("{now:#}"));
    let setting = |line: &str| line.trim_matches([' ', ',']).to_owned();
    let lines = then.lines().zip(now.lines());
    let changed: String = lines
        .filter(|(then, now)| then != now)
        .map(|(then, now)| format!("{}, now {}; ", setting(then), setting(now)))
        .collect();
    if !changed.is_empty() {
        let other = format!("{place} was started with other settings: {changed}");
        return Err(TrainingError::Resume(other));
    }
    if then != now {
        let part = format!(
            "{place}/{FILE} is not whole, or of another version: start anew in another directory"
        );
        return Err(TrainingError::Resume(part));
    }
    Ok(())
}
