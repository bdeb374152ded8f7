//! Buffers of collectives, and how those in host memory move between ranks.

use std::ops::Range;
use std::sync::Arc;

use super::buffer::{BufferDtype, HostBuffer, ReduceOp};
use super::call::{Split, parts};
use super::collectives::Collectives;
use super::part::{Part, Payload};
use crate::group::GroupFault;
use crate::shard::balanced_offsets;

/// What a collective does with the buffers of all ranks: see the methods of the same names of
/// [`ProcessGroup`](super::ProcessGroup).
#[derive(Clone, Debug, PartialEq)]
pub enum Collective {
    /// Every rank gets the reduction of all buffers.
    AllReduce(ReduceOp),
    /// Every rank gets its part of the reduction.
    ReduceScatter(ReduceOp, Split),
    /// Every rank gets all parts, in the order of ranks.
    AllGather(Split),
    /// Every rank gets the buffer of one.
    Broadcast {
        /// Whose.
        root: usize,
    },
}

/// What a collective works on: elements that all ranks have of one type and number, in host memory
/// ([`HostBuffer`]), or in a memory whose elements a type of another crate moves by itself, such as
/// a device's.
///
/// [`Collectives::run`] does the rest for each of them, over the host: all ranks agree on the call first
/// (its operation, label, type, length and split) within the deadline, faults reach all ranks, and
/// what was sent is counted. So a method here begins when all ranks have called it, and has to
/// return in time by itself.
///
/// # Errors
///
/// A fault of a method ends the group, on all ranks.
pub trait Buffer: Sized + Send {
    /// The elements' type.
    fn dtype(&self) -> BufferDtype;

    /// Number of elements.
    fn elements(&self) -> usize;

    /// This rank's part of the reduction of all ranks' buffers. Rank `r` gets the elements from
    /// `offsets[r]` to `offsets[r + 1]`.
    fn reduce_scatter(
        self,
        op: ReduceOp,
        offsets: &[usize],
        transfer: &mut Transfer<'_>,
    ) -> Result<Self, GroupFault>;

    /// The reduction of all ranks' buffers.
    fn all_reduce(self, op: ReduceOp, transfer: &mut Transfer<'_>) -> Result<Self, GroupFault>;

    /// The parts of all ranks, that of rank `r` from `offsets[r]` to `offsets[r + 1]`.
    fn all_gather(self, offsets: &[usize], transfer: &mut Transfer<'_>)
    -> Result<Self, GroupFault>;

    /// The root's buffer, which is as long as this one.
    fn broadcast(self, root: usize, transfer: &mut Transfer<'_>) -> Result<Self, GroupFault>;
}

/// One collective, on which all ranks have agreed, for the [`Buffer`] that it works on.
pub struct Transfer<'a>(pub(super) &'a mut Collectives);

impl Transfer<'_> {
    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.0.world_size
    }

    /// Counts what this rank sends to others by this collective: see
    /// [`ProcessGroup::traffic`](super::ProcessGroup::traffic).
    pub fn count(&mut self, elements: usize, dtype: BufferDtype) {
        self.0.count(elements, dtype.size_bytes());
    }

    /// Sends `own[sends[to]]` to each rank, and returns what ranks send, `lengths[from]` bytes of
    /// each.
    fn exchange(
        &mut self,
        own: Payload,
        dtype: BufferDtype,
        sends: &[Range<usize>],
        lengths: &[usize],
    ) -> Result<Vec<Part>, GroupFault> {
        self.0.exchange(own, dtype.size_bytes(), sends, lengths)
    }

    /// This rank's part of the reduction of all buffers, cut at `offsets`.
    fn reduce(
        &mut self,
        op: ReduceOp,
        buffer: Arc<HostBuffer>,
        offsets: &[usize],
    ) -> Result<HostBuffer, GroupFault> {
        let (dtype, size) = (buffer.dtype(), buffer.dtype().size_bytes());
        let sends = parts(offsets, size);
        let own = sends[self.rank()].len();
        let all = self.exchange(buffer, dtype, &sends, &vec![own; self.world_size()])?;
        let mut out = HostBuffer::zeros(dtype, own / size);
        out.reduce(op, &all.iter().map(Part::bytes).collect::<Vec<_>>());
        Ok(out)
    }

