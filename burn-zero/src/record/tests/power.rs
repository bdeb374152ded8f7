//! A save that ends anywhere leaves the last complete record: each operation on the file system fails once, by an error and
//! by a loss of power that takes with it all that was not synced.

use std::cell::{Cell, RefCell};
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::PathBuf;
use std::rc::Rc;

use super::super::save::save_to;
use super::super::storage::{Disk, Output, Storage};
use super::*;
use crate::SingleRank;

/// What has not reached the disk, in the order of its happening.
#[derive(Debug)]
enum Volatile {
    /// A name in a directory.
    Created(PathBuf),
    Renamed(PathBuf, PathBuf),
    /// A file's content.
    Content(PathBuf),
}

impl Volatile {
    fn is_in(&self, dir: &Path) -> bool {
        match self {
            Self::Created(path) | Self::Renamed(_, path) => path.parent() == Some(dir),
            Self::Content(_) => false,
        }
    }

    /// Takes it back, as a loss of power may.
    fn lose(self) {
        match self {
            Self::Created(path) if path.is_dir() => fs::remove_dir_all(path).unwrap(),
            Self::Created(path) => fs::remove_file(path).unwrap(),
            Self::Renamed(from, to) => fs::rename(to, from).unwrap(),
            Self::Content(path) => {
                let file = fs::OpenOptions::new().write(true).open(path).unwrap();
                file.set_len(file.metadata().unwrap().len() / 2).unwrap();
            }
        }
    }
}

#[derive(Default)]
struct Log {
    /// Operations that still succeed.
    left: Cell<usize>,
    volatile: RefCell<Vec<Volatile>>,
    removed: RefCell<Vec<PathBuf>>,
}

impl Log {
    /// Whether the power is still on.
    fn operate(&self) -> io::Result<()> {
        let left = self.left.get().checked_sub(1);
        self.left.set(left.unwrap_or(0));
        left.map(drop).ok_or(ErrorKind::StorageFull.into())
    }

    fn happened(&self, what: Volatile) {
        self.volatile.borrow_mut().push(what);
    }

    /// Removing is the one thing that is assumed to reach the disk at once: the worst order.
    fn is_gone(&self, path: &Path) {
        let is_gone = |what: &Volatile| match what {
            Volatile::Created(at) | Volatile::Content(at) => at.starts_with(path),
            Volatile::Renamed(_, to) => to == path,
        };
        self.volatile.borrow_mut().retain(|what| !is_gone(what));
    }
}

/// The file system until an operation fails, and with it all later ones.
struct Failing(Rc<Log>);

struct FailingFile(PathBuf, Box<dyn Output>, Rc<Log>);

impl Write for FailingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Err(error) = self.2.operate() {
            // A full disk takes what still fits.
            self.1.write_all(&bytes[..bytes.len() / 2])?;
            return Err(error);
        }
        self.1.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.1.flush()
    }
}

impl Output for FailingFile {
    fn sync(&mut self) -> io::Result<()> {
        self.2.operate()?;
        self.1.sync()?;
        let is_this =
            |what: &mut Volatile| matches!(what, Volatile::Content(path) if *path == self.0);
        self.2
            .volatile
            .borrow_mut()
            .retain_mut(|what| !is_this(what));
        Ok(())
    }
}

impl Storage for Failing {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.0.operate()?;
        Disk.create_dir(path)?;
        self.0.happened(Volatile::Created(path.to_owned()));
        Ok(())
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn Output>> {
        self.0.operate()?;
        let file = Disk.create_file(path)?;
        self.0.happened(Volatile::Created(path.to_owned()));
        self.0.happened(Volatile::Content(path.to_owned()));
        Ok(Box::new(FailingFile(path.to_owned(), file, self.0.clone())))
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.0.operate()?;
        Disk.sync_dir(dir)?;
        self.0.volatile.borrow_mut().retain(|what| !what.is_in(dir));
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.operate()?;
        Disk.rename(from, to)?;
        self.0
            .happened(Volatile::Renamed(from.to_owned(), to.to_owned()));
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.0.operate()?;
        Disk.remove_file(path)?;
        self.0.is_gone(path);
        Ok(())
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.0.operate()?;
        Disk.remove_dir(path)?;
        self.0.removed.borrow_mut().push(path.to_owned());
        self.0.is_gone(path);
        Ok(())
    }
}

