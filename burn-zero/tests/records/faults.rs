//! One rank's failure is every rank's, and costs no record.

use std::fs;
use std::num::NonZeroUsize;
use std::thread::sleep;
use std::time::Duration;

use super::*;

/// What rank 1 makes of its entries, and what then is said on the ranks 0, 1 and 2: each at the end
/// of its error.
type BadRank = (fn(&mut Vec<Entry>), [&'static str; 3]);

#[test]
fn what_one_rank_gives_wrong_is_saved_by_none() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (few(1), few(2));
    try_save(dir.path(), &old, 2, 1, |_, _| ());
    let lengths = "rank 1 failed: `model/layer.0` was given 0 bytes for a slice of 24 bytes";
    let lost = "rank 1 failed: `model/layer.0` cannot be read by its owner: device lost";
    let absent = "rank 0 failed: `model/layer.0` has elements 6..12 on no rank";
    let twice = "`model/layer.0` has elements 0..1 on rank 0 and again on rank 1";
    let again = "rank 1 failed: `model/layer.0` was given twice: model/layer.0[6..12]";
    let own = |of_others: &'static str| of_others.split_once("failed: ").unwrap().1;
    let bad_ranks: [BadRank; 5] = [
        (
            |entries| entries[0] = Entry::new(entries[0].slice().clone(), vec![]),
            [lengths, own(lengths), lengths],
        ),
        (
            |entries| {
                let slice = entries[0].slice().clone();
                entries[0] = Entry::lazy(slice, || Err("device lost".into()));
            },
            [lost, own(lost), lost],
        ),
        (|entries| entries.clear(), [own(absent), absent, absent]),
        (
            |entries| {
                let slice = TensorSlice::new(entries[0].slice().tensor.clone(), 0..1);
                entries.push(Entry::new(slice, vec![0; 4]));
            },
            [twice, twice, twice],
        ),
        (
            |entries| {
                let slice = entries[0].slice().clone();
                entries.push(Entry::new(slice, vec![0; 24]));
            },
            [again, own(again), again],
        ),
    ];
    for (bad, expected) in bad_ranks {
        let saved = try_save(dir.path(), &new, 3, 2, |rank, entries| {
            if rank == 1 {
                bad(entries);
            }
        });
        for (saved, expected) in saved.into_iter().zip(expected) {
            let error = saved.unwrap_err().to_string();
            assert!(error.ends_with(expected), "{error}\n{expected}");
        }
        assert_eq!(names(dir.path()), ["000001-step-1"]);
        assert_holds(dir.path(), &old, 2);
    }

    // What differs between ranks.
    type Differ = (fn(&mut TrainingState, &mut Vec<Entry>), &'static str);
    let differ: [Differ; 3] = [
        (|state, _| state.step += 1, "rank 1 has step 3, rank 0 2"),
        (
            |state, _| drop(state.user.insert("epoch".into(), 3.into())),
            "rank 1 has user state {\"epoch\":3}, rank 0 {}",
        ),
        (
            |_, entries| {
                let mut slice = entries[0].slice().clone();
                slice.tensor.shape = vec![12];
                let bytes = vec![0; slice.bytes()];
                entries[0] = Entry::new(slice, bytes);
            },
            "rank 1 has `model/layer.0` as F32 [12], rank 0 F32 [4, 3]",
        ),
    ];
    for (change, expected) in differ {
        let errors = on_ranks(2, |group| {
            let mut state = TrainingState::at_step(2);
            let mut entries = entries(&new, group.rank(), 2);
            if group.rank() == 1 {
                change(&mut state, &mut entries);
            }
            let saved = save_sharded(dir.path(), group, entries, state, Keep::default());
            saved.unwrap_err().to_string()
        });
        let all = "all ranks save and load the same record";
        assert!(
            errors[1].contains(&format!("{expected}: {all}")),
            "{}",
            errors[1]
        );
    }
}

#[test]
fn the_two_ranks_whose_state_differs_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let whole = few(1);
    let errors = on_ranks(3, |group| {
        let mut state = TrainingState::at_step(1);
        // Rank 0 has no state of this parameter.
        if group.rank() > 0 {
            state.optimizer = serde_json::json!({ "time": group.rank() });
        }
        let entries = entries(&whole, group.rank(), 3);
        let saved = save_sharded(dir.path(), group, entries, state, Keep::default());
        saved.unwrap_err().to_string()
    });
    for error in errors {
        assert!(
            error.contains("rank 2 has optimizer state 2, rank 1 1"),
            "{error}"
        );
    }
}

#[test]
fn only_ranges_that_can_be_are_taken() {
    let dir = tempfile::tempdir().unwrap();
    let whole = TensorSpec::new("model/blocks.0.größe", Dtype::U8, [2, 3]);
    let huge = TensorSpec::new("a", Dtype::F32, [usize::MAX / 2, 1]);
    for (tensor, range, is_good) in [
        (whole, 0..6, true),
        (TensorSpec::new("a", Dtype::F32, [2, 3]), 4..7, false),
        (huge, 0..1, false),
        (TensorSpec::new("a", Dtype::F4, [2]), 0..2, false),
    ] {
        let name = tensor.name.clone();
        let slice = TensorSlice::new(tensor, range);
        let bytes = vec![0; slice.bytes()];
        let entries = vec![Entry::new(slice, bytes)];
        let state = TrainingState::at_step(1);
        let group = burn_zero::SingleRank::new();
        let saved = save_sharded(dir.path(), &group, entries, state, Keep::All);
        assert_eq!(saved.is_ok(), is_good, "{name}: {saved:?}");
    }
}

#[test]
fn a_rank_that_writes_for_longer_than_the_deadline_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let options = GroupOptions::with_deadline(Duration::from_millis(600));
    let saved = ThreadGroup::spawn(3, options, |group| {
        let tensor = TensorSpec::new("model/slow", Dtype::U8, [1]);
        let slow = Entry::lazy(TensorSlice::whole(tensor), || {
            sleep(Duration::from_millis(1800));
            Ok(vec![0].into())
        });
        let entries = (group.rank() == 1).then_some(slow).into_iter().collect();
        let state = TrainingState::at_step(1);
        save_sharded(dir.path(), &group, entries, state, Keep::All)
    });
    let error = saved.unwrap().swap_remove(0).unwrap_err().to_string();
    assert!(
        error.contains("write a record") && error.contains("for rank 1"),
        "{error}"
    );
}

