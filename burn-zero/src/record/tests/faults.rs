//! One rank's failure is every rank's, and costs no record.

use std::io::Write;
use std::num::NonZeroUsize;

use super::*;

/// What ranks return if rank 1 gives what `bad` makes of its entries.
fn save_with_bad_rank(
    dir: &Path,
    whole: &Whole,
    bad: impl Fn(&mut Vec<Entry>) + Sync,
) -> Vec<RecordError> {
    let results = on_ranks(3, |group| {
        let mut entries = entries(whole, group.rank(), 3);
        if group.rank() == 1 {
            bad(&mut entries);
        }
        save_sharded(
            dir,
            group,
            entries,
            TrainingState::at_step(2),
            Keep::default(),
        )
    });
    results.into_iter().map(Result::unwrap_err).collect()
}

fn assert_untouched(dir: &Path, old: &Whole) {
    let names: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != ".lock")
        .collect();
    assert_eq!(names, ["000001-step-1"]);
    assert_holds(dir, old, 2);
}

#[test]
fn a_rank_that_fails_stops_all() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (few(1), few(2));
    save(
        dir.path(),
        &old,
        2,
        &TrainingState::at_step(1),
        Keep::default(),
    );

    let errors = save_with_bad_rank(dir.path(), &new, |entries| {
        let piece = entries[0].piece().clone();
        entries.insert(0, Entry::new(piece, vec![]));
    });
    assert!(
        matches!(errors[1], RecordError::ByteLength { .. }),
        "{}",
        errors[1]
    );
    for other in [0, 2] {
        let message = errors[other].to_string();
        assert_eq!(message, format!("rank 1 failed: {}", errors[1]));
    }
    assert_untouched(dir.path(), &old);

    let errors = save_with_bad_rank(dir.path(), &new, |entries| {
        let piece = entries[0].piece().clone();
        entries[0] = Entry::lazy(piece, || Err("device lost".into()));
    });
    assert!(
        errors[0].to_string().ends_with("device lost"),
        "{}",
        errors[0]
    );
    assert_untouched(dir.path(), &old);
}

#[test]
fn what_is_on_no_rank_or_on_two_is_not_saved() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (few(1), few(2));
    save(
        dir.path(),
        &old,
        2,
        &TrainingState::at_step(1),
        Keep::default(),
    );
    let errors = save_with_bad_rank(dir.path(), &new, |entries| entries.clear());
    assert!(
        matches!(errors[0], RecordError::NotCovered { .. }),
        "{}",
        errors[0]
    );
    assert!(matches!(errors[2], RecordError::OtherRank { rank: 0, .. }));

    let errors = save_with_bad_rank(dir.path(), &new, |entries| {
        let piece = Piece::new(entries[0].piece().tensor.clone(), 0..1);
        entries.push(Entry::new(piece, vec![0; 4]));
    });
    assert!(matches!(
        errors[0],
        RecordError::Overlap {
            first_rank: 0,
            second_rank: 1,
            ..
        }
    ));

    let errors = save_with_bad_rank(dir.path(), &new, |entries| {
        let again = entries.iter().find(|entry| !entry.piece().range.is_empty());
        let piece = again.unwrap().piece().clone();
        let bytes = vec![0; piece.bytes()];
        entries.push(Entry::new(piece, bytes));
    });
    assert!(
        matches!(errors[1], RecordError::GivenTwice { .. }),
        "{}",
        errors[1]
    );
    assert_untouched(dir.path(), &old);
}

#[test]
fn steps_must_agree() {
    let dir = tempfile::tempdir().unwrap();
    let whole = few(1);
    let errors = on_ranks(2, |group| {
        let state = TrainingState::at_step(7 + group.rank() as u64);
        let entries = entries(&whole, group.rank(), 2);
        save_sharded(dir.path(), group, entries, state, Keep::default()).unwrap_err()
    });
    assert_eq!(
        errors[0].to_string(),
        "rank 1 has step 8, rank 0 7: all ranks save and load the same record"
    );
}

