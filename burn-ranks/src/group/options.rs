//! Options of a group, and its faults.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::InvalidSetting;

/// Settings of a group. All ranks should use the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GroupOptions {
    /// Longest time that a rank waits for the next message of another, 10 minutes by default, as
    /// PyTorch for NCCL. It must be longer than what one rank computes between two collectives
    /// while the others wait: the evaluation of one rank alone, or a first step in which one rank
    /// compiles or tunes kernels that the others have cached, which may take minutes. Only the time
    /// distinguishes such a rank from one that hangs. Panics, ranks that leave and processes that
    /// die are found at once. After its last collective a process may take longer.
    ///
    /// A thread cannot be ended from outside. Where ranks are threads, their group is lost and one
    /// of them has ended, the others have 10 s to end, or four deadlines if these are shorter; then
    /// the process ends with status 1 and the fault on stderr.
    pub deadline: Duration,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self::with_deadline(Duration::from_secs(10 * 60))
    }
}

/// Well below the overflow of clocks.
const LONGEST_DEADLINE: Duration = Duration::from_secs(365 * 24 * 3600);

impl GroupOptions {
    /// Options with this deadline.
    pub fn with_deadline(deadline: Duration) -> Self {
        Self { deadline }
    }

    pub(super) fn check(&self) -> Result<(), InvalidSetting> {
        let deadline = self.deadline;
        let holds = !deadline.is_zero() && deadline <= LONGEST_DEADLINE;
        let expected = "longer than nothing and at most a year";
        InvalidSetting::unless(holds, "deadline", format!("{deadline:?}"), expected)
    }
}

/// The reason for which a group is lost. A rank that finds a fault notifies all others, and every
/// rank reports the first fault that it learns of.
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
        /// The ranks that did not join. If one stopped in the middle of a transfer, ranks that wait
        /// for it may be listed too.
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

    /// A rank dropped its group, or its function returned, while others still called.
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

    /// A call of a rank that has left its group, because the rank's function has returned.
    #[error("rank {rank} has left its group: it makes collectives only until its function returns")]
    Ended {
        /// The rank.
        rank: usize,
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
