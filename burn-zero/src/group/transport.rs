//! The few movements of data of which all collectives are made.

use std::{sync::Arc, time::Duration};

use bytemuck::Pod;

use super::{Call, GroupFault, ReduceOp, Sent, buffer::Element};

/// Moves data between this rank and the others. Part `p` of a buffer is `offsets[p]..offsets[p + 1]`.
///
/// All methods wait for other ranks, each at most for the deadline, and find their faults.
pub(crate) trait Transport {
    fn rank(&self) -> usize;

    fn world_size(&self) -> usize;

    /// Tells all ranks what this one calls and returns the calls of all, in the order of ranks.
    fn announce(&mut self, call: &Call) -> Result<Vec<Call>, GroupFault>;

    /// Reduces the parts `rank` of all ranks' buffers, in the order of ranks.
    fn reduce_scatter<E: Element>(
        &mut self,
        call: &Call,
        buffer: &Arc<Vec<E>>,
        offsets: &[usize],
        op: ReduceOp,
    ) -> Result<Vec<E>, GroupFault>;

    /// Puts the parts of all ranks into one buffer. `into` gives its memory, when no other rank can be reading it any
    /// more; its values are overwritten.
    fn all_gather<P: Pod + Send + Sync>(
        &mut self,
        call: &Call,
        part: &Arc<Vec<P>>,
        offsets: &[usize],
        into: impl FnOnce() -> Vec<P>,
    ) -> Result<Vec<P>, GroupFault>;

    /// Part `rank` of the root's buffer.
    fn scatter<P: Pod + Send + Sync>(
        &mut self,
        call: &Call,
        root: usize,
        buffer: &Arc<Vec<P>>,
        offsets: &[usize],
    ) -> Result<Vec<P>, GroupFault>;

    /// The parts of all ranks in one buffer, on the root; nothing elsewhere.
    fn gather<P: Pod + Send + Sync>(
        &mut self,
        call: &Call,
        root: usize,
        part: &Arc<Vec<P>>,
        offsets: &[usize],
    ) -> Result<Vec<P>, GroupFault>;

    /// What was sent since the last time.
    fn take_sent(&mut self) -> Sent;

    /// How long this rank may have no collective to run before it says that it is still there; `None` if nobody asks.
    fn patience(&self) -> Option<Duration> {
        None
    }

    /// Tells ranks that have left that this one is still there.
    fn stay(&mut self) {}

    /// Tells all other ranks that the group is lost.
    fn spread(&mut self, fault: &GroupFault);

    /// Tells all other ranks that this one takes part in no more than `calls` collectives.
    fn leave(&mut self, calls: u64);
}
