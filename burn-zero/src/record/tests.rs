//! A save whose operations on the file system fail or take long. All else is tested in `tests/records`.

use std::cell::{Cell, RefCell};
use std::fs;
use std::io::{self, ErrorKind};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::directory::Disk;
use super::save::save_on;
use super::*;
use crate::{GroupOptions, ProcessGroup, SingleRank, ThreadGroup};

const LAST: Keep = Keep::Last(NonZeroUsize::MIN);

/// The slice of one rank of two tensors whose bytes depend on the step.
fn entries(step: u64, rank: usize, world_size: usize) -> Vec<Entry<'static>> {
    let tensors = [("model/a", Dtype::F32, 12), ("optimizer/b", Dtype::F16, 5)];
    let entries = tensors.map(|(name, dtype, elements)| {
        let tensor = TensorSpec::new(name, dtype, [elements]);
        let cut = |rank: usize| rank * elements / world_size;
        let slice = TensorSlice::new(tensor, cut(rank)..cut(rank + 1));
        let bytes = vec![step as u8; slice.bytes()];
        Entry::new(slice, bytes)
    });
    entries.into()
}

fn save(disk: Disk, dir: &Path, step: u64, keep: Keep) -> Result<Saved, RecordError> {
    let state = TrainingState::at_step(step);
    save_on(
        disk,
        dir,
        &SingleRank::new(),
        entries(step, 0, 1),
        state,
        keep,
    )
}

/// The step of the last record, all of which is of that step.
fn last_step(dir: &Path) -> Result<u64, RecordError> {
    let mut record = ShardedRecord::open(dir)?;
    record.verify()?;
    let step = record.state(0, 1).step;
    for entry in entries(step, 0, 1) {
        assert_eq!(
            record.read(entry.slice())?,
            vec![step as u8; entry.slice().bytes()]
        );
    }
    Ok(step)
}

/// Names of records, finished or not.
fn names(dir: &Path) -> Vec<String> {
    let files = fs::read_dir(dir).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name != ".lock").collect()
}

/// A change that a loss of power may undo, because it was not synced.
#[derive(Clone, Debug, PartialEq)]
enum Volatile {
    /// A name in a directory.
    Created(PathBuf),
    /// From the name to the other.
    Renamed(PathBuf, PathBuf),
    /// A file's content.
    Content(PathBuf),
}

impl Volatile {
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

/// The other name of a record.
fn renamed(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap().to_str().unwrap();
    let complete = name
        .strip_prefix('.')
        .and_then(|name| name.strip_suffix(".partial"));
    path.with_file_name(complete.map_or_else(|| format!(".{name}.partial"), str::to_owned))
}

/// Saves with all operations from number `until` on failing. Returns the result, and the changes not synced by then.
fn save_until(dir: &Path, until: usize) -> (Result<Saved, RecordError>, Vec<Volatile>) {
    let left = Cell::new(until);
    let volatile = RefCell::new(Vec::<Volatile>::new());
    let before = |action: &'static str, path: &Path| {
        let volatile = &mut *volatile.borrow_mut();
        let here = || path.to_owned();
        if left.get() == 0 {
            if action == "write" {
                // A full disk writes what still fits.
                let file = fs::OpenOptions::new().append(true).open(path)?;
                io::Write::write_all(&mut &file, b"half")?;
            }
            return Err(ErrorKind::StorageFull.into());
        }
        left.set(left.get() - 1);
        match action {
            "make" => volatile.push(Volatile::Created(here())),
            "create" => volatile.extend([Volatile::Created(here()), Volatile::Content(here())]),
            "write" => {}
            "sync" if path.is_dir() => volatile.retain(|what| match what {
                Volatile::Created(at) | Volatile::Renamed(_, at) => at.parent() != Some(path),
                Volatile::Content(_) => true,
            }),
            "sync" => volatile.retain(|what| *what != Volatile::Content(here())),
            "rename" => volatile.push(Volatile::Renamed(here(), renamed(path))),
            // Only removals are assumed to reach the disk at once, which is the worst case.
            "remove" => volatile.retain(|what| match what {
                Volatile::Created(at) | Volatile::Content(at) => !at.starts_with(path),
                Volatile::Renamed(_, to) => to != path,
            }),
            other => panic!("{other} is no operation of a save"),
        }
        Ok(())
    };
    let saved = save(Disk { before: &before }, dir, 2, LAST);
    (saved, volatile.into_inner())
}

