//! What can be chosen for a group.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ZeroError;

/// Settings of a group. All ranks should use the same, and must use the same `chunk_elements`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GroupOptions {
    /// Longest time that a rank waits for the next message of another, 10 minutes by default, as PyTorch for NCCL. It must be
    /// longer than what one rank computes between two collectives while the others wait: the evaluation of one rank alone, or a first
    /// step in which one rank compiles or tunes kernels that the others have cached, which may take minutes. Nothing but time tells such
    /// a rank from one that hangs. Panics, ranks that leave and processes that die are found at once. After its last collective a process
    /// may take [longer](Self::longest_stay).
    pub deadline: Duration,
    /// Longest time that a process may go on, after its last collective, once another has left the group: then that one ends the job. `None`
    /// by default, any time: nobody sees from outside whether a program that lives writes its results or hangs. MPI only; ranks
    /// that are threads end with their process.
    pub longest_stay: Option<Duration>,
    /// Most elements in one message, 65,536 by default: MPI counts with 31 bits, and chunks of this size are added
    /// while they are in the cache. Threads read each other's buffers and send no messages.
    pub chunk_elements: usize,
    /// What happens to threads that do not end when their group is lost. [`ThreadGroup`](super::ThreadGroup) only.
    pub after_fault: AfterFault,
}

/// What happens where ranks are threads, their group is lost, some have ended, and others have not: they hang, or compute on and
/// do not know yet. Nobody can end a thread from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AfterFault {
    /// Says so on stderr, gives them a grace, and ends the process, with status 1 and the fault on stderr. What MPI does, without the
    /// grace. By default after 10 s.
    EndProcess {
        /// From when the first rank has ended in a lost group.
        grace: Duration,
    },
    /// Says so on stderr and waits for them, however long it takes: for programs that do more than this training, or that end
    /// what hangs themselves.
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

/// Clocks overflow long after it.
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
        if self.chunk_elements == 0 || self.chunk_elements > MOST_CHUNK_ELEMENTS {
            return Err(ZeroError::InvalidSetting {
                setting: "chunk_elements",
                value: self.chunk_elements.to_string(),
                expected: "from 1 to 2^28",
            });
        }
        if self.deadline.is_zero() || self.deadline > LONGEST_DEADLINE {
            return Err(ZeroError::InvalidSetting {
                setting: "deadline",
                value: format!("{:?}", self.deadline),
                expected: "longer than nothing and at most a year",
            });
        }
        if self.longest_stay.is_some_and(|longest| longest.is_zero()) {
            return Err(ZeroError::InvalidSetting {
                setting: "longest_stay",
                value: "0".to_owned(),
                expected: "longer than nothing, or none",
            });
        }
        Ok(())
    }
}

/// How often a rank at work tells those who wait for it that it is: several times in a deadline, and often enough for a failure
/// to be known soon.
pub(crate) fn round(deadline: Duration) -> Duration {
    (deadline / 4).min(Duration::from_secs(5))
}
