//! What saving does to the file system, so that tests can fail each step of it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// A file being written.
pub(super) trait Output: Write {
    /// Returns when everything written is on the disk.
    fn sync(&mut self) -> io::Result<()>;
}

/// The operations that a save consists of.
pub(super) trait Storage {
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// A new file; one that exists is refused.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn Output>>;
    /// Returns when the names in the directory are on the disk.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// With what is in it.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
}

/// The file system.
pub(super) struct Disk;

impl Storage for Disk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn Output>> {
        Ok(Box::new(File::create_new(path)?))
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        // Windows neither opens a directory as a file nor needs it synced.
        if cfg!(unix) {
            File::open(path)?.sync_all()?;
        }
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }
}

impl Output for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// The directory that `path` is in.
pub(super) fn parent(path: &Path) -> &Path {
    // The parent of `records` is the empty path: where the program runs.
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}
