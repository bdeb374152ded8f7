//! Options of a group.

use std::time::Duration;

use serde::{Deserialize, Serialize};

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
    /// Most elements in one message, 65,536 by default: MPI counts with 31 bits, and chunks of this size are added
    /// while they are in the cache. Threads read each other's buffers and send no messages.
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

    pub(crate) fn check(&self) -> Result<(), ZeroError> {
        let check = |holds, setting, value: String, expected| match holds {
            true => Ok(()),
            false => Err(ZeroError::InvalidSetting {
                setting,
                value,
                expected,
            }),
        };
        let (chunk, deadline) = (self.chunk_elements, self.deadline);
        check(
            (1..=MOST_CHUNK_ELEMENTS).contains(&chunk),
            "chunk_elements",
            chunk.to_string(),
            "from 1 to 2^28",
        )?;
        check(
            !deadline.is_zero() && deadline <= LONGEST_DEADLINE,
            "deadline",
            format!("{deadline:?}"),
            "longer than nothing and at most a year",
        )?;
        check(
            self.longest_stay != Some(Duration::ZERO),
            "longest_stay",
            "0".to_owned(),
            "longer than nothing, or none",
        )
    }
}

/// How often a rank at work tells waiting ranks so: several times in a deadline, and often enough that a failure is known soon.
pub(crate) fn round(deadline: Duration) -> Duration {
    (deadline / 4).min(Duration::from_secs(5))
}
