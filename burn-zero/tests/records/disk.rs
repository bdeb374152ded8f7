//! A save that crashes before any of its operations on the file system, or whose operations fail.
//! The log shows them.

use std::cell::{Cell, RefCell};
use std::fs;
use std::io::Write;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Once;

use burn_zero::SingleRank;

use super::*;

const LAST: Keep = Keep::Last(NonZeroUsize::MIN);

/// Called with each operation of a thread and its path, before it is made.
type Before = Box<dyn Fn(&str, &Path)>;

thread_local! {
    static BEFORE: RefCell<Option<Before>> = const { RefCell::new(None) };
}

struct Operations;

impl log::Log for Operations {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.target().starts_with("burn_zero::record")
    }

    fn log(&self, record: &log::Record) {
        if record.level() != log::Level::Trace || !self.enabled(record.metadata()) {
            return;
        }
        // Taken, because it may read records itself.
        let Some(before) = BEFORE.take() else { return };
        let text = record.args().to_string();
        let (action, path) = text.split_once(" /").unwrap();
        before(action, Path::new(&format!("/{path}")));
        BEFORE.set(Some(before));
    }

    fn flush(&self) {}
}

/// What `work` returns, in which `before` is called.
fn observed<T>(before: impl Fn(&str, &Path) + 'static, work: impl FnOnce() -> T) -> T {
    static LOGGER: Once = Once::new();
    LOGGER.call_once(|| {
        log::set_logger(&Operations).unwrap();
        log::set_max_level(log::LevelFilter::Trace);
    });
    BEFORE.set(Some(Box::new(before)));
    let done = work();
    BEFORE.set(None);
    done
}

/// The slice of one rank of two tensors whose bytes depend on the step.
fn entries_of(step: u64, rank: usize, world_size: usize) -> Vec<Entry<'static>> {
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

fn save_one(dir: &Path, step: u64, keep: Keep) -> Result<Saved, ZeroError> {
    let (state, entries) = (TrainingState::at_step(step), entries_of(step, 0, 1));
    save_sharded(dir, &SingleRank::new(), entries, state, keep)
}

/// The step of the last record, all of which is of that step.
fn last_step(dir: &Path) -> Result<u64, ZeroError> {
    let mut record = ShardedRecord::open(dir, None)?;
    let step = record.state().step;
    for entry in entries_of(step, 0, 1) {
        assert_eq!(
            record.read(entry.slice())?,
            vec![step as u8; entry.slice().bytes()]
        );
    }
    Ok(step)
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

/// Saves, and crashes before operation number `until`: then there is no result. Returns also the
/// changes not synced by then.
fn save_until(dir: &Path, until: usize) -> (Option<Result<Saved, ZeroError>>, Vec<Volatile>) {
    let volatile = Rc::new(RefCell::new(Vec::<Volatile>::new()));
    let (all, left) = (volatile.clone(), Cell::new(until));
    let before = move |action: &str, path: &Path| {
        let volatile = &mut *all.borrow_mut();
        let here = || path.to_owned();
        if matches!(action, "list" | "look at" | "open") {
            return;
        }
        if left.get() == 0 {
            if action == "write" {
                let mut file = fs::OpenOptions::new().append(true).open(path).unwrap();
                file.write_all(b"half").unwrap();
            }
            resume_unwind(Box::new("the machine stops"));
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
    };
    let save = || observed(before, || save_one(dir, 2, LAST));
    let saved = catch_unwind(AssertUnwindSafe(save)).ok();
    let volatile = volatile.take();
    (saved, volatile)
}

/// A save stops at each of its operations: killed, or by a loss of power that undoes all changes
/// that were not synced, or only the content of files.
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
                save_one(dir, 1, Keep::All).unwrap();
            }
            let (saved, volatile) = save_until(dir, until);
            let lost = volatile.into_iter().rev().filter(is_lost);
            lost.for_each(Volatile::lose);
            let found = last_step(dir);
            match saved {
                Some(saved) => {
                    came_through += 1;
                    saved.unwrap();
                    assert_eq!(found.unwrap(), 2, "{until}: it said that it was saved");
                }
                None => {
                    failed += 1;
                    // After the last rename the record is complete already.
                    match found {
                        Ok(step) => assert!(step == 2 || earlier && step == 1, "{until}"),
                        Err(ZeroError::Record(RecordFault::NoRecord { .. })) => {
                            assert!(!earlier, "{until}")
                        }
                        Err(other) => panic!("{until}: {other}"),
                    }
                }
            }
            save_one(dir, 3, Keep::default()).unwrap();
            assert_eq!(last_step(dir).unwrap(), 3);
            for left in names(dir) {
                let read = read_all(&dir.join(&left));
                assert!(read.is_ok(), "{until}: {left}");
            }
        }
        assert!(failed > 30 && came_through > 30, "{failed}, {came_through}");
    }
}

/// Something stands in the way of what a save makes, creates or renames to.
#[test]
fn what_the_file_system_refuses_costs_no_record() {
    for (refused, found) in [("make", 1), ("create", 1), ("rename", 1), ("rename", 2)] {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path();
        save_one(dir, 1, Keep::All).unwrap();
        let renames = Cell::new(0);
        let before = move |action: &str, path: &Path| {
            let in_the_way = match action {
                "rename" => renamed(path),
                _ => path.to_owned(),
            };
            if action == "rename" {
                renames.set(renames.get() + 1);
            }
            // The second one is that of the old record, whose removal may fail.
            if action == refused && (action != "rename" || renames.get() == found) {
                fs::create_dir_all(in_the_way.join("something")).unwrap();
            }
        };
        let saved = observed(before, || save_one(dir, 2, LAST));
        match found {
            1 => assert!(
                matches!(saved, Err(ZeroError::Record(RecordFault::Io { .. }))),
                "{refused}"
            ),
            _ => assert!(saved.is_ok(), "{saved:?}"),
        }
        if refused == "rename" && found == 1 {
            // What was in the way has the name of a record.
            fs::remove_dir_all(dir.join("000002-step-2")).unwrap();
        }
        assert_eq!(last_step(dir).unwrap(), found, "{refused}");
        save_one(dir, 3, LAST).unwrap();
        assert_eq!(last_step(dir).unwrap(), 3);
    }
}

/// The new record is whole and on the disk before an old one is removed.
#[test]
fn what_is_removed_is_removed_last() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().to_owned();
    save_one(&dir, 1, Keep::All).unwrap();
    let removed = Rc::new(RefCell::new(Vec::new()));
    let (all, at) = (removed.clone(), dir.clone());
    let before = move |action: &str, path: &Path| {
        if action == "remove" {
            assert_eq!(last_step(&at).unwrap(), 2);
            all.borrow_mut().push(path.to_owned());
        }
    };
    observed(before, || save_one(&dir, 2, LAST).unwrap());
    let partial = dir.join(".000001-step-1.partial");
    assert_eq!(removed.borrow().last(), Some(&partial));

    let (saved, volatile) = save_until(&dir, usize::MAX);
    assert!(
        saved.unwrap().is_ok() && volatile.is_empty(),
        "{volatile:?}"
    );
}
