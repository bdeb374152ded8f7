//! Pareto fronts: the undominated pairs of bytes and time.

/// One way to process some blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    /// The least bytes that it fits into.
    pub need_bytes: u64,
    /// Forward and replay time.
    pub time_ns: u64,
}

/// The ways to process some blocks that no other way beats in both bytes and time: bytes ascend, times descend.
#[derive(Clone, Debug, Default)]
pub(super) struct Front(Vec<Point>);

impl Front {
    /// All its points.
    pub fn points(&self) -> &[Point] {
        &self.0
    }

    /// Takes in candidates whose bytes ascend and times descend.
    pub fn extend(&mut self, candidates: impl Iterator<Item = Point>) {
        let mut at = 0;
        for candidate in candidates {
            let ahead = &self.0[at..];
            at += ahead
                .iter()
                .take_while(|point| point.need_bytes <= candidate.need_bytes)
                .count();
            if at > 0 && self.0[at - 1].time_ns <= candidate.time_ns {
                continue;
            }
            if at > 0 && self.0[at - 1].need_bytes == candidate.need_bytes {
                at -= 1;
            }
            let beaten = self.0[at..]
                .iter()
                .take_while(|point| point.time_ns >= candidate.time_ns)
                .count();
            self.0.splice(at..at + beaten, [candidate]);
        }
    }

    /// Keeps at most so many points, evenly spread; if two or more, the first and the last are among them.
    pub fn thin(&mut self, most: usize) {
        let points = self.0.len();
        if points <= most {
            return;
        }
        let step = |kept: usize| kept * (points - 1) / (most - 1).max(1);
        self.0 = (0..most).map(|kept| self.0[step(kept)]).collect();
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

/// The ways to process two things together, of which the first retains some bytes while the second is processed: bytes
/// ascend, times descend.
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
