//! How parameters fill buckets.

use std::ops::Range;

use super::Parameter;

/// A range of a parameter in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the parameter.
    pub parameter: usize,
    /// Elements of the parameter.
    pub range: Range<usize>,
    /// Offset of the first in the bucket.
    pub start: usize,
}

impl Segment {
    pub(super) fn new(parameter: usize, range: Range<usize>) -> Self {
        let start = 0;
        Self {
            parameter,
            range,
            start,
        }
    }

    /// Where the elements are in the bucket.
    pub fn in_bucket(&self) -> Range<usize> {
        self.start..self.start + self.range.len()
    }
}

/// The elements that are reduced or gathered in one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    pub(super) segments: Vec<Segment>,
    /// Where each rank's part starts, and the end.
    pub(super) offsets: Vec<usize>,
}

impl Bucket {
    /// The parameters' ranges, in the order in which they lie in the bucket, without gaps.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Elements of parameters.
    pub fn elements(&self) -> usize {
        self.segments
            .last()
            .map_or(0, |segment| segment.in_bucket().end)
    }

    /// Elements of parameters and padding: what is sent.
    pub fn padded_elements(&self) -> usize {
        self.offsets[self.offsets.len() - 1]
    }

    /// Elements that belong to no parameter.
    pub fn padding(&self) -> usize {
        self.padded_elements() - self.elements()
    }

    /// A rank's part of the bucket, padding included.
    pub fn part(&self, rank: usize) -> Range<usize> {
        self.offsets[rank]..self.offsets[rank + 1]
    }

    /// Length of each rank's part, for [`Split::Counts`](crate::group::Split::Counts).
    pub fn counts(&self) -> Vec<usize> {
        self.offsets
            .windows(2)
            .map(|part| part[1] - part[0])
            .collect()
    }

    /// Cuts the bucket into equal parts.
    pub(super) fn cut_equally(segments: Vec<Segment>, world_size: usize) -> Self {
        let elements = segments.last().map_or(0, |segment| segment.in_bucket().end);
        let part = elements.div_ceil(world_size);
        Self {
            segments,
            offsets: (0..=world_size).map(|rank| rank * part).collect(),
        }
    }

    /// Puts segments in the order of their owners, one part an owner.
    pub(super) fn cut_by_owner(mut owned: Vec<(usize, Segment)>, world_size: usize) -> Self {
        owned.sort_by_key(|(owner, _)| *owner);
        let mut offsets = vec![0; world_size + 1];
        let mut end = 0;
        for (owner, segment) in &mut owned {
            segment.start = end;
            end += segment.range.len();
            offsets[*owner + 1..].fill(end);
        }
        let segments = owned.into_iter().map(|(_, segment)| segment).collect();
        Self { segments, offsets }
    }

    /// The segments in a part of the bucket, cut to it.
    pub fn segments_in(&self, part: Range<usize>) -> impl Iterator<Item = Segment> {
        self.segments.iter().filter_map(move |segment| {
            let whole = segment.in_bucket();
            let at = whole.start.max(part.start)..whole.end.min(part.end);
            let first = segment.range.start + at.start.saturating_sub(whole.start);
            (!at.is_empty()).then(|| Segment {
                parameter: segment.parameter,
                range: first..first + at.len(),
                start: at.start,
            })
        })
    }
}

/// Lays parameters end to end into buckets of `capacity` elements; the last may have fewer. Empty parameters are in none.
pub(super) fn fill(parameters: &[Parameter], capacity: usize) -> Vec<Vec<Segment>> {
    let mut buckets = Vec::new();
    let mut open: Vec<Segment> = Vec::new();
    let mut filled = 0;
    for (index, parameter) in parameters.iter().enumerate() {
        let mut next = 0;
        while next < parameter.elements {
            let length = (parameter.elements - next).min(capacity - filled);
            open.push(Segment {
                parameter: index,
                range: next..next + length,
                start: filled,
            });
            next += length;
            filled += length;
            if filled == capacity {
                buckets.push(std::mem::take(&mut open));
                filled = 0;
            }
        }
    }
    if !open.is_empty() {
        buckets.push(open);
    }
    buckets
}
