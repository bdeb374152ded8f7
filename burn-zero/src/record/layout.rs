//! Names in a directory of records.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::RecordError;
use super::error::io_error;

/// The file that makes a record of a directory.
pub(super) const MANIFEST: &str = "manifest.json";

/// The file that a saving job locks.
pub(super) const LOCK: &str = ".lock";

/// Name of a record's directory: `000007-step-1200` is the seventh record of its directory, saved after 1200 updates.
///
/// The number orders the records in time, which the step does not: who goes back to an older record passes a step twice.
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
        // `+7` and `7` are numbers too, but nothing that this program names a record.
        (parsed.complete() == name).then_some(parsed)
    }

    fn parse_partial(name: &str) -> Option<Self> {
        Self::parse(name.strip_prefix('.')?.strip_suffix(".partial")?)
    }
}

/// The file of one rank.
pub(super) fn part_file(rank: usize, world_size: usize) -> String {
    format!("rank-{rank}-of-{world_size}.safetensors")
}

/// Name of a piece in its file, such as `model/weight[100..150]`.
pub(super) fn piece_key(name: &str, elements: &Range<usize>) -> String {
    format!("{name}[{}..{}]", elements.start, elements.end)
}

/// The records in a directory, oldest first.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub complete: Vec<RecordName>,
    pub partial: Vec<RecordName>,
}

impl Listing {
    /// What is in `dir`; nothing if it does not exist. Names of others are passed over.
    pub fn read(dir: &Path) -> Result<Self, RecordError> {
        let mut listing = Self::default();
        if !dir.exists() {
            return Ok(listing);
        }
        for entry in fs::read_dir(dir).map_err(io_error("list", dir))? {
            let name = entry.map_err(io_error("list", dir))?.file_name();
            let name = name.to_string_lossy();
            if let Some(record) = RecordName::parse(&name) {
                listing.complete.push(record);
            } else if let Some(record) = RecordName::parse_partial(&name) {
                listing.partial.push(record);
            }
        }
        listing.complete.sort_unstable();
        listing.partial.sort_unstable();
        Ok(listing)
    }

    /// A number above all there are.
    pub fn next_number(&self) -> u64 {
        let all = self.complete.iter().chain(&self.partial);
        all.map(|record| record.number)
            .max()
            .map_or(1, |last| last + 1)
    }

    /// The last record, or the last one of `step`.
    pub fn find(&self, step: Option<u64>) -> Option<RecordName> {
        let mut newest_first = self.complete.iter().rev();
        let wanted = |record: &&RecordName| step.is_none_or(|step| record.step == step);
        newest_first.find(wanted).copied()
    }

    /// [`find`](Self::find) in `dir`, as its path.
    pub fn locate(dir: &Path, step: Option<u64>) -> Result<PathBuf, RecordError> {
        let listing = Self::read(dir)?;
        match listing.find(step) {
            Some(record) => Ok(dir.join(record.complete())),
            None => Err(RecordError::NoRecord {
                dir: dir.to_owned(),
                step,
                partial: listing.partial.len(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        let record = RecordName {
            number: 7,
            step: 1200,
        };
        assert_eq!(record.complete(), "000007-step-1200");
        assert_eq!(RecordName::parse(&record.complete()), Some(record));
        assert_eq!(RecordName::parse_partial(&record.partial()), Some(record));
        assert_eq!(RecordName::parse(&record.partial()), None);
        for other in [
            "7-step-1",
            "000007-step-01",
            "000007-step-+1",
            "latest",
            "000007-step-",
        ] {
            assert_eq!(RecordName::parse(other), None, "{other}");
        }
    }

    #[test]
    fn the_newest_is_found_by_time() {
        let names = [(1, 10), (2, 20), (3, 10)].map(|(number, step)| RecordName { number, step });
        let listing = Listing {
            complete: names.to_vec(),
            partial: vec![RecordName {
                number: 9,
                step: 30,
            }],
        };
        assert_eq!(listing.find(None), Some(names[2]));
        assert_eq!(listing.find(Some(10)), Some(names[2]));
        assert_eq!(listing.find(Some(20)), Some(names[1]));
        assert_eq!(listing.find(Some(30)), None);
        assert_eq!(listing.next_number(), 10);
    }
}
