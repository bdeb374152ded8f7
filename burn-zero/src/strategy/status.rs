//! The step status: what ranks tell each other after each step.

use burn::train::Interrupter;
use serde::{Deserialize, Serialize};

use crate::ZeroError;
use crate::group::ProcessGroup;

/// The status of one rank.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct StepStatus {
    /// Whether the rank has a batch for the next step.
    pub(super) has_batch: bool,
    /// Items of the last step that the rank sends to rank 0.
    pub(super) items: usize,
    /// Items of all ranks' data that are done after them.
    pub(super) done: usize,
    /// The bits of the last step's learning rate.
    pub(super) lr: Option<u64>,
    /// If the rank is interrupted, the reason, or an empty text.
    pub(super) interrupted: Option<String>,
}

impl StepStatus {
    /// Notes whether the rank is interrupted.
    pub(super) fn interrupted(mut self, interrupter: &Interrupter) -> Self {
        let reason = || interrupter.get_message().unwrap_or_default();
        self.interrupted = interrupter.should_stop().then(reason);
        self
    }

    /// The statuses of all ranks, in their order. One collective.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Disagreement`] if learning rates differ; those of the group.
    pub(super) fn exchange(
        self,
        group: &dyn ProcessGroup,
        label: &str,
    ) -> Result<Statuses, ZeroError> {
        if group.world_size() == 1 {
            return Ok(Statuses(vec![self]));
        }
        let bytes = serde_json::to_vec(&self).expect("a status has only plain fields");
        let all = group.gather_bytes(label, bytes)?;
        let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes);
        let all: Result<Vec<Self>, _> = all.iter().map(read).collect();
        let all = Statuses(all.expect("ranks run the same program"));
        match all.0.iter().position(|status| status.lr != self.lr) {
            None => Ok(all),
            Some(peer) => {
                let show = |lr: Option<u64>| {
                    lr.map_or("none".to_owned(), |lr| f64::from_bits(lr).to_string())
                };
                Err(ZeroError::Disagreement {
                    label: format!("learning rate, {label}"),
                    rank: group.rank(),
                    value: show(self.lr),
                    peer,
                    peer_value: show(all.0[peer].lr),
                })
            }
        }
    }
}

/// The statuses of all ranks, in their order.
pub(super) struct Statuses(Vec<StepStatus>);

impl Statuses {
    pub(super) fn of(&self, rank: usize) -> &StepStatus {
        &self.0[rank]
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &StepStatus> {
        self.0.iter()
    }

    /// Whether to stop. If one rank was interrupted, interrupts this one too, with the same reason.
    pub(super) fn stop(&self, interrupter: &Interrupter) -> bool {
        let reason = self.all().find_map(|status| status.interrupted.as_deref());
        if let (Some(reason), false) = (reason, interrupter.should_stop()) {
            interrupter.stop(Some(reason).filter(|reason| !reason.is_empty()));
        }
        reason.is_some()
    }
}
