//! One ordinary file of a sharded record.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use safetensors::tensor::TensorInfo;

use super::RecordError;
use super::entry::{Piece, TensorSpec};
use super::error::io_error;
use super::load::ShardedRecord;
use super::part::{PartFile, safetensors_header};
use super::report::Rate;
use super::storage::{Disk, Storage, parent};

/// The section that holds the parameters.
const MODEL: &str = "model";

/// Writes the model of the last complete record in `dir` into the file `out`: whole tensors by their path in the module,
/// which is what Burn's `SafetensorsStore` reads:
///
/// ```no_run
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn_flex::Flex;
/// use burn_store::{ModuleSnapshot, SafetensorsStore};
///
/// # let mut model: Linear<Flex> = LinearConfig::new(2, 2).init(&Default::default());
/// burn_zero::consolidate("records".as_ref(), "model.safetensors".as_ref())?;
/// model.load_from(&mut SafetensorsStore::from_file("model.safetensors"))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// and so does any other program that reads safetensors. A file that is there is replaced at once, when the new one is on the
/// disk. Needs memory for a mebibyte, and one read and one write of the model.
///
/// # Errors
///
/// Those of [`ShardedRecord::read`], or of the file system.
pub fn consolidate(dir: &Path, out: &Path) -> Result<(), RecordError> {
    ShardedRecord::open(dir)?.consolidate(MODEL, out)
}

impl ShardedRecord {
    /// Writes one section of the record into the file `out`, as [`consolidate`] does with the section `model`: all entries
    /// whose name is the section, a slash and a path, under that path.
    ///
    /// # Errors
    ///
    /// [`RecordError::NoSection`] if there are none, and those of [`consolidate`].
    pub fn consolidate(&mut self, section: &str, out: &Path) -> Result<(), RecordError> {
        let start = Instant::now();
        let temporary = temporary(out);
        let written = self
            .write_section(section, &temporary)
            .and_then(|bytes| publish(&temporary, out).map(|()| bytes));
        if written.is_err() {
            // The error is the one that matters, and the file may not be there.
            let _ = fs::remove_file(&temporary);
        }
        let rate = Rate::since(start, written?);
        log::info!(
            "{section} of {} in {}: {rate}",
            self.path().display(),
            out.display()
        );
        Ok(())
    }

    fn write_section(&mut self, section: &str, path: &Path) -> Result<u64, RecordError> {
        let mut tensors: Vec<(String, TensorSpec)> = self
            .tensors()
            .filter_map(|spec| {
                let path = spec.name.strip_prefix(section)?.strip_prefix('/')?;
                Some((path.to_owned(), spec))
            })
            .collect();
        if tensors.is_empty() {
            return Err(RecordError::NoSection {
                path: self.path().to_owned(),
                section: section.to_owned(),
                sections: self.sections(),
            });
        }
        // As safetensors orders; the names are in order.
        tensors.sort_by_key(|(_, spec)| Reverse(spec.dtype));
        // What a killed call left behind.
        let _ = fs::remove_file(path);
        let created = Disk.create_file(path).map_err(io_error("create", path))?;
        let mut file = PartFile::new(path, created);
        file.write(&self.section_header(&tensors))?;
        for (_, tensor) in tensors {
            self.read_chunks(&tensor, |bytes| file.write(bytes))?;
        }
        file.finish()
    }

    fn section_header(&self, tensors: &[(String, TensorSpec)]) -> Vec<u8> {
        let mut offset = 0;
        let infos = tensors.iter().map(|(path, spec)| {
            let start = offset;
            offset += Piece::whole(spec.clone()).bytes();
            let info = TensorInfo {
                dtype: spec.dtype,
                shape: spec.shape.clone(),
                data_offsets: (start, offset),
            };
            (path.clone(), info)
        });
        let step = self.state(0, 0).step;
        let metadata = HashMap::from([("step".to_owned(), step.to_string())]);
        safetensors_header(metadata, infos.collect())
    }

    /// What stands before the first slash of the names, each once.
    fn sections(&self) -> Vec<String> {
        let names = self.tensors().filter_map(|spec| {
            let (section, _) = spec.name.split_once('/')?;
            Some(section.to_owned())
        });
        let mut sections: Vec<_> = names.collect();
        sections.dedup();
        sections
    }
}

/// Puts the file in the place of `out`, and returns when that is on the disk.
fn publish(temporary: &Path, out: &Path) -> Result<(), RecordError> {
    let renamed = Disk.rename(temporary, out);
    renamed.map_err(io_error("rename", temporary))?;
    let parent = parent(out);
    Disk.sync_dir(parent).map_err(io_error("sync", parent))
}

/// Beside `out`, so that it can be renamed to it.
fn temporary(out: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(out.file_name().unwrap_or_default());
    name.push(".partial");
    out.with_file_name(name)
}
