//! Ranks that compute together: the collectives that ZeRO needs, over host buffers.
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
//!
//! # How it works
//!
//! Each rank has one communication thread, which runs the rank's [jobs](Pending::start) first in,
//! first out, while the rank computes. A collective starts with a small message to every other rank
//! that describes this rank's call; data is sent only after all descriptions agree. [`Collectives`]
//! composes all collectives of one exchange of bytes, the trait `Transport`, which `threads` and
//! `mpi` implement.

mod buffer;
mod call;
mod collectives;
mod end_process;
mod launcher;
mod member;
#[cfg(feature = "mpi")]
mod mpi;
mod options;
mod process_group;
mod simulated;
mod threads;

pub use buffer::{BufferDtype, HostBuffer, ReduceOp};
pub(crate) use call::balanced;
pub use call::{Operation, Sent, Split, Traffic};
pub use collectives::Collectives;
pub(crate) use collectives::Parts;
pub(crate) use end_process::finish_first;
pub use launcher::{launched, local_rank};
pub use member::{Job, Member, Pending};
#[cfg(feature = "mpi")]
pub use mpi::MpiGroup;
pub use options::{GroupFault, GroupOptions};
pub use process_group::ProcessGroup;
pub(crate) use process_group::agree_on_entries;
pub use simulated::SimulatedRank;
pub use threads::{SingleRank, ThreadGroup};