#[test]
fn one_job_saves_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let whole = few(1);
    let spec = whole.values().next().unwrap().0.clone();
    on_ranks(1, |group| {
        let nested = Entry::lazy(Piece::whole(spec.clone()), || {
            let inner = on_ranks(1, |group| {
                save_sharded(
                    dir.path(),
                    group,
                    entries(&whole, 0, 1),
                    TrainingState::at_step(1),
                    Keep::All,
                )
            });
            let error = inner.into_iter().next().unwrap().unwrap_err();
            assert!(matches!(error, RecordError::Busy { .. }), "{error}");
            Ok(vec![0; 48].into())
        });
        save_sharded(
            dir.path(),
            group,
            vec![nested],
            TrainingState::at_step(2),
            Keep::All,
        )
        .unwrap();
    });
    assert_eq!(inspect(dir.path()).unwrap().records.len(), 1);
}

#[test]
fn as_many_records_stay_as_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let steps = || -> Vec<u64> {
        let records = inspect(dir.path()).unwrap().records;
        records.iter().map(|record| record.step).collect()
    };
    // Back to step 1 after step 3: order is that of time.
    for (step, keep, left) in [
        (1, Keep::All, vec![1]),
        (2, Keep::All, vec![1, 2]),
        (3, Keep::All, vec![1, 2, 3]),
        (1, Keep::Last(NonZeroUsize::new(3).unwrap()), vec![2, 3, 1]),
        (2, Keep::default(), vec![1, 2]),
        (3, Keep::Last(NonZeroUsize::MIN), vec![3]),
    ] {
        save(
            dir.path(),
            &few(step),
            2,
            &TrainingState::at_step(step),
            keep,
        );
        assert_eq!(steps(), left);
        assert_holds(dir.path(), &few(step), 1);
    }
}

#[test]
fn a_rank_that_cannot_load_stops_all() {
    let dir = tempfile::tempdir().unwrap();
    let whole = few(1);
    save(
        dir.path(),
        &whole,
        2,
        &TrainingState::at_step(1),
        Keep::default(),
    );
    let load = |change: fn(&mut Vec<Piece>), refuse: bool| {
        on_ranks(3, |group| {
            let mut wanted = even_pieces(&whole, group.rank(), 3);
            if group.rank() == 2 {
                change(&mut wanted);
            }
            load_sharded(dir.path(), group, None, &wanted, |_, _| {
                match refuse && group.rank() == 2 {
                    true => Err("no memory on the device".into()),
                    false => Ok(()),
                }
            })
            .unwrap_err()
            .to_string()
        })
    };
    let errors = load(
        |wanted| wanted[0].tensor.name = "model/layer.7".into(),
        false,
    );
    assert!(
        errors[2].ends_with("has no entry `model/layer.7`; nearest is `model/layer.0`"),
        "{}",
        errors[2]
    );
    assert_eq!(errors[0], format!("rank 2 failed: {}", errors[2]));
    let errors = load(|wanted| wanted[0].tensor.dtype = Dtype::BF16, false);
    assert!(errors[1].ends_with("but BF16 is wanted"), "{}", errors[1]);
    let errors = load(|wanted| wanted[0].tensor.shape = vec![12], false);
    assert!(errors[1].contains("has shape [4, 3] in"), "{}", errors[1]);
    let errors = load(|wanted| wanted[0].range.end = 13, false);
    assert!(errors[1].contains("it has 12"), "{}", errors[1]);
    let errors = load(|_| (), true);
    assert!(
        errors[0].ends_with("could not be used: no memory on the device"),
        "{}",
        errors[0]
    );
}

#[test]
fn no_record_is_an_error_that_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let none = ShardedRecord::open(&dir.path().join("nowhere")).unwrap_err();
    assert!(
        none.to_string().starts_with("no complete record in "),
        "{none}"
    );
    std::fs::create_dir(dir.path().join(".000001-step-5.partial")).unwrap();
    let partial = ShardedRecord::open_step(dir.path(), 5)
        .unwrap_err()
        .to_string();
    assert!(
        partial.starts_with("no complete record of step 5"),
        "{partial}"
    );
    assert!(partial.ends_with("(one was not finished)"), "{partial}");
    let file = dir.path().join("file");
    std::fs::File::create(&file)
        .unwrap()
        .write_all(b"x")
        .unwrap();
    assert!(matches!(
        ShardedRecord::open(&file),
        Err(RecordError::Io { .. })
    ));
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
    let RecordError::NotShared { .. } = &errors[1] else {
        panic!("{}", errors[1])
    };
    let message = errors[0].to_string();
    assert_eq!(message, format!("rank 1 failed: {}", errors[1]));
    assert!(inspect(dirs[0]).unwrap().records.is_empty());
}
