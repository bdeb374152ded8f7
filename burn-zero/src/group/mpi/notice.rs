//! What ranks tell each other outside of collectives.

use serde::{Deserialize, Serialize};

use crate::group::GroupFault;

/// A message under its own tag.
#[derive(Serialize, Deserialize)]
pub(super) enum Notice {
    /// The rank takes part in no more than so many collectives.
    Left(u64),
    /// The rank has no collective to run, and has not left: to those that have.
    Staying,
    /// The group is lost.
    Lost {
        /// The call in which the rank is.
        sequence: u64,
        /// Why.
        fault: GroupFault,
    },
}

/// Longest text in a notice: it has to fit a message that is sent without waiting for its receiver.
const TEXT_BYTES: usize = 1000;

impl Notice {
    pub fn encode(&self) -> Vec<u8> {
        let mut notice = serde_json::to_vec(self).expect("a notice is plain data");
        if notice.len() > 3 * TEXT_BYTES
            && let Self::Lost { sequence, fault } = self
        {
            let short = Self::Lost {
                sequence: *sequence,
                fault: shortened(fault),
            };
            notice = serde_json::to_vec(&short).expect("a notice is plain data");
        }
        notice
    }

    pub fn decode(bytes: &[u8]) -> Self {
        serde_json::from_slice(bytes).expect("ranks run the same program")
    }
}

/// Only panics and reasons are the user's texts; labels are short.
fn shortened(fault: &GroupFault) -> GroupFault {
    let cut = |text: &str| format!("{} ...", &text[..text.floor_char_boundary(TEXT_BYTES)]);
    let mut fault = fault.clone();
    if let GroupFault::PeerPanicked { message: text, .. }
    | GroupFault::Aborted { reason: text, .. } = &mut fault
    {
        *text = cut(text);
    }
    fault
}
