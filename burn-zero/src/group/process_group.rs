//! The interfaces to other ranks: for a rank's program, and for jobs on its communication thread.

use std::{fmt::Debug, time::Duration};

use super::{GroupOptions, HostBuffer, Job, Pending, ReduceOp, Split, Traffic};
use crate::ZeroError;

/// One rank's view of a group of ranks. Object-safe: hold it as `Arc<dyn ProcessGroup>`.
///
/// All ranks must make the same calls with the same labels in the same order. Each rank has one communication thread, which runs
/// its collectives in the order of submission, from any thread. Buffers are taken by value and returned.
///
/// Every method that is a collective waits for its end. [`Pending::start`] does not: it submits a job with collectives to the
/// communication thread. Small values are agreed on by the methods of [`Agree`](super::Agree).
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
/// All collectives fail with [`ZeroError::Group`] if a rank hangs, leaves, panics or makes another call, and with
/// [`ZeroError::BufferLength`] or [`ZeroError::NoSuchRank`] if the request is invalid, before anything is sent.
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

    /// Submits a job to this rank's communication thread and returns at once; a group of one rank may run it before it returns. See
    /// [`Pending::start`].
    fn submit(&self, job: Job);

    /// Ends the group with a reason: all ranks get [`GroupFault::Aborted`](super::GroupFault::Aborted). Ranks that are
    /// processes of an MPI job are ended as well; the reason is printed.
    fn abort(&self, reason: &str);

    /// How long other ranks wait for this one: [`GroupOptions::deadline`]. Work that takes longer must join collectives in between.
    fn deadline(&self) -> Duration {
        GroupOptions::default().deadline
    }

    /// What this rank has sent so far.
    fn traffic(&self) -> Traffic;

    /// Adds `text` to all later calls, so that ranks with different texts stop at their next collective, with both texts in the error.
    /// For settings, and for the position in one's own training loop, without an additional collective:
    /// `group.declare_settings(&format!("iteration {iteration}"))`. A long text is compared by its hash; its beginning is shown.
    fn declare_settings(&self, text: &str);

    /// Sum or mean of all ranks' buffers.
    fn all_reduce(
        &self,
        label: &str,
        op: ReduceOp,
        buffer: HostBuffer,
    ) -> Result<HostBuffer, ZeroError> {
        let label = label.to_owned();
        Pending::start(self, move |ranks| ranks.all_reduce(&label, op, buffer)).wait()
    }

    /// This rank's part of the sum or mean of all ranks' buffers.
    fn reduce_scatter(
        &self,
        label: &str,
        op: ReduceOp,
        buffer: HostBuffer,
        split: Split,
    ) -> Result<HostBuffer, ZeroError> {
        let label = label.to_owned();
        Pending::start(self, move |ranks| {
            ranks.reduce_scatter(&label, op, buffer, &split)
        })
        .wait()
    }

    /// All ranks' parts, concatenated in the order of ranks.
    fn all_gather(
        &self,
        label: &str,
        part: HostBuffer,
        split: Split,
    ) -> Result<HostBuffer, ZeroError> {
        self.start_all_gather(label, part, split, None).wait()
    }

    /// Starts [`all_gather`](Self::all_gather). The result is written into the memory of `into`, if given, which has the length
    /// and the type of the result.
    fn start_all_gather(
        &self,
        label: &str,
        part: HostBuffer,
        split: Split,
        into: Option<HostBuffer>,
    ) -> Pending<HostBuffer> {
        let label = label.to_owned();
        Pending::start(self, move |ranks| {
            ranks.all_gather(&label, part, &split, into)
        })
    }

    /// The root's buffer; other ranks pass one of the same length.
    fn broadcast(
        &self,
        label: &str,
        root: usize,
        buffer: HostBuffer,
    ) -> Result<HostBuffer, ZeroError> {
        let label = label.to_owned();
        Pending::start(self, move |ranks| ranks.broadcast(&label, root, buffer)).wait()
    }

    /// Waits until all ranks have called it.
    fn barrier(&self, label: &str) -> Result<(), ZeroError> {
        let label = label.to_owned();
        Pending::start(self, move |ranks| ranks.barrier(&label)).wait()
    }

    /// Every rank's byte string, in the order of ranks; lengths may differ. For metrics and manifests.
    fn gather_bytes(&self, label: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, ZeroError> {
        let label = label.to_owned();
        Pending::start(self, move |ranks| ranks.gather_bytes(&label, bytes)).wait()
    }

    /// On the root every rank's byte string, in the order of ranks; `None` elsewhere. Lengths may differ. For what one rank
    /// writes or shows.
    fn gather_bytes_to(
        &self,
        label: &str,
        root: usize,
        bytes: Vec<u8>,
    ) -> Result<Option<Vec<Vec<u8>>>, ZeroError> {
        let label = label.to_owned();
        Pending::start(self, move |ranks| {
            ranks.gather_bytes_to(&label, root, bytes)
        })
        .wait()
    }
}

/// The collectives for jobs on the communication thread: see the methods of the same names of [`ProcessGroup`].
pub trait Collectives {
    /// See [`ProcessGroup::all_reduce`].
    fn all_reduce(
        &mut self,
        label: &str,
        op: ReduceOp,
        buffer: HostBuffer,
    ) -> Result<HostBuffer, ZeroError>;

    /// See [`ProcessGroup::reduce_scatter`].
    fn reduce_scatter(
        &mut self,
        label: &str,
        op: ReduceOp,
        buffer: HostBuffer,
        split: &Split,
    ) -> Result<HostBuffer, ZeroError>;

    /// See [`ProcessGroup::start_all_gather`].
    fn all_gather(
        &mut self,
        label: &str,
        part: HostBuffer,
        split: &Split,
        into: Option<HostBuffer>,
    ) -> Result<HostBuffer, ZeroError>;

    /// See [`ProcessGroup::broadcast`].
    fn broadcast(
        &mut self,
        label: &str,
        root: usize,
        buffer: HostBuffer,
    ) -> Result<HostBuffer, ZeroError>;

    /// See [`ProcessGroup::barrier`].
    fn barrier(&mut self, label: &str) -> Result<(), ZeroError>;

    /// See [`ProcessGroup::gather_bytes`].
    fn gather_bytes(&mut self, label: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, ZeroError>;

    /// See [`ProcessGroup::gather_bytes_to`].
    fn gather_bytes_to(
        &mut self,
        label: &str,
        root: usize,
        bytes: Vec<u8>,
    ) -> Result<Option<Vec<Vec<u8>>>, ZeroError>;
}
