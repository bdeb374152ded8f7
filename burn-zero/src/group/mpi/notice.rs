//! Messages between ranks outside of collectives.

use serde::{Deserialize, Serialize};

use crate::group::GroupFault;

/// A message under its own tag.
#[derive(Serialize, Deserialize)]
pub(super) enum Notice {
    /// The rank takes part in no collective after this many.
    Left(u64),
    /// To ranks that have left: this rank has no collective to run and has not left.
    Staying,
    /// The group is lost.
    Lost {
        /// The call in which the rank is.
        sequence: u64,
        /// Why.
        fault: GroupFault,
    },
}

/// Longest text of the user's in a notice, which has to fit a message that is sent without waiting for its receiver. Labels are short.
const TEXT_BYTES: usize = 1000;

impl Notice {
    /// That the group is lost.
    pub fn lost(sequence: u64, mut fault: GroupFault) -> Self {
        if let GroupFault::PeerPanicked { message: text, .. }
        | GroupFault::Aborted { reason: text, .. } = &mut fault
            && text.len() > TEXT_BYTES
        {
            text.truncate(text.floor_char_boundary(TEXT_BYTES));
            text.push_str(" ...");
        }
        Self::Lost { sequence, fault }
    }

    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a notice is plain data")
    }

    pub fn decode(bytes: &[u8]) -> Self {
        serde_json::from_slice(bytes).expect("ranks run the same program")
    }
}
