//! A thread cannot be ended from outside: where one hangs, the process ends.

use std::hint::spin_loop;
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn_zero::group::AfterFault;
use burn_zero::{GroupFault, GroupOptions, ProcessGroup, ThreadGroup, ZeroError};

use crate::child::{ended, is_child};

const DEADLINE: Duration = Duration::from_millis(500);
const GRACE: Duration = Duration::from_secs(1);
/// Loaded machines are slow; a hang is not.
const BOUND: Duration = Duration::from_secs(40);

fn options(after_fault: AfterFault) -> GroupOptions {
    GroupOptions {
        after_fault,
        ..GroupOptions::with_deadline(DEADLINE)
    }
}

fn for_ever() -> ! {
    loop {
        spin_loop();
    }
}

/// Rank 1 never comes back, and nobody panics.
#[test]
#[ignore = "a child of the next test"]
fn rank_1_hangs() {
    if is_child() {
        let options = options(AfterFault::EndProcess { grace: GRACE });
        let _ = ThreadGroup::spawn(3, options, |group| match group.rank() {
            1 => for_ever(),
            _ => group.gather_bytes("words", Vec::new()).map(drop),
        });
    }
}

#[test]
fn a_rank_that_hangs_ends_the_process_with_the_fault() {
    let (status, text) = ended("hangs::rank_1_hangs", BOUND);
    assert_eq!(status, Some(1), "{text}");
    let lines: Vec<_> = text.lines().collect();
    let [at_once, at_the_end] = lines[..] else {
        panic!("two lines: {text}")
    };
    for line in [at_once, at_the_end] {
        assert!(line.contains("gather_bytes #0 `words`"), "{text}");
        assert!(line.contains("waited 500ms"), "{text}");
    }
    assert!(at_once.contains("; rank 1 has 1s to end"), "{text}");
    assert!(
        at_the_end.ends_with("; rank 1 does not end, so the process ends"),
        "{text}"
    );
}

/// With the default options, but for a shorter grace.
#[test]
#[ignore = "a child of the next test"]
fn rank_2_panics_while_the_others_compute() {
    if is_child() {
        let options = GroupOptions {
            after_fault: AfterFault::EndProcess { grace: GRACE },
            ..GroupOptions::default()
        };
        let _: Result<Vec<()>, _> = ThreadGroup::spawn(3, options, |group| match group.rank() {
            2 => panic!("the loss is not a number"),
            _ => for_ever(),
        });
    }
}

#[test]
fn so_does_a_panic_that_nobody_waits_for() {
    let (status, text) = ended("hangs::rank_2_panics_while_the_others_compute", BOUND);
    assert_eq!(status, Some(1), "{text}");
    let last = "rank 2 panicked: the loss is not a number; rank 0 and rank 1 do not end";
    assert!(text.contains(last), "{text}");
}

/// Rank 1 is away for longer than the deadline.
fn away(after_fault: AfterFault) -> Vec<Result<(), ZeroError>> {
    let start = Instant::now();
    let results = ThreadGroup::spawn(2, options(after_fault), |group| {
        if group.rank() == 1 {
            sleep(4 * DEADLINE);
        }
        group.barrier("step")
    });
    assert!(start.elapsed() >= 4 * DEADLINE);
    results.unwrap()
}

#[test]
fn a_rank_that_ends_in_its_grace_or_is_waited_for_ends_nothing() {
    let grace = Duration::from_secs(3600);
    for after_fault in [AfterFault::Wait, AfterFault::EndProcess { grace }] {
        for result in away(after_fault) {
            let error = result.unwrap_err();
            let ZeroError::Group(GroupFault::Deadline { missing, .. }) = error else {
                panic!("{error}")
            };
            assert_eq!(missing, [1]);
        }
    }
}

/// Nobody has failed: ranks may end at different times.
#[test]
fn ranks_that_end_at_different_times_are_waited_for() {
    let options = options(AfterFault::EndProcess {
        grace: Duration::ZERO,
    });
    let results = ThreadGroup::spawn(2, options, |group| {
        group.barrier("together").unwrap();
        sleep(group.rank() as u32 * 4 * DEADLINE);
        group.rank()
    });
    assert_eq!(results.unwrap(), [0, 1]);
}
