//! Ranks: threads or processes that compute one thing together.
//!
//! | term | is, in the whole crate |
//! |---|---|
//! | rank | one member of a group: a thread or a process |
//! | group | [`ProcessGroup`]: the ranks that work together; the *world size* is their number |
//! | collective | a call that all ranks of a group make in the same order; its *label* names it in errors |
//! | communication thread | the one thread of a rank that runs its collectives, first in, first out |
//! | fault | [`GroupFault`]: why a group is lost, with the rank that it is about |
//! | shard | the elements that a rank owns: of a bucket, of a parameter, of the model |
//!
//! | group | its ranks |
//! |---|---|
//! | [`ThreadGroup`] | threads of this process |
//! | `MpiGroup` (feature `mpi`) | processes, started by `mpirun` or `srun`, on one machine or many |
//! | [`SingleRank`] | this one alone |
//! | [`SimulatedRank`] | one of a group of any size, without the others: what it would send, for estimates |
//!
//! [`shard`] computes which rank owns which elements: [`ShardMap`], integers only.
//!
//! # A rank that fails does not hang the others
//!
//! ```
//! use std::time::Duration;
//! use burn_ranks::{GroupOptions, ProcessGroup, ThreadGroup};
//!
//! let options = GroupOptions::with_deadline(Duration::from_secs(60));
//! let results = ThreadGroup::spawn(3, options, |group| match group.rank() {
//!     1 => Ok(()), // leaves before the others do
//!     _ => group.barrier("step 0"),
//! })?;
//! let error = results[2].as_ref().unwrap_err();
//! assert!(error.to_string().starts_with("rank 1 left after 0 collectives, but rank "), "{error}");
//! # Ok::<(), burn_ranks::RanksError>(())
//! ```
//!
//! # What every group keeps
//!
//! - **One rounding.** Half-precision buffers are added in f32 and rounded once, at the end
//!   ([`ReduceOp`]).
//! - **The same bits.** Elements are added in the order of ranks, whichever message arrives first:
//!   all ranks hold the same bits, all groups give the same bits, and an all-reduce gives those of
//!   a reduce-scatter.
//! - **No hang.** A rank waits at most [`GroupOptions::deadline`] for the next message of another.
//!   A rank that hangs, leaves, panics or makes another call is a [`GroupFault`] that names it, on
//!   all ranks. After a fault the group is lost: every further call returns that fault. A process
//!   that does not end by itself is ended; if a thread does not, its process is ended.
//! - **Counted traffic.** [`ProcessGroup::traffic`]: what this rank has sent, by operation.

mod error;
mod group;
pub mod shard;
pub mod thread;

pub use error::{BufferLength, InvalidSetting, RanksError};
#[cfg(feature = "mpi")]
pub use group::MpiGroup;
pub use group::{
    Buffer, BufferDtype, Collective, Collectives, Finish, GatheredParts, GroupFault, GroupOptions,
    HostBuffer, Job, Member, Operation, Pending, ProcessGroup, ReduceOp, Sent, SimulatedRank,
    SingleRank, Split, ThreadGroup, Traffic, Transfer, Waited, finish_first, launched, local_rank,
};
pub use shard::{Partition, ShardMap};

/// The code of the README, as doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
