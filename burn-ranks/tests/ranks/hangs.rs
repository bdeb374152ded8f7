//! A thread cannot be ended from outside: where one hangs, the process ends.

use std::hint::spin_loop;
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn_ranks::{GroupFault, GroupOptions, ProcessGroup, RanksError, ThreadGroup};

use crate::child::{ended, is_child};

const DEADLINE: Duration = Duration::from_secs(1);
/// Loaded machines are slow; a hang is not.
const BOUND: Duration = Duration::from_secs(40);

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
        let options = GroupOptions::with_deadline(DEADLINE);
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
    assert!(text.contains("gather_bytes #0 `words`"), "{text}");
    assert!(text.contains("waited 1s"), "{text}");
    let end = "; the process ends, and with it rank 1";
    assert!(text.trim_end().ends_with(end), "{text}");
}

#[test]
#[ignore = "a child of the next test"]
fn rank_2_panics_while_the_others_compute() {
    if is_child() {
        let options = GroupOptions::with_deadline(DEADLINE);
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
    let last = "rank 2 panicked: the loss is not a number; the process ends, and with it rank 0 and rank 1";
    assert!(text.contains(last), "{text}");
}

/// Rank 1 is away for longer than the deadline, and back before the process would be ended.
#[test]
fn a_rank_that_ends_in_time_ends_nothing() {
    let (deadline, start) = (Duration::from_secs(3), Instant::now());
    let results = ThreadGroup::spawn(2, GroupOptions::with_deadline(deadline), |group| {
        if group.rank() == 1 {
            sleep(deadline * 4 / 3);
        }
        group.barrier("step")
    });
    assert!(start.elapsed() >= deadline * 4 / 3);
    for result in results.unwrap() {
        let error = result.unwrap_err();
        let RanksError::Group(GroupFault::Deadline { missing, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!(missing, [1]);
    }
}

/// Nobody has failed: ranks may end at different times.
#[test]
fn ranks_that_end_at_different_times_are_waited_for() {
    let options = GroupOptions::with_deadline(DEADLINE / 2);
    let results = ThreadGroup::spawn(2, options, |group| {
        group.barrier("together").unwrap();
        sleep(group.rank() as u32 * 2 * DEADLINE);
        group.rank()
    });
    assert_eq!(results.unwrap(), [0, 1]);
}
