//! The data movements of which all collectives are composed.

use std::{ops::Range, sync::Arc, time::Duration};

use bytemuck::Pod;

use super::{Call, GroupFault, ReduceOp, Sent, buffer::Element};

/// Moves data between this rank and the others.
///
/// All methods wait for other ranks, each at most for the deadline, and return their faults. Empty parts are not sent.
pub(super) trait Transport {
    fn rank(&self) -> usize;

    fn world_size(&self) -> usize;

    /// Sends this rank's call to all ranks and returns the calls of all, in the order of ranks.
    fn announce(&mut self, call: &Call) -> Result<Vec<Call>, GroupFault>;

    /// Reduces the parts `rank` of all ranks' buffers, in the order of ranks. Part `p` is `offsets[p]..offsets[p + 1]`.
    fn reduce_scatter<E: Element>(
        &mut self,
        call: &Call,
        buffer: &Arc<Vec<E>>,
        offsets: &[usize],
        op: ReduceOp,
    ) -> Result<Vec<E>, GroupFault>;

    /// Sends `own[sends[to]]` to each rank `to`, and puts what each rank `from` sends at `places[from]`, this rank's own part
    /// included. `into` gives the memory, when no other rank can be reading it any more; its values are overwritten.
    fn transfer<P: Pod + Send + Sync>(
        &mut self,
        call: &Call,
        own: &Arc<Vec<P>>,
        sends: &[Range<usize>],
        places: &[Range<usize>],
        into: impl FnOnce() -> Vec<P>,
    ) -> Result<Vec<P>, GroupFault>;

    /// What was sent since the last call of this method.
    fn take_sent(&mut self) -> Sent;

    /// How long the communication thread waits for a job before it calls [`stay`](Self::stay); `None` for no limit.
    fn patience(&self) -> Option<Duration> {
        None
    }

    /// Tells ranks that have left that this one is alive.
    fn stay(&mut self) {}

    /// Tells all other ranks that the group is lost.
    fn spread(&mut self, fault: &GroupFault);

    /// Tells all other ranks that this one takes part in no collective after `calls` of them.
    fn leave(&mut self, calls: u64);
}
