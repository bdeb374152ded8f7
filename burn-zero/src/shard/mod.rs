//! Which rank owns which elements: integers, and nothing of Burn.
//!
//! # Terms
//!
//! *Parameters* come in a fixed order, by path, and have so many *elements*. They are laid end to end and cut into
//! *buckets*, the units of communication: a large parameter may span several, a bucket may hold many. Each bucket is cut
//! into one part a rank. A rank's *shard* is its parts of all buckets, end to end. A *piece* is a range of one parameter
//! that a rank owns. *Padding* is what the flat partition adds behind a bucket's elements to give all ranks equally
//! much; it belongs to no parameter and is never saved.
//!
//! # Two partitions
//!
//! | [`Partition`] | a bucket's parts | for |
//! |---|---|---|
//! | `Flat` | equally long, cutting through parameters; at most world size - 1 elements of padding in all | elementwise optimizers |
//! | `Whole` | the parameters of each rank, whole, balanced by size over the model; no padding | optimizers that need a parameter's shape or norm |
//!
//! `map` is the map, `bucket` how parameters fill buckets, `whole` how whole parameters are dealt to ranks, `readiness`
//! when a bucket's gradients are there.

mod bucket;
mod map;
mod readiness;
mod whole;

pub use bucket::{Bucket, Segment};
pub use map::{Parameter, Partition, Piece, ShardMap};
pub use readiness::Readiness;
