//! The bands and rows of a trace made up by hand.

use std::time::Duration;

use burn_backend::DeviceId;

use super::timeline::{Band, Pass, Timeline};
use burn_checkpoint::trace::{Event, EventKind, Kind, Traced};

/// A trace of these events, each with the bytes that it adds.
fn trace(events: impl IntoIterator<Item = (EventKind, i64)>) -> Vec<Event> {
    let mut live_bytes = 0;
    let event = |(kind, bytes): (_, i64)| {
        live_bytes += bytes;
        let scope = matches!(kind, EventKind::ScopeBegin { .. } | EventKind::ScopeEnd);
        Event {
            at: Duration::ZERO,
            kind,
            bytes: bytes.unsigned_abs(),
            live_bytes: live_bytes as u64,
            device: (!scope).then(|| DeviceId::new(0, 0)),
        }
    };
    events.into_iter().map(event).collect()
}

fn traced(node: u64) -> Traced {
    let op = "float_matmul";
    Traced { op, node }
}

fn alloc(node: u64) -> EventKind {
    EventKind::Alloc(traced(node), Kind::Activation)
}

#[test]
fn scopes_are_bands_forward_and_where_they_are_replayed() {
    let begin = |label: &str| EventKind::ScopeBegin {
        label: label.to_owned(),
    };
    let (inner, outer) = (0, 1);
    let timeline = Timeline::new(&trace([
        (begin("outer"), 0),
        (begin("inner"), 0),
        (alloc(inner), 5),
        (EventKind::Evict(traced(inner)), -5),
        (EventKind::ScopeEnd, 0),
        (alloc(outer), 3),
        (EventKind::Evict(traced(outer)), -3),
        (EventKind::ScopeEnd, 0),
        (EventKind::Replay(traced(outer), Duration::ZERO), 3),
        (EventKind::Replay(traced(inner), Duration::ZERO), 5),
        (EventKind::Free(traced(inner)), -5),
    ]));
    let band = |depth, scope, label: &str, begin, end, pass| Band {
        depth,
        scope,
        label: label.into(),
        begin,
        end,
        pass,
    };
    let expected = [
        band(0, 0, "outer", 0.0, 7.0, Pass::Forward),
        band(1, 1, "inner", 1.0, 4.0, Pass::Forward),
        band(0, 0, "outer", 8.0, 9.0, Pass::Replay),
        band(1, 1, "inner", 9.0, 9.0, Pass::Replay),
    ];
    assert_eq!(timeline.bands, expected);
    assert_eq!(timeline.depth(), 2);
    assert_eq!(timeline.peak(), (9.0, 8));
    let rows = timeline.rows.iter();
    let movements: Vec<_> = rows
        .map(|row| (row.name, row.bytes, row.at.len()))
        .collect();
    assert_eq!(movements, [("evicted", 8, 2), ("replayed", 8, 2)]);
}
