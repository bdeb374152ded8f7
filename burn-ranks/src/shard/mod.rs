//! Which rank owns which elements: integer arithmetic.
//!
//! # Terms
//!
//! *Parameters* have a fixed order and a number of *elements* each. They are laid end to end and
//! cut into *buckets*: a large parameter may span several, a bucket may hold many. Each bucket is
//! cut into one part a rank. A rank's *shard* is its parts of all buckets. A *segment* is a range
//! of one parameter in a bucket, which one rank owns. *Padding* is what the flat partition adds
//! behind a bucket's elements to make all ranks' parts equally long; it belongs to no parameter and
//! is never saved.
//!
//! # Two partitions
//!
//! | [`Partition`] | a bucket's parts | for |
//! |---|---|---|
//! | `Flat` | equally long, cutting through parameters; at most world size - 1 elements of padding in all | elementwise optimizers |
//! | `Whole` | the parameters of each rank, whole, balanced by size over the model; no padding | optimizers that need a parameter's shape or norm |
//!
//! `map` cuts and assigns; `plan` orders the reduction of gradients during backward.

mod map;
mod plan;

pub use map::{Bucket, Parameter, Partition, Segment, ShardMap};
pub use plan::{Progress, ReducePlan};

/// The offsets of parts whose lengths differ by at most 1, one a rank, and the end.
///
/// ```
/// assert_eq!(burn_ranks::shard::balanced_offsets(10, 4), [0, 3, 6, 8, 10]);
/// ```
pub fn balanced_offsets(elements: usize, world_size: usize) -> Vec<usize> {
    let (each, longer) = (elements / world_size, elements % world_size);
    (0..=world_size)
        .map(|rank| rank * each + rank.min(longer))
        .collect()
}
