//! Removing may take longer than a collective's deadline.

use std::io;
use std::num::NonZeroUsize;
use std::thread::sleep;
use std::time::Duration;

use super::super::save::save_to;
use super::super::storage::{Disk, Output, Storage};
use super::*;

const DEADLINE: Duration = Duration::from_secs(2);
const FILE: Duration = Duration::from_millis(400);

/// Takes its time over each file that it removes.
struct Slow;

impl Storage for Slow {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        Disk.create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn Output>> {
        Disk.create_file(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        Disk.sync_dir(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Disk.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        sleep(FILE);
        Disk.remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        for _ in std::fs::read_dir(path)? {
            sleep(FILE);
        }
        Disk.remove_dir(path)
    }
}

/// Saves by two ranks that keep one record. What each returns, and of the collective that comes after it.
fn save_slowly(
    dir: &Path,
    bad: impl Fn(usize, &mut Vec<Entry>) + Sync,
) -> Vec<Result<Saved, RecordError>> {
    let whole = few(9);
    let ranks = ThreadGroup::spawn(2, GroupOptions::with_deadline(DEADLINE), |group| {
        let mut entries = entries(&whole, group.rank(), 2);
        bad(group.rank(), &mut entries);
        let state = TrainingState::at_step(9);
        let keep = Keep::Last(NonZeroUsize::MIN);
        let saved = save_to(&Slow, dir, &group, entries, state, keep);
        group.barrier("the next step").unwrap();
        saved
    });
    ranks.unwrap()
}

/// Directories of records, finished or not.
fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name != ".lock").collect()
}

#[test]
fn old_records_may_be_removed_for_longer_than_the_deadline() {
    let dir = tempfile::tempdir().unwrap();
    for step in 1..=2 {
        let state = TrainingState::at_step(step);
        save(dir.path(), &few(step), 4, &state, Keep::All);
    }
    let saved = save_slowly(dir.path(), |_, _| ());
    assert!(saved.iter().all(Result::is_ok), "{saved:?}");
    assert_eq!(names(dir.path()), ["000003-step-9"]);
}

#[test]
fn what_a_save_left_unfinished_may_be_so_too() {
    let dir = tempfile::tempdir().unwrap();
    let partial = dir.path().join(".000001-step-5.partial");
    std::fs::create_dir(&partial).unwrap();
    for file in 0..6 {
        std::fs::write(partial.join(file.to_string()), "half").unwrap();
    }
    let saved = save_slowly(dir.path(), |_, _| ());
    assert!(saved.iter().all(Result::is_ok), "{saved:?}");
    assert_eq!(names(dir.path()), ["000002-step-9"]);
}

/// The others do not come to the next collective before what failed is gone.
#[test]
fn and_what_a_failed_save_has_written() {
    let dir = tempfile::tempdir().unwrap();
    let partial = dir.path().join(".000001-step-9.partial");
    let started = std::time::Instant::now();
    let saved = save_slowly(dir.path(), |rank, entries| {
        if rank == 1 {
            let (partial, piece) = (partial.clone(), entries[0].piece().clone());
            entries[0] = Entry::lazy(piece, move || {
                for file in 0..6 {
                    std::fs::write(partial.join(file.to_string()), "half").unwrap();
                }
                Err("device lost".into())
            });
        }
    });
    assert!(saved.iter().all(Result::is_err), "{saved:?}");
    assert!(started.elapsed() > 6 * FILE);
    assert!(names(dir.path()).is_empty());
}
