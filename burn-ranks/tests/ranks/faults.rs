//! What ranks learn when one of them fails: the same on all, in bounded time.

use std::time::{Duration, Instant};

use burn_ranks::{
    BufferDtype, GroupFault, GroupOptions, HostBuffer, Pending, ProcessGroup, RanksError, ReduceOp,
    Split, ThreadGroup,
};

use crate::support::start_all_reduce;

/// Where a rank hangs; elsewhere nothing may depend on it.
const DEADLINE: Duration = Duration::from_millis(600);
/// Loaded machines are slow; a hang is not.
const BOUND: Duration = Duration::from_secs(20);

fn hasty<R: Send>(
    world_size: usize,
    rank: impl Fn(ThreadGroup) -> R + Sync,
) -> Result<Vec<R>, RanksError> {
    let start = Instant::now();
    let results = ThreadGroup::spawn(world_size, GroupOptions::with_deadline(DEADLINE), rank);
    assert!(start.elapsed() < BOUND, "took {:?}", start.elapsed());
    results
}

fn spawn<R: Send>(
    world_size: usize,
    rank: impl Fn(ThreadGroup) -> R + Sync,
) -> Result<Vec<R>, RanksError> {
    ThreadGroup::spawn(world_size, GroupOptions::default(), rank)
}

fn fault(error: RanksError) -> GroupFault {
    match error {
        RanksError::Group(fault) => fault,
        other => panic!("{other}"),
    }
}

#[test]
fn a_panic_ends_all_with_its_message() {
    let seen = parking_lot::Mutex::new(Vec::new());
    let options = GroupOptions::default(); // far from its deadline
    let start = Instant::now();
    let error = ThreadGroup::spawn(3, options, |group| {
        // The news may arrive while a slower rank is still in the barrier.
        let together = group.barrier("together");
        if group.rank() == 1 {
            panic!("loss is {}", f32::NAN);
        }
        let error = together
            .and_then(|()| group.all_reduce("never", ReduceOp::Sum, vec![0.0; 9].into()))
            .unwrap_err();
        seen.lock().push(error.clone());
        assert_eq!(
            group.barrier("after").unwrap_err(),
            error,
            "the group stays lost"
        );
    })
    .unwrap_err();
    assert!(start.elapsed() < BOUND);
    assert_eq!(error.to_string(), "rank 1 panicked: loss is NaN");
    assert_eq!(seen.into_inner(), [error.clone(), error]);
}

#[test]
fn a_panic_fails_collectives_under_way() {
    let error = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
        let pending: Vec<_> = (0..3)
            .map(|_| start_all_reduce(&group, "bucket", ReduceOp::Sum, vec![0.0; 9].into()))
            .collect();
        assert_eq!(group.rank(), 0, "rank 1 stops here");
        for pending in pending {
            let _ = pending.wait();
        }
        group.barrier("end").unwrap_err()
    });
    assert!(matches!(
        error,
        Err(RanksError::Group(GroupFault::PeerPanicked { rank: 1, .. }))
    ));
}

#[test]
fn a_panic_of_a_job_is_its_ranks() {
    let errors = spawn(2, |group| {
        let rank = group.rank();
        let job = Pending::start(&group, move |ranks| {
            assert_eq!(rank, 0, "rank 1 stops here");
            ranks.barrier("never")
        });
        let behind = Pending::start(&group, |ranks| ranks.barrier("behind"));
        [job.wait(), behind.wait(), group.barrier("after")].map(Result::unwrap_err)
    });
    for error in errors.unwrap().into_iter().flatten() {
        let GroupFault::PeerPanicked { rank: 1, message } = fault(error) else {
            panic!("another fault")
        };
        assert!(message.contains("rank 1 stops here"), "{message}");
    }
}

/// One rank may compile or tune kernels for minutes that the others have cached.
#[test]
fn the_default_deadline_outlives_a_slow_first_step() {
    let minutes = GroupOptions::default().deadline.as_secs() / 60;
    assert_eq!(minutes, 10);
}

#[test]
fn a_rank_that_hangs_is_named_by_all() {
    let errors = hasty(4, |group| {
        if group.rank() == 2 {
            std::thread::sleep(3 * DEADLINE);
        }
        fault(group.barrier("step 7").unwrap_err())
    })
    .unwrap();
    for error in errors {
        let GroupFault::Deadline {
            missing,
            call,
            deadline,
            ..
        } = &error
        else {
            panic!("{error}")
        };
        assert_eq!(
            (missing.as_slice(), call.as_str(), *deadline),
            ([2].as_slice(), "barrier #0 `step 7`", DEADLINE)
        );
        assert!(error.to_string().contains("for rank 2;"), "{error}");
    }
}

#[test]
fn all_ranks_that_hang_are_named() {
    let errors = hasty(4, |group| {
        if group.rank() % 2 == 1 {
            std::thread::sleep(3 * DEADLINE);
        }
        fault(group.barrier("").unwrap_err())
    })
    .unwrap();
    assert!(errors.iter().all(|error| matches!(error,
        GroupFault::Deadline { missing, .. } if missing == &[1, 3])));
}

#[test]
fn a_rank_that_leaves_is_named_at_once() {
    let start = Instant::now();
    let errors = ThreadGroup::spawn(3, GroupOptions::default(), |group| {
        group.barrier("step 0").unwrap();
        (group.rank() != 1).then(|| fault(group.barrier("step 1").unwrap_err()))
    });
    assert!(start.elapsed() < BOUND);
    for error in errors.unwrap().into_iter().flatten() {
        let GroupFault::PeerLeft {
            peer: 1,
            calls: 1,
            call,
            ..
        } = &error
        else {
            panic!("{error}")
        };
        assert_eq!(call, "barrier #1 `step 1`");
    }
}