/// Each operation of a save fails, by an error and by a loss of power that undoes all changes that were not synced, or only the
/// content of files.
#[test]
fn every_operation_may_be_the_last() {
    let lost: [fn(&Volatile) -> bool; 3] = [
        |_| false,
        |_| true,
        |what| matches!(what, Volatile::Content(_)),
    ];
    // Into a directory with a record, and into one that is not there yet.
    for earlier in [true, false] {
        let (mut failed, mut came_through) = (0, 0);
        for (is_lost, until) in lost.iter().flat_map(|lost| (0..40).map(move |n| (lost, n))) {
            let root = tempfile::tempdir().unwrap();
            let dir = &root.path().join("runs/today");
            if earlier {
                save(Disk::PLAIN, dir, 1, Keep::All).unwrap();
            }
            let (saved, volatile) = save_until(dir, until);
            let lost = volatile.into_iter().rev().filter(is_lost);
            lost.for_each(Volatile::lose);
            let found = last_step(dir);
            match &saved {
                Ok(_) => {
                    came_through += 1;
                    assert_eq!(found.unwrap(), 2, "{until}: it said that it was saved");
                }
                Err(RecordError::Io { .. }) => {
                    failed += 1;
                    // If the sync after the last rename fails, the record is complete already.
                    match found {
                        Ok(step) => assert!(step == 2 || earlier && step == 1, "{until}"),
                        Err(RecordError::NoRecord { .. }) => assert!(!earlier, "{until}"),
                        Err(other) => panic!("{until}: {other}"),
                    }
                }
                Err(other) => panic!("{until}: {other}"),
            }
            save(Disk::PLAIN, dir, 3, Keep::default()).unwrap();
            assert_eq!(last_step(dir).unwrap(), 3);
            let left = inspect(dir).unwrap().records;
            let is_complete =
                |info: &RecordInfo| matches!(info.completeness, Completeness::Complete { .. });
            assert!(left.iter().all(is_complete), "{until}: {left:?}");
        }
        assert!(failed > 30 && came_through > 30, "{failed}, {came_through}");
    }
}

/// The new record is whole and on the disk before an old one is removed.
#[test]
fn what_is_removed_is_removed_last() {
    let dir = tempfile::tempdir().unwrap();
    save(Disk::PLAIN, dir.path(), 1, Keep::All).unwrap();
    let removed = RefCell::new(Vec::new());
    let before = |action: &'static str, path: &Path| {
        if action == "remove" {
            assert_eq!(last_step(dir.path()).unwrap(), 2);
            removed.borrow_mut().push(path.to_owned());
        }
        Ok(())
    };
    save(Disk { before: &before }, dir.path(), 2, LAST).unwrap();
    let partial = dir.path().join(".000001-step-1.partial");
    assert_eq!(removed.borrow().last(), Some(&partial));

    let (saved, volatile) = save_until(dir.path(), usize::MAX);
    assert!(saved.is_ok() && volatile.is_empty(), "{volatile:?}");
}

/// Records of many files are removed for longer than the deadline of a collective; the others wait, and take part in the next
/// collective.
#[test]
fn removing_may_take_longer_than_the_deadline() {
    const DEADLINE: Duration = Duration::from_secs(2);
    const FILE: Duration = Duration::from_millis(400);
    let half = |dir: &Path| {
        for file in 0..6 {
            fs::write(dir.join(file.to_string()), "half").unwrap();
        }
    };
    let slowly = |dir: &Path, fails: bool| -> Vec<Result<Saved, RecordError>> {
        let partial = dir.join(".000001-step-9.partial");
        let saved = ThreadGroup::spawn(2, GroupOptions::with_deadline(DEADLINE), |group| {
            let mut entries = entries(9, group.rank(), 2);
            if fails && group.rank() == 1 {
                let slice = entries[0].slice().clone();
                let partial = partial.clone();
                entries[0] = Entry::lazy(slice, move || {
                    half(&partial);
                    Err("device lost".into())
                });
            }
            let before = |action: &'static str, path: &Path| {
                if action == "remove" && !path.is_dir() {
                    sleep(FILE);
                }
                Ok(())
            };
            let disk = Disk { before: &before };
            let state = TrainingState::at_step(9);
            let saved = save_on(disk, dir, &group, entries, state, LAST);
            group.barrier("the next step").unwrap();
            saved
        });
        saved.unwrap()
    };
    // Old records.
    let dir = tempfile::tempdir().unwrap();
    for step in 1..=3 {
        let saved = save(Disk::PLAIN, dir.path(), step, Keep::All).unwrap();
        half(&saved.path);
    }
    assert!(slowly(dir.path(), false).iter().all(Result::is_ok));
    assert_eq!(names(dir.path()), ["000004-step-9"]);
    // What a save left unfinished.
    let dir = tempfile::tempdir().unwrap();
    let partial = dir.path().join(".000001-step-5.partial");
    fs::create_dir(&partial).unwrap();
    half(&partial);
    assert!(slowly(dir.path(), false).iter().all(Result::is_ok));
    assert_eq!(names(dir.path()), ["000002-step-9"]);
    // What a failed save has written.
    let dir = tempfile::tempdir().unwrap();
    let start = Instant::now();
    assert!(slowly(dir.path(), true).iter().all(Result::is_err));
    assert!(start.elapsed() > 6 * FILE);
    assert!(names(dir.path()).is_empty());
}
