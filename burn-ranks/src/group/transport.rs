//! What collectives ask of a transport: one exchange of bytes, which threads and MPI implement.

use std::ops::Range;

use super::{
    GroupFault,
    call::Call,
    part::{Part, Payload},
};

/// Moves bytes between this rank and the others. Waits for each of them at most for the deadline,
/// and returns their faults.
pub(super) trait Transport {
    /// In a call, sends `own[sends[to]]` to each rank `to`, and returns what ranks send,
    /// `lengths[from]` bytes of each; of this rank itself, `own[sends[rank]]`. Empty parts are not
    /// sent.
    fn exchange(&mut self, it: Exchange<'_>) -> Result<Vec<Part>, GroupFault>;

    /// Notifies all other ranks that the group is lost, from the collective `sequence` of this rank
    /// on.
    fn spread(&mut self, sequence: u64, fault: &GroupFault);

    /// Notifies all other ranks that this one takes part in its first `calls` collectives only.
    fn leave(&mut self, calls: u64);
}

/// What a rank sends and receives in one exchange of a call: see [`Transport::exchange`].
pub(super) struct Exchange<'a> {
    pub call: &'a Call,
    pub own: &'a Payload,
    pub sends: &'a [Range<usize>],
    pub lengths: &'a [usize],
}

/// What a transport knows of the other ranks.
#[derive(Default)]
pub(super) struct Peers {
    /// By rank: the number of collectives in which it took part, if it has left.
    pub left: Vec<Option<u64>>,
    /// The earliest collective that has failed, and its fault: it and all later ones fail. Earlier
    /// ones may still complete.
    pub lost: Option<(u64, GroupFault)>,
}

impl Peers {
    pub fn new(world_size: usize) -> Self {
        let (left, lost) = (vec![None; world_size], None);
        Self { left, lost }
    }

    pub fn lose(&mut self, sequence: u64, fault: &GroupFault) {
        if self
            .lost
            .as_ref()
            .is_none_or(|(first, _)| sequence < *first)
        {
            self.lost = Some((sequence, fault.clone()));
        }
    }

    /// The fault of a collective, if it has failed.
    pub fn fault(&self, call: &Call) -> Option<GroupFault> {
        let lost = self.lost.as_ref();
        let lost = lost.filter(|(sequence, _)| *sequence <= call.sequence);
        lost.map(|(_, fault)| fault.clone())
    }

    /// The fault if `peer`, for whose message `rank` waits in a collective, has left before it.
    pub fn left(&self, call: &Call, rank: usize, peer: usize) -> Option<GroupFault> {
        let calls = self.left[peer].filter(|&calls| calls <= call.sequence)?;
        let call = call.to_string();
        Some(GroupFault::PeerLeft {
            rank,
            call,
            peer,
            calls,
        })
    }
}
