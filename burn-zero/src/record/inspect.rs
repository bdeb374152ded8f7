//! What is in a directory of records, without reading it all.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use super::RecordError;
use super::error::io_error;
use super::layout::{Listing, MANIFEST, RecordName};
use super::manifest::{Manifest, check_lengths};

/// Whether a record can be loaded, as far as names and lengths tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Completeness {
    /// All files are there in full length.
    Complete {
        /// Ranks that saved it.
        world_size: usize,
    },
    /// Its writers were ended, or still write.
    Partial,
    /// It was complete and is not any more, or is of another version.
    Broken {
        /// What is wrong.
        reason: String,
    },
}

/// One record of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordInfo {
    /// Its directory.
    pub path: PathBuf,
    /// Updates taken when it was saved.
    pub step: u64,
    /// Bytes of the files that are there.
    pub bytes: u64,
    /// Whether it can be loaded.
    pub completeness: Completeness,
}

/// The records of a directory, oldest first; prints as a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Records {
    /// The directory.
    pub dir: PathBuf,
    /// Those that are complete or were, then those that are not finished.
    pub records: Vec<RecordInfo>,
}

/// Lists the records in `dir` with step, world size, bytes and completeness. Reads manifests and lengths, no tensors:
/// [`ShardedRecord::verify`](super::ShardedRecord::verify) reads all.
///
/// # Errors
///
/// If a directory cannot be read. A record that cannot be loaded is an answer, not an error.
pub fn inspect(dir: &Path) -> Result<Records, RecordError> {
    let listing = Listing::read(dir)?;
    let complete = listing.complete.iter().map(|name| {
        let path = dir.join(name.complete());
        let completeness = completeness(&path);
        info(path, name, completeness)
    });
    let partial = listing.partial.iter().map(|name| {
        let path = dir.join(name.partial());
        info(path, name, Completeness::Partial)
    });
    Ok(Records {
        dir: dir.to_owned(),
        records: complete.chain(partial).collect::<Result<_, _>>()?,
    })
}

fn completeness(path: &Path) -> Completeness {
    let manifest = Manifest::read(&path.join(MANIFEST));
    let checked = manifest.and_then(|manifest| {
        check_lengths(path, &manifest)?;
        Ok(manifest.world_size)
    });
    match checked {
        Ok(world_size) => Completeness::Complete { world_size },
        Err(error) => Completeness::Broken {
            reason: error.to_string(),
        },
    }
}

fn info(
    path: PathBuf,
    name: &RecordName,
    completeness: Completeness,
) -> Result<RecordInfo, RecordError> {
    let mut bytes = 0;
    for file in fs::read_dir(&path).map_err(io_error("list", &path))? {
        let metadata = file.and_then(|file| file.metadata());
        bytes += metadata.map_err(io_error("look at", &path))?.len();
    }
    Ok(RecordInfo {
        path,
        step: name.step,
        bytes,
        completeness,
    })
}

impl fmt::Display for Completeness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Complete { world_size: 1 } => f.write_str("complete, saved by 1 rank"),
            Self::Complete { world_size } => write!(f, "complete, saved by {world_size} ranks"),
            Self::Partial => f.write_str("not finished"),
            Self::Broken { reason } => write!(f, "broken: {reason}"),
        }
    }
}

impl fmt::Display for RecordInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.path.file_name().unwrap_or(self.path.as_os_str());
        let megabytes = self.bytes as f64 / 1e6;
        let name = name.to_string_lossy();
        let (step, completeness) = (self.step, &self.completeness);
        write!(f, "{name}: step {step}, {megabytes:.1} MB, {completeness}")
    }
}

impl fmt::Display for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.records.is_empty() {
            return write!(f, "no records in {}", self.dir.display());
        }
        write!(f, "records in {}:", self.dir.display())?;
        self.records
            .iter()
            .try_for_each(|record| write!(f, "\n  {record}"))
    }
}