/// What is left of the unsynced.
#[derive(Clone, Copy, Debug)]
enum Loss {
    /// All of it: a process ended, the machine did not.
    Nothing,
    /// None of it.
    All,
    /// Only names: content is what file systems write last.
    Content,
}

/// Saves `new` by one rank until operation `until`; whether it came through.
fn save_until(dir: &Path, new: &Whole, until: usize, loss: Loss) -> Result<Saved, RecordError> {
    let log = Rc::new(Log::default());
    log.left.set(until);
    let group = SingleRank::new();
    let saved = save_to(
        &Failing(log.clone()),
        dir,
        &group,
        entries(new, 0, 1),
        TrainingState::at_step(2),
        Keep::Last(std::num::NonZeroUsize::MIN),
    );
    for what in log.volatile.take().into_iter().rev() {
        let is_lost = match loss {
            Loss::Nothing => false,
            Loss::All => true,
            Loss::Content => matches!(what, Volatile::Content(_)),
        };
        if is_lost {
            what.lose();
        }
    }
    saved
}

#[test]
fn every_operation_may_be_the_last() {
    let (old, new, newer) = (few(1), few(2), few(3));
    let (mut failed, mut came_through) = (0, 0);
    for loss in [Loss::Nothing, Loss::All, Loss::Content] {
        for until in 0..40 {
            let dir = tempfile::tempdir().unwrap();
            save(dir.path(), &old, 1, &TrainingState::at_step(1), Keep::All);
            let saved = save_until(dir.path(), &new, until, loss);
            let step = ShardedRecord::open(dir.path()).unwrap().state(0, 1).step;
            match &saved {
                Ok(_) => {
                    came_through += 1;
                    assert_eq!(step, 2, "{until} {loss:?}: it said that it was saved");
                }
                Err(RecordError::Io { .. }) => failed += 1,
                Err(other) => panic!("{until} {loss:?}: {other}"),
            }
            // Failing to remove an old record, or to sync the last rename, comes after the new one is complete.
            let expected = if step == 2 { &new } else { &old };
            assert_holds(dir.path(), expected, 3);
            save(
                dir.path(),
                &newer,
                2,
                &TrainingState::at_step(3),
                Keep::default(),
            );
            assert_holds(dir.path(), &newer, 1);
            let left = inspect(dir.path()).unwrap().records;
            let is_complete =
                |info: &RecordInfo| matches!(info.completeness, Completeness::Complete { .. });
            assert!(left.iter().all(is_complete), "{until} {loss:?}: {left:?}");
        }
    }
    assert!(
        failed > 30 && came_through > 30,
        "{failed} failed, {came_through} came through"
    );
}

/// A directory of records that is not there yet, some levels deep.
#[test]
fn a_first_save_may_fail_too() {
    for until in 0..30 {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("runs/today");
        let saved = save_until(&dir, &few(1), until, Loss::All);
        let opened = ShardedRecord::open(&dir);
        match saved {
            Ok(_) => assert_eq!(opened.unwrap().state(0, 1).step, 2),
            Err(_) => assert!(
                matches!(opened, Err(RecordError::NoRecord { .. })),
                "{until}"
            ),
        }
        save(
            &dir,
            &few(3),
            2,
            &TrainingState::at_step(3),
            Keep::default(),
        );
        assert_holds(&dir, &few(3), 1);
    }
}

/// The operations that make a record durable, in their only right order.
#[test]
fn what_is_removed_is_removed_last() {
    let dir = tempfile::tempdir().unwrap();
    save(
        dir.path(),
        &few(1),
        1,
        &TrainingState::at_step(1),
        Keep::All,
    );
    let log = Rc::new(Log::default());
    log.left.set(usize::MAX);
    let storage = Failing(log.clone());
    let keep = Keep::Last(std::num::NonZeroUsize::MIN);
    let state = TrainingState::at_step(2);
    save_to(
        &storage,
        dir.path(),
        &SingleRank::new(),
        entries(&few(2), 0, 1),
        state,
        keep,
    )
    .unwrap();
    assert_eq!(
        *log.removed.borrow(),
        [dir.path().join(".000001-step-1.partial")]
    );
    assert!(log.volatile.borrow().is_empty(), "{:?}", log.volatile);
}
