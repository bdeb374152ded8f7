//! A directory of records: names, and the file-system operations of a save.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::RecordFault;
use super::entry::CHUNK_BYTES;

/// Name of the manifest in a record's directory.
pub(super) const MANIFEST: &str = "manifest.json";

/// Name of a record's directory: `000007-step-1200` is the seventh record of its directory, saved
/// after 1200 updates.
///
/// The number orders the records in time. The step does not, because a run that resumes from an
/// older record repeats steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct RecordName {
    pub number: u64,
    pub step: u64,
}

impl RecordName {
    /// The directory of the complete record.
    pub fn complete(self) -> String {
        format!("{:06}-step-{}", self.number, self.step)
    }

    /// The directory while the record is written or removed.
    pub fn partial(self) -> String {
        format!(".{}.partial", self.complete())
    }

    fn parse(name: &str) -> Option<Self> {
        let (number, step) = name.split_once("-step-")?;
        let parsed = Self {
            number: number.parse().ok()?,
            step: step.parse().ok()?,
        };
        // `+7` and `7` parse as numbers too, but are no names of records.
        (parsed.complete() == name).then_some(parsed)
    }
}

/// The file of one rank.
pub(super) fn rank_file(rank: usize, world_size: usize) -> String {
    format!("rank-{rank}-of-{world_size}.safetensors")
}

/// The records in a directory, oldest first.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub complete: Vec<RecordName>,
    pub partial: Vec<RecordName>,
}

impl Listing {
    /// The records in `dir`; none if it does not exist. Other names are ignored.
    pub fn read(dir: &Path) -> Result<Self, RecordFault> {
        let mut listing = Self::default();
        let entries = match run("list", dir, || fs::read_dir(dir)) {
            Err(error) if error.is_not_found() => return Ok(listing),
            entries => entries?,
        };
        for entry in entries {
            let name = run("list", dir, || entry)?.file_name();
            let name = name.to_string_lossy();
            let hidden = name.strip_prefix('.');
            let partial = hidden.and_then(|name| name.strip_suffix(".partial"));
            if let Some(record) = partial.and_then(RecordName::parse) {
                listing.partial.push(record);
            } else {
                listing.complete.extend(RecordName::parse(&name));
            }
        }
        listing.complete.sort_unstable();
        listing.partial.sort_unstable();
        Ok(listing)
    }

    /// A number greater than all existing ones.
    pub fn next_number(&self) -> u64 {
        let all = self.complete.iter().chain(&self.partial);
        let next = all.map(|record| record.number.saturating_add(1));
        next.max().unwrap_or(1)
    }

    /// The last complete record in `dir`, or the last one of `step`.
    pub fn locate(dir: &Path, step: Option<u64>) -> Result<RecordName, RecordFault> {
        let listing = Self::read(dir)?;
        let mut newest_first = listing.complete.iter().rev();
        let found = newest_first.find(|record| step.is_none_or(|step| record.step == step));
        found.copied().ok_or_else(|| listing.no_record(dir, step))
    }

    /// The error where no record, or none of `step`, is complete.
    pub fn no_record(&self, dir: &Path, step: Option<u64>) -> RecordFault {
        RecordFault::NoRecord {
            dir: dir.to_owned(),
            step,
            partial: self.partial.len(),
        }
    }
}

/// Logs an operation on the file system, then runs it. Tests crash or delay the operation when they
/// see it in the log.
///
/// # Errors
///
/// [`RecordFault::Io`], with the operation and the path.
pub(crate) fn run<T>(
    action: &'static str,
    path: &Path,
    operation: impl FnOnce() -> io::Result<T>,
) -> Result<T, RecordFault> {
    log::trace!("{action} {}", path.display());
    operation().map_err(|source| RecordFault::Io {
        action,
        path: path.to_owned(),
        source: Arc::new(source),
    })
}

/// Returns when the names in the directory are on the disk.
pub(super) fn sync_dir(path: &Path) -> Result<(), RecordFault> {
    run("sync", path, || {
        // Windows neither opens a directory as a file nor needs it synced.
        if cfg!(unix) {
            File::open(path)?.sync_all()
        } else {
            Ok(())
        }
    })
}

/// Makes `dir` and its missing parents, each synced before the next.
pub(super) fn make_dirs(dir: &Path) -> Result<(), RecordFault> {
    // The working directory has no parent to make, even if it was removed.
    if dir.is_dir() || dir == Path::new(".") {
        return Ok(());
    }
    let parent = parent(dir);
    make_dirs(parent)?;
    run("make", dir, || fs::create_dir(dir))?;
    sync_dir(parent)
}

/// Removes a directory. A directory that cannot be removed costs only space.
pub(super) fn remove(dir: &Path) {
    match run("remove", dir, || fs::remove_dir_all(dir)) {
        Err(error) if !error.is_not_found() => burn_decorator::warn_user!("{error}"),
        _ => {}
    }
}

/// A file that is written and synced.
pub(super) struct SyncedFile<'a> {
    path: &'a Path,
    file: File,
    bytes: u64,
}

impl<'a> SyncedFile<'a> {
    /// A new file; an existing file is an error.
    pub fn create(path: &'a Path) -> Result<Self, RecordFault> {
        Ok(Self {
            path,
            file: run("create", path, || File::create_new(path))?,
            bytes: 0,
        })
    }

    /// Bytes written so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), RecordFault> {
        run("write", self.path, || self.file.write_all(bytes))?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Writes a slice. Returns the checksum of each of its chunks, computed while the chunk is in
    /// the processor's cache.
    pub fn write_slice(&mut self, bytes: &[u8]) -> Result<Vec<u32>, RecordFault> {
        let chunks = bytes.chunks(CHUNK_BYTES);
        let each = chunks.map(|chunk| {
            let crc32 = crc32fast::hash(chunk);
            self.write(chunk).map(|()| crc32)
        });
        each.collect()
    }

    /// Syncs the file, and returns its length.
    pub fn finish(self) -> Result<u64, RecordFault> {
        run("sync", self.path, || self.file.sync_all())?;
        Ok(self.bytes)
    }
}

/// The directory that `path` is in.
pub(super) fn parent(path: &Path) -> &Path {
    // The parent of `records` is the empty path, which means the working directory.
    let parent = path.parent();
    let parent = parent.filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}
