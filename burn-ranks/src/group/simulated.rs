//! One rank of a group whose other ranks do not exist.

use std::sync::Arc;

use super::{
    GroupFault, GroupOptions, Member, ProcessGroup,
    part::Part,
    queue::Queue,
    transport::{Exchange, Transport},
};
use crate::{InvalidSetting, RanksError};

/// One rank of a group of any size, alone: collectives end at once, and
/// [`traffic`](ProcessGroup::traffic) counts what the rank would send.
///
/// For estimates: in a program that computes with shapes only (burn-estimate's `Meta`) the memory
/// and the traffic of a rank do not depend on values, so one rank represents all. Where ranks
/// compare values, the others have this rank's. Values received from them have no meaning: they are
/// this rank's own or zeros. So it is not for programs in which one rank leads the others, such as
/// burn-update's `UpdateStrategy`.
///
/// ```
/// use burn_ranks::{ProcessGroup, ReduceOp, SimulatedRank};
///
/// let group = SimulatedRank::new(0, 1024)?;
/// let sum = group.all_reduce("gradients", ReduceOp::Sum, vec![0.0; 1 << 20].into())?;
/// assert_eq!(sum.len(), 1 << 20);
/// // A reduce-scatter and an all-gather, each of all but its own part.
/// assert_eq!(group.traffic().total().elements, 2 * ((1 << 20) - 1024));
/// # Ok::<(), burn_ranks::RanksError>(())
/// ```
#[derive(Clone, Debug)]
pub struct SimulatedRank(Member);

impl SimulatedRank {
    /// The rank of this number.
    ///
    /// # Errors
    ///
    /// [`RanksError::InvalidSetting`] if a group of this size has no such rank;
    /// [`RanksError::Start`] if the system starts no thread.
    pub fn new(rank: usize, world_size: usize) -> Result<Self, RanksError> {
        InvalidSetting::unless(rank < world_size, "rank", rank, "below the world size")?;
        let deadline = GroupOptions::default().deadline;
        let queue = Queue::new(rank, world_size, deadline, |_| ());
        let connect = move || Ok((queue, Alone(rank), ()));
        Member::start(format!("simulated rank {rank}, collectives"), connect).map(Self)
    }
}

impl ProcessGroup for SimulatedRank {
    fn member(&self) -> &Member {
        &self.0
    }
}

/// The transport of a rank with this number.
struct Alone(usize);

impl Transport for Alone {
    fn exchange(&mut self, it: Exchange<'_>) -> Result<Vec<Part>, GroupFault> {
        let sent = &it.sends[self.0];
        let receive = |&length: &usize| match length {
            _ if length == sent.len() => Part(it.own.clone(), sent.clone()),
            _ => Part(Arc::new(vec![0_u8; length]), 0..length),
        };
        Ok(it.lengths.iter().map(receive).collect())
    }

    fn spread(&mut self, _sequence: u64, _fault: &GroupFault) {}

    fn leave(&mut self, _calls: u64) {}
}
