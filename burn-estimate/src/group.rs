//! One rank of many, alone.

use std::sync::Arc;

use burn_zero::group::{Collectives, Job, Traffic};
use burn_zero::{HostBuffer, ProcessGroup, ReduceOp, Split, ZeroError};
use parking_lot::Mutex;

/// A rank's view of a group of any size that counts what the rank would send, and sends nothing: the other ranks are not there.
///
/// With it one rank of ZeRO runs on [`Meta`](crate::Meta) by itself. Collectives give zeros of the right length, and where ranks agree on
/// small values, the others say the same as this one. They run on the thread that calls them.
///
/// ```
/// use burn_estimate::SimulatedGroup;
/// use burn_zero::{ProcessGroup, ReduceOp};
///
/// let group = SimulatedGroup::new(0, 1024);
/// let sum = group.all_reduce("gradients", ReduceOp::Sum, vec![0.0; 1 << 20].into())?;
/// assert_eq!(sum.len(), 1 << 20);
/// // Twice all but its own part: a reduce-scatter and an all-gather.
/// assert_eq!(group.sent_bytes(), 2 * 4 * ((1 << 20) - 1024));
/// # Ok::<(), burn_zero::ZeroError>(())
/// ```
#[derive(Debug)]
pub struct SimulatedGroup {
    rank: usize,
    world_size: usize,
    sent_bytes: Mutex<u64>,
}

impl SimulatedGroup {
    /// The rank of this number.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn new(rank: usize, world_size: usize) -> Arc<Self> {
        assert!(rank < world_size, "rank {rank} of {world_size}");
        Arc::new(Self {
            rank,
            world_size,
            sent_bytes: Mutex::default(),
        })
    }

    /// Bytes of buffers that the rank would have sent; without the small values on which ranks agree, and what starts each call.
    pub fn sent_bytes(&self) -> u64 {
        *self.sent_bytes.lock()
    }

    /// Counts bytes of which the rank keeps its part.
    fn send(&self, elements: usize, buffer: &HostBuffer) {
        *self.sent_bytes.lock() += (elements * buffer.dtype().size_bytes()) as u64;
    }

    /// Elements of this rank's part of a whole buffer.
    fn part(&self, whole: usize, split: &Split) -> usize {
        match split {
            Split::Equal => whole / self.world_size,
            Split::Counts(counts) => counts[self.rank],
        }
    }
}

impl ProcessGroup for SimulatedGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn submit(&self, job: Job) {
        job.run(&mut Simulated(self));
    }

    fn abort(&self, _reason: &str) {}

    /// Nothing: see [`sent_bytes`](Self::sent_bytes).
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn declare_settings(&self, _text: &str) {}
}

/// The collectives of a job.
struct Simulated<'a>(&'a SimulatedGroup);

impl Collectives for Simulated<'_> {
    fn all_reduce(
        &mut self,
        _label: &str,
        _op: ReduceOp,
        buffer: HostBuffer,
    ) -> Result<HostBuffer, ZeroError> {
        let part = self.0.part(buffer.len(), &Split::Equal);
        self.0.send(2 * (buffer.len() - part), &buffer);
        Ok(buffer)
    }

    fn reduce_scatter(
        &mut self,
        _label: &str,
        _op: ReduceOp,
        buffer: HostBuffer,
        split: &Split,
    ) -> Result<HostBuffer, ZeroError> {
        let part = self.0.part(buffer.len(), split);
        self.0.send(buffer.len() - part, &buffer);
        Ok(HostBuffer::zeros(buffer.dtype(), part))
    }

    fn all_gather(
        &mut self,
        _label: &str,
        part: HostBuffer,
        split: &Split,
        into: Option<HostBuffer>,
    ) -> Result<HostBuffer, ZeroError> {
        self.0.send((self.0.world_size - 1) * part.len(), &part);
        let whole = match split {
            Split::Equal => part.len() * self.0.world_size,
            Split::Counts(counts) => counts.iter().sum(),
        };
        Ok(into.unwrap_or_else(|| HostBuffer::zeros(part.dtype(), whole)))
    }

    fn broadcast(
        &mut self,
        _label: &str,
        root: usize,
        buffer: HostBuffer,
    ) -> Result<HostBuffer, ZeroError> {
        if root == self.0.rank {
            let part = self.0.part(buffer.len(), &Split::Equal);
            self.0.send(2 * (buffer.len() - part), &buffer);
        }
        Ok(buffer)
    }

    fn barrier(&mut self, _label: &str) -> Result<(), ZeroError> {
        Ok(())
    }

    fn gather_bytes(&mut self, _label: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, ZeroError> {
        Ok(vec![bytes; self.0.world_size])
    }

    fn gather_bytes_to(
        &mut self,
        label: &str,
        root: usize,
        bytes: Vec<u8>,
    ) -> Result<Option<Vec<Vec<u8>>>, ZeroError> {
        let all = self.gather_bytes(label, bytes)?;
        Ok((root == self.0.rank).then_some(all))
    }
}