    /// The parts of all ranks, of a buffer that is cut at `offsets`.
    pub(super) fn gather(
        &mut self,
        part: HostBuffer,
        offsets: &[usize],
    ) -> Result<Vec<Part>, GroupFault> {
        let (bytes, dtype) = (part.size_bytes(), part.dtype());
        let sends = vec![0..bytes; self.world_size()];
        let lengths = parts(offsets, dtype.size_bytes());
        let lengths: Vec<_> = lengths.iter().map(Range::len).collect();
        self.exchange(Arc::new(part), dtype, &sends, &lengths)
    }

    /// [`gather`](Self::gather) into `buffer`, which no other rank reads any more when it has sent
    /// its part; into new memory if one still holds it.
    fn gather_into(
        &mut self,
        buffer: Arc<HostBuffer>,
        part: HostBuffer,
        offsets: &[usize],
    ) -> Result<HostBuffer, GroupFault> {
        let all = self.gather(part, offsets)?;
        let mut out = Arc::try_unwrap(buffer)
            .unwrap_or_else(|shared| HostBuffer::zeros(shared.dtype(), shared.len()));
        let mut rest = out.as_mut();
        for bytes in all.iter().map(Part::bytes) {
            let (to, after) = rest.split_at_mut(bytes.len());
            to.copy_from_slice(bytes);
            rest = after;
        }
        Ok(out)
    }
}

/// Composed of exchanges of bytes, so that every element is added in the order of ranks, and rounded
/// once.
impl Buffer for HostBuffer {
    fn dtype(&self) -> BufferDtype {
        self.dtype()
    }

    fn elements(&self) -> usize {
        self.len()
    }

    fn reduce_scatter(
        self,
        op: ReduceOp,
        offsets: &[usize],
        transfer: &mut Transfer<'_>,
    ) -> Result<Self, GroupFault> {
        transfer.reduce(op, Arc::new(self), offsets)
    }

    /// A reduce-scatter, so that every element is added and rounded by one rank, and an all-gather.
    fn all_reduce(self, op: ReduceOp, transfer: &mut Transfer<'_>) -> Result<Self, GroupFault> {
        let offsets = balanced_offsets(self.len(), transfer.world_size());
        let buffer = Arc::new(self);
        let part = transfer.reduce(op, buffer.clone(), &offsets)?;
        transfer.gather_into(buffer, part, &offsets)
    }

    fn all_gather(
        self,
        offsets: &[usize],
        transfer: &mut Transfer<'_>,
    ) -> Result<Self, GroupFault> {
        let dtype = self.dtype();
        let parts = transfer.gather(self, offsets)?;
        let all: Vec<_> = parts.iter().map(Part::bytes).collect();
        Ok(HostBuffer::concat(dtype, &all))
    }

    /// A scatter and an all-gather: the root sends its buffer twice, whatever the world size.
    fn broadcast(self, root: usize, transfer: &mut Transfer<'_>) -> Result<Self, GroupFault> {
        let (rank, ranks) = (transfer.rank(), transfer.world_size());
        let (dtype, size) = (self.dtype(), self.dtype().size_bytes());
        let offsets = balanced_offsets(self.len(), ranks);
        let sends = if rank == root {
            parts(&offsets, size)
        } else {
            vec![0..0; ranks]
        };
        let mut lengths = vec![0; ranks];
        lengths[root] = (offsets[rank + 1] - offsets[rank]) * size;
        let buffer = Arc::new(self);
        let sent = transfer.exchange(buffer.clone(), dtype, &sends, &lengths)?;
        let part = HostBuffer::concat(dtype, &[sent[root].bytes()]);
        drop(sent);
        transfer.gather_into(buffer, part, &offsets)
    }
}
