//! Ranks that compute together: the collectives that ZeRO needs, over host buffers.
//!
//! # Terms
//!
//! A *rank* is one member of a group of *world size* members. A *collective* is a call that every rank makes, in the
//! same order. *Reduce* is summing or averaging over ranks, element by element.
//!
//! # What every group keeps
//!
//! - **One rounding.** Half-precision buffers are added in f32 and rounded once, at the end ([`ReduceOp`]).
//! - **The same bits.** Elements are added in the order of ranks, whichever message arrives first: all ranks hold the same bits,
//!   all groups give the same bits, and an all-reduce gives those of a reduce-scatter.
//! - **No hang.** A rank waits at most [`GroupOptions::deadline`] for the next message of another. A rank that hangs,
//!   leaves, panics or makes another call is a [`GroupFault`] that names it, on all ranks. After a fault the group is
//!   lost: every further call returns that fault. Processes that do not end by themselves are ended; a thread that does not ends
//!   the process ([`AfterFault`]).
//! - **Counted traffic.** [`ProcessGroup::traffic`]: what this rank has sent, by operation.
//!
//! # How it works
//!
//! Each rank has one communication thread, which runs the rank's [jobs](Pending::start) first in, first out, while the rank computes.
//! A collective starts with a small message to every other rank that describes this rank's call ([`Call`]); data is sent
//! only after all descriptions agree. `engine` is that thread, `transport` the trait of the data movements it needs, `thread` and `mpi`
//! its implementations.

mod agree;
mod buffer;
mod call;
mod engine;
mod fault;
mod job;
mod launcher;
#[cfg(feature = "mpi")]
mod mpi;
mod options;
mod process_group;
mod reduce;
mod single;
mod thread;
mod traffic;
mod transport;
pub(crate) mod unfinished;

pub use agree::Agree;
pub use buffer::{BufferDtype, HostBuffer};
pub use call::{Call, Operation, Split};
pub use fault::GroupFault;
pub use job::{Job, Pending};
pub use launcher::{Launched, launched, local_rank};
#[cfg(feature = "mpi")]
pub use mpi::MpiGroup;
pub(crate) use options::round;
pub use options::{AfterFault, GroupOptions};
pub use process_group::{Collectives, ProcessGroup};
pub use reduce::ReduceOp;
pub use single::SingleRank;
pub use thread::ThreadGroup;
pub use traffic::{Sent, Traffic};
