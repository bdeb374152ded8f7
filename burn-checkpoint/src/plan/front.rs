//! Pareto fronts: the undominated pairs of bytes and time.

/// One way to process some blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    /// The least bytes that it fits into.
    pub need_bytes: u64,
    /// Forward and replay time.
    pub time_ns: u64,
}

/// The ways to process some blocks that no other way beats in both bytes and time: bytes ascend,
/// times descend.
pub(super) type Front = Vec<Point>;

/// Takes in candidates whose bytes ascend and times descend.
pub(super) fn merge(front: &mut Front, candidates: impl Iterator<Item = Point>) {
    let mut at = 0;
    for candidate in candidates {
        let fits = |point: &&Point| point.need_bytes <= candidate.need_bytes;
        at += front[at..].iter().take_while(fits).count();
        if at > 0 && front[at - 1].time_ns <= candidate.time_ns {
            continue;
        }
        if at > 0 && front[at - 1].need_bytes == candidate.need_bytes {
            at -= 1;
        }
        let beaten = |point: &&Point| point.time_ns >= candidate.time_ns;
        let beaten = front[at..].iter().take_while(beaten).count();
        front.splice(at..at + beaten, [candidate]);
    }
}

/// Keeps at most so many points, evenly spread; if two or more, the first and the last are among
/// them.
pub(super) fn thin(front: &mut Front, most: usize) {
    let points = front.len();
    if points > most {
        let kept = (0..most).map(|kept| front[kept * (points - 1) / (most - 1).max(1)]);
        *front = kept.collect();
    }
}

/// The fastest way that fits.
pub(super) fn best(points: &[Point], bytes: u64) -> Option<Point> {
    let fitting = points.partition_point(|point| point.need_bytes <= bytes);
    fitting.checked_sub(1).map(|last| points[last])
}

/// The one way to process no blocks.
pub(super) const NOTHING: &[Point] = &[Point {
    need_bytes: 0,
    time_ns: 0,
}];

/// The ways to process two things together, of which the first retains some bytes while the second
/// is processed: bytes ascend, times descend.
pub(super) fn both(
    first: &[Point],
    second: &[Point],
    retained_bytes: u64,
) -> impl Iterator<Item = Point> {
    let mut next = (!first.is_empty() && !second.is_empty()).then_some((0, 0));
    std::iter::from_fn(move || {
        let (mut a, mut b) = next?;
        let need_bytes = first[a]
            .need_bytes
            .max(second[b].need_bytes + retained_bytes);
        // The fastest points of both that also fit into these bytes.
        let fits = |point: &&Point| point.need_bytes <= need_bytes;
        a += first[a + 1..].iter().take_while(fits).count();
        let fits = |point: &&Point| point.need_bytes + retained_bytes <= need_bytes;
        b += second[b + 1..].iter().take_while(fits).count();

        next = match (first.get(a + 1), second.get(b + 1)) {
            (Some(x), Some(y)) if x.need_bytes < y.need_bytes + retained_bytes => Some((a + 1, b)),
            (_, Some(_)) => Some((a, b + 1)),
            (Some(_), None) => Some((a + 1, b)),
            (None, None) => None,
        };
        Some(Point {
            need_bytes,
            time_ns: first[a].time_ns + second[b].time_ns,
        })
    })
}