#[test]
fn as_many_records_stay_as_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    // Back to step 1 after step 3: order is that of time.
    for (step, keep, left) in [
        (1, Keep::All, vec![1]),
        (2, Keep::All, vec![1, 2]),
        (3, Keep::All, vec![1, 2, 3]),
        (1, Keep::Last(NonZeroUsize::new(3).unwrap()), vec![2, 3, 1]),
        (2, Keep::default(), vec![1, 2]),
        (3, Keep::Last(NonZeroUsize::MIN), vec![3]),
    ] {
        let state = TrainingState::at_step(step);
        save(dir.path(), &few(step), 2, &state, keep);
        let steps: Vec<_> = names(dir.path())
            .iter()
            .map(|name| name.rsplit('-').next().unwrap().parse::<u64>().unwrap())
            .collect();
        assert_eq!(steps, left);
        assert_holds(dir.path(), &few(step), 1);
    }
}

#[test]
fn a_rank_that_cannot_load_stops_all() {
    let dir = tempfile::tempdir().unwrap();
    let whole = few(1);
    try_save(dir.path(), &whole, 2, 1, |_, _| ());
    // What rank 2 wants, and whether it takes what it gets.
    type Case = (fn(&mut TensorSlice), bool, &'static str);
    let cases: [Case; 5] = [
        (
            |slice| slice.tensor.name = "model/layer.7".into(),
            true,
            "has no entry `model/layer.7`",
        ),
        (
            |slice| slice.tensor.dtype = Dtype::BF16,
            true,
            "has `model/layer.0` as F32, but BF16 is wanted",
        ),
        (
            |slice| slice.tensor.shape = vec![12],
            true,
            "has `model/layer.0` of shape [4, 3], but [12] is wanted",
        ),
        (
            |slice| slice.range.end = 13,
            true,
            "has 12 elements, of which 12..13 are no range",
        ),
        (
            |_| (),
            false,
            "was read, but could not be used: no memory on the device",
        ),
    ];
    for (change, takes, expected) in cases {
        let errors = on_ranks(3, |group| {
            let mut wanted = even_slices(&whole, group.rank(), 3);
            if group.rank() == 2 {
                change(&mut wanted[0]);
            }
            let loaded = load_sharded(dir.path(), group, None, &wanted, |_, _| {
                match takes || group.rank() != 2 {
                    true => Ok(()),
                    false => Err("no memory on the device".into()),
                }
            });
            loaded.unwrap_err().to_string()
        });
        assert!(errors[2].ends_with(expected), "{}", errors[2]);
        assert_eq!(errors[0], format!("rank 2 failed: {}", errors[2]));
        assert_eq!(errors[1], errors[0]);
    }
}

#[test]
fn no_record_is_an_error_that_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let none = ShardedRecord::open(&dir.path().join("nowhere"), None).unwrap_err();
    let none = none.to_string();
    assert!(none.starts_with("no complete record in "), "{none}");
    fs::create_dir(dir.path().join(".000001-step-5.partial")).unwrap();
    let partial = ShardedRecord::open(dir.path(), Some(5))
        .unwrap_err()
        .to_string();
    assert!(
        partial.starts_with("no complete record of step 5"),
        "{partial}"
    );
    assert!(partial.ends_with("(1 not finished)"), "{partial}");
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    // One that cannot be looked for may be there.
    for dir in [file, dir.path().join("long".repeat(100))] {
        let error = ShardedRecord::open(&dir, None).unwrap_err();
        assert!(
            matches!(error, ZeroError::Record(RecordFault::Io { .. })),
            "{error}"
        );
    }
}

/// Each rank would write into a file system of its own.
#[test]
fn a_directory_that_ranks_do_not_share_is_named() {
    let (own, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let dirs = [own.path(), other.path()];
    let whole = few(1);
    let errors = on_ranks(2, |group| {
        let entries = entries(&whole, group.rank(), 2);
        let state = TrainingState::at_step(1);
        save_sharded(dirs[group.rank()], group, entries, state, Keep::All).unwrap_err()
    });
    let named = errors[1].to_string();
    assert!(
        named.contains(&other.path().display().to_string()),
        "{named}"
    );
    assert_eq!(
        errors[0].to_string(),
        format!("rank 1 failed: {}", errors[1])
    );
    assert!(names(dirs[0]).is_empty());
}
