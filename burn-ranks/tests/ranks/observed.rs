//! Waits for other ranks, as an observer sees them.

use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;

use burn_ranks::{
    BufferDtype, GroupOptions, HostBuffer, Pending, ProcessGroup, RanksError, ReduceOp,
    ThreadGroup, Waited,
};

fn all_reduce(group: &ThreadGroup) {
    let buffer = HostBuffer::zeros(BufferDtype::F32, 1024);
    group.all_reduce("late", ReduceOp::Sum, buffer).unwrap();
}

/// The waits for one collective that rank 1 joins after `late`, by rank.
fn waits(late: Duration) -> Vec<Vec<Waited>> {
    let ranks = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
        let waits = Arc::new(Mutex::new(Vec::new()));
        let seen = waits.clone();
        group.observe_waits(Arc::new(move |wait| seen.lock().unwrap().push(*wait)));
        if group.rank() == 1 {
            sleep(late);
        }
        all_reduce(&group.clone()); // a clone is the same rank
        waits.lock().unwrap().clone()
    });
    ranks.expect("no rank fails")
}

#[test]
fn a_wait_for_a_slower_rank_has_its_time_and_bytes() {
    const LATE: Duration = Duration::from_millis(100);
    let ranks = waits(LATE);
    for waits in &ranks {
        // Each rank sends the half that the other adds up, and the sum of its own.
        let sent: Vec<_> = waits.iter().map(|wait| wait.sent_bytes).collect();
        assert_eq!(sent, [4 * 1024]);
    }
    let waited = ranks[0][0].time;
    assert!(waited >= LATE / 2, "rank 0 waited {waited:?}");
}

/// The bytes are those of the job, also if it has ended before it is waited for.
#[test]
fn a_wait_for_a_job_that_has_ended_has_its_bytes() {
    let ranks = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
        let waits = Arc::new(Mutex::new(Vec::new()));
        let seen = waits.clone();
        group.observe_waits(Arc::new(move |wait| {
            seen.lock().unwrap().push(wait.sent_bytes)
        }));
        let sum = Pending::start(&group, |ranks| {
            let buffer = HostBuffer::zeros(BufferDtype::F32, 1024);
            ranks.all_reduce("early", ReduceOp::Sum, buffer)
        });
        // A later job, which ends after it.
        group.barrier("it has ended")?;
        sum.wait()?;
        let sent = waits.lock().unwrap().clone();
        Ok::<_, RanksError>(sent[1])
    });
    let sent: Result<Vec<_>, _> = ranks.expect("no rank fails").into_iter().collect();
    assert_eq!(sent, Ok(vec![4 * 1024; 2]));
}

#[test]
fn the_last_observer_is_called() {
    let sum = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
        let calls = Arc::new(Mutex::new([0; 2]));
        for observer in 0..2 {
            let calls = calls.clone();
            group.observe_waits(Arc::new(move |_| calls.lock().unwrap()[observer] += 1));
            all_reduce(&group);
        }
        all_reduce(&group);
        *calls.lock().unwrap()
    });
    assert_eq!(sum, Ok(vec![[1, 2]; 2]));
}
