//! Faults of a group, after which no collective is possible.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The reason for which a group is lost. A rank that finds it tells all others, and every rank reports the
/// first that it learns of.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum GroupFault {
    /// Ranks did not join a call in time: they hang, or are slower than the deadline allows.
    #[error(
        "rank {rank} waited {deadline:?} in {call} for {}; a rank that computes longer than that between collectives \
         needs a longer GroupOptions::deadline",
        name_ranks(.missing)
    )]
    Deadline {
        /// The rank that waited.
        rank: usize,
        /// The call in which it waited.
        call: String,
        /// The ranks that did not join. If one stopped in the middle of a transfer, ranks that wait for it may be listed too.
        missing: Vec<usize>,
        /// How long it waited.
        deadline: Duration,
    },

    /// Two ranks called different collectives in the same place.
    #[error("ranks differ: rank {rank} calls {call}, but rank {peer} calls {peer_call}")]
    Mismatch {
        /// The rank that found it.
        rank: usize,
        /// Its call.
        call: String,
        /// The rank that made another call.
        peer: usize,
        /// That call.
        peer_call: String,
    },

    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    PeerPanicked {
        /// The rank.
        rank: usize,
        /// The panic's message.
        message: String,
    },

    /// A rank dropped its group while others still called.
    #[error("rank {peer} left after {calls} collectives, but rank {rank} calls {call}")]
    PeerLeft {
        /// The rank that found it.
        rank: usize,
        /// What it called.
        call: String,
        /// The rank that left.
        peer: usize,
        /// Collectives in which that rank took part.
        calls: u64,
    },

    /// A rank called [`ProcessGroup::abort`](super::ProcessGroup::abort).
    #[error("rank {rank} gave up: {reason}")]
    Aborted {
        /// The rank.
        rank: usize,
        /// Its reason.
        reason: String,
    },
}

/// "rank 2" or "ranks 1, 2".
fn name_ranks(ranks: &[usize]) -> String {
    let names: Vec<_> = ranks.iter().map(usize::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", names.join(", "))
}
