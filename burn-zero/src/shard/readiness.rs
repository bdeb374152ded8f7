//! When a bucket's gradients are all there.

use super::ShardMap;

/// Follows one backward pass and says which buckets can be reduced.
///
/// Buckets are released from the last to the first, whatever the order in which gradients come, because all ranks must
/// reduce them in the same order; backward makes the last parameters' gradients first.
#[derive(Clone, Debug)]
pub struct Readiness {
    /// Parameters that each bucket waits for.
    missing: Vec<usize>,
    /// Buckets of each parameter.
    buckets: Vec<Vec<usize>>,
    arrived: Vec<bool>,
    /// Buckets that are not released yet: all below.
    held: usize,
}

impl Readiness {
    /// Nothing has arrived.
    pub fn new(map: &ShardMap) -> Self {
        let buckets = |parameter| map.segments(parameter).map(|(bucket, _)| bucket).collect();
        Self {
            missing: map
                .buckets()
                .iter()
                .map(|bucket| bucket.segments().len())
                .collect(),
            buckets: (0..map.parameters().len()).map(buckets).collect(),
            arrived: vec![false; map.parameters().len()],
            held: map.buckets().len(),
        }
    }

    /// Notes a parameter's gradient, the first time, and returns the buckets that are released by it, in the order in
    /// which to reduce them.
    pub fn arrive(&mut self, parameter: usize) -> Vec<usize> {
        if !std::mem::replace(&mut self.arrived[parameter], true) {
            for &bucket in &self.buckets[parameter] {
                self.missing[bucket] -= 1;
            }
        }
        let mut released = Vec::new();
        while let Some(next) = self.held.checked_sub(1)
            && self.missing[next] == 0
        {
            self.held = next;
            released.push(next);
        }
        released
    }

    /// Whether a parameter's gradient has arrived.
    pub fn has(&self, parameter: usize) -> bool {
        self.arrived[parameter]
    }

    /// Parameters whose gradients have not come. At the end of a pass they arrive as zeros.
    pub fn missing(&self) -> impl Iterator<Item = usize> {
        self.arrived
            .iter()
            .enumerate()
            .filter(|(_, arrived)| !**arrived)
            .map(|(index, _)| index)
    }
}
