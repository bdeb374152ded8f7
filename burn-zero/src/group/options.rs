//! Options of a group, and its faults.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::ZeroError;

/// Settings of a group. All ranks should use the same, and must use the same `chunk_elements`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GroupOptions {
    /// Longest time that a rank waits for the next message of another, 10 minutes by default, as PyTorch for NCCL. It must be
    /// longer than what one rank computes between two collectives while the others wait: the evaluation of one rank alone, or a first
    /// step in which one rank compiles or tunes kernels that the others have cached, which may take minutes. Only the time distinguishes
    /// such a rank from one that hangs. Panics, ranks that leave and processes that die are found at once. After its last collective a
    /// process may take [longer](Self::longest_stay).
    pub deadline: Duration,
    /// Longest time that a process may run after its last collective once another has left the group; then the other ends the job.
    /// Default `None`, unlimited: whether a live process writes its results or hangs is not visible from outside. MPI only; ranks
    /// that are threads end with their process.
    pub longest_stay: Option<Duration>,
    /// Most f32 elements in one message, 65,536 by default, and twice as many of two bytes: MPI counts with 31 bits, and chunks of this
    /// size are added while they are in the cache. Threads read each other's buffers and send no messages.
    pub chunk_elements: usize,
    /// What happens to threads that do not end when their group is lost. [`ThreadGroup`](super::ThreadGroup) only.
    pub after_fault: AfterFault,
}

/// What happens to ranks that are threads when their group is lost, some have ended and others have not, because they hang or still
/// compute. A thread cannot be ended from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AfterFault {
    /// Reports them on stderr, waits for `grace`, by default 10 s, and ends the process with status 1 and the fault on stderr. MPI does
    /// the same without `grace`.
    EndProcess {
        /// From when the first rank has ended in a lost group.
        grace: Duration,
    },
    /// Reports them on stderr and waits for them without limit: for programs that do more than this training, or that end
    /// hanging threads themselves.
    Wait,
}

impl Default for AfterFault {
    fn default() -> Self {
        Self::EndProcess {
            grace: Duration::from_secs(10),
        }
    }
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(10 * 60),
            longest_stay: None,
            chunk_elements: 1 << 16,
            after_fault: AfterFault::default(),
        }
    }
}

/// Most elements in a message of at most 2^31 - 1 bytes.
const MOST_CHUNK_ELEMENTS: usize = 1 << 28;

/// Well below the overflow of clocks.
const LONGEST_DEADLINE: Duration = Duration::from_secs(365 * 24 * 3600);

impl GroupOptions {
    /// Default options with another deadline.
    pub fn with_deadline(deadline: Duration) -> Self {
        Self {
            deadline,
            ..Self::default()
        }
    }

    pub(super) fn check(&self) -> Result<(), ZeroError> {
        let (chunk, deadline) = (self.chunk_elements, self.deadline);
        if !(1..=MOST_CHUNK_ELEMENTS).contains(&chunk) {
            return Err(ZeroError::invalid(
                "chunk_elements",
                chunk,
                "from 1 to 2^28",
            ));
        }
        if deadline.is_zero() || deadline > LONGEST_DEADLINE {
            let (value, expected) = (
                format!("{deadline:?}"),
                "longer than nothing and at most a year",
            );
            return Err(ZeroError::invalid("deadline", value, expected));
        }
        match self.longest_stay {
            Some(Duration::ZERO) => {
                let expected = "longer than nothing, or none";
                Err(ZeroError::invalid("longest_stay", 0, expected))
            }
            _ => Ok(()),
        }
    }
}

/// How often a rank at work tells waiting ranks so: several times in a deadline, and often enough that a failure is known soon.
pub(crate) fn round(deadline: Duration) -> Duration {
    (deadline / 4).min(Duration::from_secs(5))
}

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
