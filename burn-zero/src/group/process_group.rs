//! The one interface to other ranks.

use std::fmt::Debug;
use std::time::Duration;

use super::{
    GroupOptions, HostBuffer, Output, Pending, PendingBuffer, PendingBytes, ReduceOp, Request,
    Split, Task, Traffic,
};
use crate::ZeroError;

/// One rank's view of a group of ranks. Object-safe: hold it as `Arc<dyn ProcessGroup>`.
///
/// All ranks must make the same calls with the same labels in the same order, from one thread at a time. Buffers are
/// taken and given back. The `start_` forms return at once; calls run in the order in which they were started.
///
/// Small values are agreed on by the methods of [`Agree`](super::Agree).
///
/// ```
/// use burn_zero::{GroupOptions, ProcessGroup, ReduceOp, ThreadGroup};
///
/// let sums = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
///     let gradients = vec![1.0 + group.rank() as f32; 3];
///     group.all_reduce("gradients, step 0", ReduceOp::Sum, gradients.into())
/// })?;
/// assert!(sums.into_iter().all(|sum| sum == Ok(vec![3.0; 3].into())));
/// # Ok::<(), burn_zero::ZeroError>(())
/// ```
///
/// # Errors
///
/// All calls fail with [`ZeroError::Group`] if a rank hangs, leaves, panics or calls something else, and with
/// [`ZeroError::BufferLength`] or [`ZeroError::NoSuchRank`] if the request makes no sense; the latter send nothing.
///
/// # Cost
///
/// With `N` ranks and `L` elements a rank sends `L (N - 1) / N` elements in a reduce-scatter or an all-gather, and twice
/// as many in an all-reduce and at a broadcast's root. Byte strings go to every other rank in
/// [`gather_bytes`](Self::gather_bytes), and once, to the root, in [`gather_bytes_to`](Self::gather_bytes_to).
pub trait ProcessGroup: Send + Sync + Debug {
    /// This rank's number, from 0 to the world size - 1.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Starts a collective: what all other methods use.
    fn submit(&self, request: Request) -> Pending;

    /// Ends the group with a reason: all ranks get [`GroupFault::Aborted`](super::GroupFault::Aborted). Ranks that are
    /// processes of an MPI job are ended as well; the reason is printed.
    fn abort(&self, reason: &str);

    /// How long other ranks wait for this one: [`GroupOptions::deadline`]. Whoever works longer between collectives
    /// joins in some that say so.
    fn deadline(&self) -> Duration {
        GroupOptions::default().deadline
    }

    /// What this rank has sent so far.
    fn traffic(&self) -> Traffic;

    /// Adds `text` to all further calls, so that ranks that declare something else stop at their next collective, which shows
    /// both, instead of training on. For settings, and for where a rank is in a loop of one's own, at no collective of its own:
    /// `group.declare_settings(&format!("iteration {iteration}"))`. Of a long text the beginning is shown and a hash compared.
    fn declare_settings(&self, text: &str);

    /// Sum or mean of all ranks' buffers.
    fn all_reduce(
        &self,
        label: &str,
        op: ReduceOp,
        buffer: HostBuffer,
    ) -> Result<HostBuffer, ZeroError> {
        self.start_all_reduce(label, op, buffer).wait()
    }

    /// Starts [`all_reduce`](Self::all_reduce).
    fn start_all_reduce(&self, label: &str, op: ReduceOp, buffer: HostBuffer) -> PendingBuffer {
        PendingBuffer(self.submit(Request::new(label, Task::AllReduce { op, buffer })))
    }

    /// This rank's part of the sum or mean of all ranks' buffers.
    fn reduce_scatter(
        &self,
        label: &str,
        op: ReduceOp,
        buffer: HostBuffer,
        split: Split,
    ) -> Result<HostBuffer, ZeroError> {
        self.start_reduce_scatter(label, op, buffer, split).wait()
    }

    /// Starts [`reduce_scatter`](Self::reduce_scatter).
    fn start_reduce_scatter(
        &self,
        label: &str,
        op: ReduceOp,
        buffer: HostBuffer,
        split: Split,
    ) -> PendingBuffer {
        PendingBuffer(self.submit(Request::new(
            label,
            Task::ReduceScatter { op, buffer, split },
        )))
    }

    /// All ranks' parts, one behind the other.
    fn all_gather(
        &self,
        label: &str,
        part: HostBuffer,
        split: Split,
    ) -> Result<HostBuffer, ZeroError> {
        self.start_all_gather(label, part, split, None).wait()
    }

    /// Starts [`all_gather`](Self::all_gather). The result is written into the memory of `into`, if given: as long as
    /// the result, of the same type.
    fn start_all_gather(
        &self,
        label: &str,
        part: HostBuffer,
        split: Split,
        into: Option<HostBuffer>,
    ) -> PendingBuffer {
        PendingBuffer(self.submit(Request::new(label, Task::AllGather { part, split, into })))
    }

    /// The root's buffer; other ranks pass one of the same length.
    fn broadcast(
        &self,
        label: &str,
        root: usize,
        buffer: HostBuffer,
    ) -> Result<HostBuffer, ZeroError> {
        self.start_broadcast(label, root, buffer).wait()
    }

    /// Starts [`broadcast`](Self::broadcast).
    fn start_broadcast(&self, label: &str, root: usize, buffer: HostBuffer) -> PendingBuffer {
        PendingBuffer(self.submit(Request::new(label, Task::Broadcast { root, buffer })))
    }

    /// Waits until all ranks are here.
    fn barrier(&self, label: &str) -> Result<(), ZeroError> {
        self.submit(Request::new(label, Task::Barrier))
            .wait()
            .map(drop)
    }

    /// Every rank's byte string, in the order of ranks; lengths may differ. For metrics and manifests.
    fn gather_bytes(&self, label: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, ZeroError> {
        self.submit(Request::new(label, Task::GatherBytes(bytes)))
            .wait()
            .map(Output::into_bytes)
    }

    /// On the root every rank's byte string, in the order of ranks; `None` elsewhere. Lengths may differ. For what one rank
    /// writes or shows.
    fn gather_bytes_to(
        &self,
        label: &str,
        root: usize,
        bytes: Vec<u8>,
    ) -> Result<Option<Vec<Vec<u8>>>, ZeroError> {
        self.start_gather_bytes_to(label, root, bytes).wait()
    }

    /// Starts [`gather_bytes_to`](Self::gather_bytes_to).
    fn start_gather_bytes_to(&self, label: &str, root: usize, bytes: Vec<u8>) -> PendingBytes {
        PendingBytes(self.submit(Request::new(label, Task::GatherBytesTo { root, bytes })))
    }
}
