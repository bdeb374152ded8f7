//! Waits for other ranks are events of a thread's recording.

use std::thread::sleep;
use std::time::Duration;

use burn_checkpoint::snapshot::chrome_trace;
use burn_checkpoint::trace::{self, EventKind};
use burn_zero::group::BufferDtype;
use burn_zero::{GroupOptions, HostBuffer, ProcessGroup, ReduceOp, ThreadGroup};

#[test]
fn a_wait_for_a_slower_rank_is_in_the_trace() {
    const LATE: Duration = Duration::from_millis(100);
    let events = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
        let recording = trace::record();
        if group.rank() == 1 {
            sleep(LATE);
        }
        let buffer = HostBuffer::zeros(BufferDtype::F32, 1024);
        group.all_reduce("late", ReduceOp::Sum, buffer).unwrap();
        recording.finish()
    });
    let events = events.expect("no rank fails");
    for events in &events {
        let waits: Vec<_> = events
            .iter()
            .filter(|event| matches!(event.kind, EventKind::Collective { .. }))
            .collect();
        let [wait] = waits[..] else {
            panic!("one collective: {events:?}");
        };
        // Each rank sends the half that the other adds up, and the sum of its own.
        assert_eq!(wait.bytes, 4 * 1024);
        let trace: serde_json::Value = serde_json::from_str(&chrome_trace(events)).unwrap();
        assert!(trace.to_string().contains("\"collective\""), "{trace}");
    }
    let EventKind::Collective { time, .. } = events[0][0].kind else {
        panic!("{:?}", events[0]);
    };
    assert!(time >= LATE / 2, "rank 0 waited {time:?}");
}
