//! Waits for other ranks are events of a thread's recording.

use std::thread::sleep;
use std::time::Duration;

use burn_checkpoint::snapshot::chrome_trace;
use burn_checkpoint::trace::{self, Event, EventKind};
use burn_zero::{BufferDtype, HostBuffer, RankReduction, ReduceOp, Stage};

use crate::support::{on_each_rank, small_buckets};

fn waits(events: &[Event]) -> Vec<(Duration, u64)> {
    let of_event = |event: &Event| match event.kind {
        EventKind::Collective { time, .. } => Some((time, event.bytes)),
        _ => None,
    };
    events.iter().filter_map(of_event).collect()
}

#[test]
fn a_wait_for_a_slower_rank_is_in_the_trace() {
    const LATE: Duration = Duration::from_millis(100);
    let traces = on_each_rank(2, |group| {
        let reduction = RankReduction::new(small_buckets(Stage::Gradients), group.clone());
        reduction.expect("the same settings");
        let recording = trace::record();
        if group.rank() == 1 {
            sleep(LATE);
        }
        let buffer = HostBuffer::zeros(BufferDtype::F32, 1024);
        group.all_reduce("late", ReduceOp::Sum, buffer).unwrap();
        recording.finish()
    });
    for events in &traces {
        // Each rank sends the half that the other adds up, and the sum of its own.
        let sent: Vec<_> = waits(events).iter().map(|(_, bytes)| *bytes).collect();
        assert_eq!(sent, [4 * 1024]);
        let trace: serde_json::Value = serde_json::from_str(&chrome_trace(events)).unwrap();
        assert!(trace.to_string().contains("\"collective\""), "{trace}");
    }
    let (time, _) = waits(&traces[0])[0];
    assert!(time >= LATE / 2, "rank 0 waited {time:?}");
}
