//! Ranks that compute together: collectives over buffers.
//!
//! Each rank has one communication thread, which runs the rank's [jobs](Pending::start) first in,
//! first out, while the rank computes. A collective starts with a small message to every other rank
//! that describes this rank's call; data is sent only after all descriptions agree. So far it is
//! [`Collectives`], for each [`Buffer`]. A [`HostBuffer`] composes its collectives of one exchange
//! of bytes, the trait `Transport`, which `threads` and `mpi` implement.

mod buffer;
mod call;
mod collectives;
mod end_process;
mod launcher;
mod member;
#[cfg(feature = "mpi")]
mod mpi;
mod options;
mod part;
mod process_group;
mod queue;
mod simulated;
mod threads;
mod transfer;
mod transport;

pub use buffer::{BufferDtype, HostBuffer, ReduceOp};
pub use call::{Operation, Sent, Split, Traffic};
pub use collectives::{Collectives, GatheredParts, Job};
pub use end_process::{Finish, finish_first};
pub use launcher::{launched, local_rank};
pub use member::{Member, Pending};
#[cfg(feature = "mpi")]
pub use mpi::MpiGroup;
pub use options::{GroupFault, GroupOptions};
pub use process_group::ProcessGroup;
pub use queue::Waited;
pub use simulated::SimulatedRank;
pub use threads::{SingleRank, ThreadGroup};
pub use transfer::{Buffer, Collective, Transfer};
