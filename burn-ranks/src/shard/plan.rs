//! The buckets of gradients during backward, and the order of their reduction.

use std::ops::Range;

use super::{Bucket, ShardMap};

/// The buckets of gradients, in the order in which they are reduced: the same on every rank.
///
/// The map decides which rank owns an element; a plan only which gradients share a bucket: those
/// that are complete at about the same time, so that no bucket waits for a much later gradient. So
/// a plan can change while the map, on which optimizer state and records depend, must not.
#[derive(Clone, Debug)]
pub struct ReducePlan {
    buckets: Vec<Bucket>,
    /// By parameter, the buckets that hold elements of it.
    buckets_of: Vec<Vec<usize>>,
}

impl ReducePlan {
    /// Buckets of the map's size, filled with the parameters of `order`, then with all others from
    /// the last to the first. Each bucket is cut by owner, without padding.
    pub fn in_order(map: &ShardMap, order: &[usize]) -> Self {
        let mut is_placed = vec![false; map.parameters().len()];
        let rest = (0..is_placed.len()).rev();
        let all = order.iter().copied().chain(rest);
        Self::of(
            map,
            all.filter(|&parameter| !core::mem::replace(&mut is_placed[parameter], true)),
        )
    }

    /// Buckets of these parameters only.
    pub fn of(map: &ShardMap, parameters: impl Iterator<Item = usize>) -> Self {
        let buckets = map.fill(parameters);
        let mut buckets_of = vec![Vec::new(); map.parameters().len()];
        for (index, bucket) in buckets.iter().enumerate() {
            for segment in bucket.segments() {
                let of: &mut Vec<usize> = &mut buckets_of[segment.parameter];
                if of.last() != Some(&index) {
                    of.push(index);
                }
            }
        }
        Self {
            buckets,
            buckets_of,
        }
    }

    /// The buckets, in the order in which they are reduced.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The buckets that hold elements of a parameter, ascending.
    pub fn buckets_of(&self, parameter: usize) -> &[usize] {
        &self.buckets_of[parameter]
    }
}

/// Tracks one backward pass and releases the buckets of a [`ReducePlan`] in the order of the plan,
/// whatever the order of the gradients, because all ranks must reduce them in the same order.
#[derive(Clone, Debug)]
pub struct Progress {
    /// By bucket, the number of parameters that it waits for.
    missing: Vec<usize>,
    arrived: Vec<bool>,
    released: usize,
}

impl Progress {
    /// The progress before the first gradient.
    pub fn new(plan: &ReducePlan) -> Self {
        let mut missing = vec![0; plan.buckets.len()];
        plan.buckets_of
            .iter()
            .flatten()
            .for_each(|&bucket| missing[bucket] += 1);
        Self {
            missing,
            arrived: vec![false; plan.buckets_of.len()],
            released: 0,
        }
    }

    /// Notes a parameter's gradient, which counts once, and returns the buckets that it releases,
    /// in the order of reduction.
    pub fn arrive(&mut self, plan: &ReducePlan, parameter: usize) -> Range<usize> {
        if !core::mem::replace(&mut self.arrived[parameter], true) {
            for &bucket in plan.buckets_of(parameter) {
                self.missing[bucket] -= 1;
            }
        }
        let first = self.released;
        let full = self.missing[first..]
            .iter()
            .take_while(|&&missing| missing == 0);
        self.released += full.count();
        first..self.released
    }

    /// Whether a parameter's gradient was noted.
    pub fn has(&self, parameter: usize) -> bool {
        self.arrived[parameter]
    }

    /// Parameters without a noted gradient. At the end of a pass they count as zeros.
    pub fn missing(&self) -> Vec<usize> {
        let all = 0..self.arrived.len();
        all.filter(|&parameter| !self.arrived[parameter]).collect()
    }
}
