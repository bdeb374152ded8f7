//! What ranks tell each other after each step.

use burn::train::Interrupter;
use serde::{Deserialize, Serialize};

use crate::ZeroError;
use crate::group::ProcessGroup;

/// One rank's word.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Word {
    /// Items for rank 0 to show.
    pub(super) items: usize,
    /// The learning rate of the step, bit for bit.
    pub(super) lr: Option<u64>,
    interrupted: bool,
    reason: Option<String>,
}

impl Word {
    pub(super) fn new(items: usize, lr: Option<f64>, interrupter: &Interrupter) -> Self {
        let interrupted = interrupter.should_stop();
        Self {
            items,
            lr: lr.map(f64::to_bits),
            interrupted,
            reason: interrupter.get_message().filter(|_| interrupted),
        }
    }
}

/// The words of all ranks, in their order.
pub(super) struct Words(Vec<Word>);

impl Words {
    /// # Errors
    ///
    /// [`ZeroError::Disagreement`] if schedulers differ; those of the group.
    pub(super) fn exchange(
        group: &dyn ProcessGroup,
        label: &str,
        own: Word,
    ) -> Result<Self, ZeroError> {
        if group.world_size() == 1 {
            return Ok(Self(vec![own]));
        }
        let bytes = serde_json::to_vec(&own).expect("a word has only plain fields");
        let words = group.gather_bytes(label, bytes)?;
        let words = words
            .iter()
            .map(|word| serde_json::from_slice(word).expect("ranks run the same program"));
        let words: Vec<Word> = words.collect();
        match words.iter().position(|word| word.lr != own.lr) {
            None => Ok(Self(words)),
            Some(peer) => {
                let show = |lr: Option<u64>| {
                    lr.map_or("none".to_owned(), |lr| f64::from_bits(lr).to_string())
                };
                Err(ZeroError::Disagreement {
                    label: format!("learning rate, {label}"),
                    rank: group.rank(),
                    value: show(own.lr),
                    peer,
                    peer_value: show(words[peer].lr),
                })
            }
        }
    }

    /// Items that a rank has for rank 0.
    pub(super) fn items(&self, rank: usize) -> usize {
        self.0[rank].items
    }

    /// Whether to stop, because one rank was interrupted: then all are, with its reason.
    pub(super) fn stop(&self, interrupter: &Interrupter) -> bool {
        let Some(word) = self.0.iter().find(|word| word.interrupted) else {
            return false;
        };
        if !interrupter.should_stop() {
            interrupter.stop(word.reason.as_deref());
        }
        true
    }
}
