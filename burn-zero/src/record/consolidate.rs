//! One ordinary file of a sharded record.

use std::cmp::Reverse;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::time::Instant;

use super::RecordError;
use super::directory::{Disk, SyncedFile, parent};
use super::entry::{TensorSlice, TensorSpec};
use super::load::ShardedRecord;
use super::save::{rate, safetensors_header};

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
/// and so does any other program that reads safetensors. An existing file is replaced atomically, when the new one is on the
/// disk. Costs one read and one write of the model, and a mebibyte of memory.
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
    /// [`RecordError::OtherModel`] if there are none, and those of [`consolidate`].
    pub fn consolidate(&mut self, section: &str, out: &Path) -> Result<(), RecordError> {
        let start = Instant::now();
        let disk = Disk::PLAIN;
        // Beside `out`, so that it can be renamed to it.
        let mut name = OsString::from(".");
        name.push(out.file_name().unwrap_or_default());
        name.push(".partial");
        let temporary = out.with_file_name(name);
        let written = self.write_section(section, &temporary).and_then(|bytes| {
            disk.run("rename", &temporary, || fs::rename(&temporary, out))?;
            disk.sync_dir(parent(out))?;
            Ok(bytes)
        });
        if written.is_err() {
            // The first error is returned; the file may not exist.
            let _ = fs::remove_file(&temporary);
        }
        let rate = rate(start, written?);
        let (path, out) = (self.path().display(), out.display());
        log::info!("{section} of {path} in {out}: {rate}");
        Ok(())
    }

    fn write_section(&mut self, section: &str, path: &Path) -> Result<u64, RecordError> {
        let in_section = |spec: TensorSpec| {
            let path = spec.name.strip_prefix(section)?.strip_prefix('/')?;
            Some((path.to_owned(), spec))
        };
        let mut tensors: Vec<_> = self.tensors().filter_map(in_section).collect();
        if tensors.is_empty() {
            let names = self.tensors();
            let sections = names.filter_map(|spec| Some(spec.name.split_once('/')?.0.to_owned()));
            let mut sections: Vec<_> = sections.collect();
            sections.dedup();
            let sections = sections.join(", ");
            return Err(RecordError::OtherModel {
                path: self.path().to_owned(),
                reason: format!(
                    "has no entries in the section `{section}`; its sections are {sections}"
                ),
            });
        }
        // As safetensors orders; the names are in order.
        tensors.sort_by_key(|(_, spec)| Reverse(spec.dtype));
        let metadata = ("step", self.state(0, 0).step.to_string());
        let infos = tensors.iter().map(|(path, spec)| {
            let shape = spec.shape.clone();
            (path.clone(), shape, TensorSlice::whole(spec.clone()))
        });
        let header = safetensors_header(metadata, infos);
        // Left over from a killed call.
        let _ = fs::remove_file(path);
        let mut file = SyncedFile::create(Disk::PLAIN, path)?;
        file.write(&header)?;
        for (_, tensor) in tensors {
            self.for_each_chunk(&tensor, |bytes| file.write(bytes))?;
        }
        file.finish()
    }
}