#[test]
fn a_clone_that_outlives_its_ranks_function_makes_no_collectives() {
    let groups = spawn(2, |group| group.barrier("step 0").map(|()| group)).unwrap();
    for (rank, group) in groups.into_iter().enumerate() {
        let ended = fault(group.unwrap().barrier("step 1").unwrap_err());
        assert_eq!(ended, GroupFault::Ended { rank });
    }
}

/// Runs a call on four ranks, another one on rank 2, and returns the fault.
fn mismatch(usual: impl Fn(&ThreadGroup) + Sync, other: impl Fn(&ThreadGroup) + Sync) -> String {
    let texts = spawn(4, |group| {
        if group.rank() == 2 {
            other(&group)
        } else {
            usual(&group)
        }
        fault(group.barrier("after").unwrap_err())
    })
    .unwrap();
    for fault in &texts {
        let GroupFault::Mismatch { rank, peer, .. } = fault else {
            panic!("{fault}")
        };
        assert!((*rank == 2) != (*peer == 2), "rank 2 is one side: {fault}");
    }
    texts[0].to_string()
}

fn reduce(
    label: &'static str,
    elements: usize,
    dtype: BufferDtype,
    op: ReduceOp,
) -> impl Fn(&ThreadGroup) {
    move |group| drop(group.all_reduce(label, op, HostBuffer::zeros(dtype, elements)))
}

/// What a rank does.
type Rank = Box<dyn Fn(&ThreadGroup) + Sync>;

#[test]
fn ranks_that_differ_get_both_sides() {
    let usual = || reduce("bucket 3", 100, BufferDtype::F32, ReduceOp::Mean);
    let ours = "all_reduce #0 `bucket 3` of 100 f32, mean";
    let others: [(Rank, &str); 5] = [
        (
            Box::new(reduce("bucket 4", 100, BufferDtype::F32, ReduceOp::Mean)),
            "`bucket 4` of 100 f32, mean",
        ),
        (
            Box::new(reduce("bucket 3", 101, BufferDtype::F32, ReduceOp::Mean)),
            "`bucket 3` of 101 f32, mean",
        ),
        (
            Box::new(reduce("bucket 3", 100, BufferDtype::F16, ReduceOp::Mean)),
            "`bucket 3` of 100 f16, mean",
        ),
        (
            Box::new(reduce("bucket 3", 100, BufferDtype::F32, ReduceOp::Sum)),
            "`bucket 3` of 100 f32, sum",
        ),
        (
            Box::new(|group| drop(group.barrier("epoch 1"))),
            "barrier #0 `epoch 1`",
        ),
    ];
    for (other, theirs) in others {
        let text = mismatch(usual(), other);
        assert!(text.contains(ours) && text.contains(theirs), "{text}");
    }
}

#[test]
fn splits_and_roots_that_differ_are_found() {
    let scatter = |counts: [usize; 4]| {
        move |group: &ThreadGroup| {
            let (values, split) = (vec![0.0; 4].into(), Split::Counts(counts.to_vec()));
            drop(group.reduce_scatter("whole parameters", ReduceOp::Sum, values, split));
        }
    };
    assert!(mismatch(scatter([1, 1, 1, 1]), scatter([2, 1, 1, 0])).contains("split"));
    let broadcast = |root| {
        move |group: &ThreadGroup| drop(group.broadcast("weights", root, vec![0.0; 4].into()))
    };
    assert!(mismatch(broadcast(0), broadcast(3)).contains("from rank 3"));
    let gather = |root| {
        move |group: &ThreadGroup| {
            // Lengths may differ.
            let own = vec![0; group.rank()];
            drop(group.gather_bytes_to("state", root, own));
        }
    };
    let text = mismatch(gather(0), gather(3));
    assert!(
        text.contains("gather_bytes_to #0 `state` of 2 bytes, to rank 3"),
        "{text}"
    );
}

#[test]
fn a_skipped_collective_is_found_by_its_label() {
    let errors = spawn(2, |group| -> Result<(), RanksError> {
        for step in 0..6 {
            if group.rank() == 1 && step == 3 {
                continue; // an empty batch, say
            }
            let values = vec![1.0; 10].into();
            group.all_reduce(&format!("gradients, step {step}"), ReduceOp::Mean, values)?;
        }
        Ok(())
    });
    for error in errors.unwrap() {
        let text = error.unwrap_err().to_string();
        assert!(
            text.contains("#3 `gradients, step 3`") && text.contains("#3 `gradients, step 4`"),
            "{text}"
        );
    }
}

#[test]
fn a_rank_that_gives_up_says_why_to_all() {
    let errors = spawn(3, |group| {
        if group.rank() == 0 {
            group.abort("the disk is full");
        }
        group.barrier("write").unwrap_err().to_string()
    });
    assert_eq!(errors.unwrap(), ["rank 0 gave up: the disk is full"; 3]);
}

#[test]
fn threads_of_ones_own_that_panic_are_found() {
    let mut groups = ThreadGroup::new(2, GroupOptions::default()).unwrap();
    let second = groups.pop().unwrap();
    let panics = std::thread::spawn(move || {
        assert_eq!(second.rank(), 0, "this is rank 1");
    });
    let error = groups[0].barrier("never").unwrap_err();
    assert!(panics.join().is_err());
    assert!(
        matches!(
            error,
            RanksError::Group(GroupFault::PeerPanicked { rank: 1, .. })
        ),
        "{error}"
    );
}

#[test]
fn impossible_groups_are_refused() {
    assert!(ThreadGroup::new(0, GroupOptions::default()).is_err());
    let none = GroupOptions::with_deadline(Duration::ZERO);
    assert!(ThreadGroup::new(2, none).is_err());
}
