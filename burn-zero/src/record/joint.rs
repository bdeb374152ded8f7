//! Work that succeeds on all ranks or fails on all.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;

use super::RecordError;
use crate::ProcessGroup;
use crate::group::round;

/// How a rank's work ended: with a value for the others, with an error, or (`Err(None)`) because another rank failed.
type Ended = Result<Json, Option<String>>;

/// Work that each rank does by itself and that all end together.
///
/// A disk may take longer than the deadline of a collective. So waiting ranks repeat a small collective, in which ranks at work take
/// part too: only a rank that misses one hangs. After a rank has failed, the next of these collectives tells all others to
/// stop.
pub(crate) struct JointWork<'g> {
    group: &'g dyn ProcessGroup,
    label: &'static str,
    last_round: Instant,
    /// The ranks whose work has ended.
    ended: BTreeMap<usize, Ended>,
}

impl<'g> JointWork<'g> {
    /// Begins work of this name. Collective, as are all methods.
    pub fn new(group: &'g dyn ProcessGroup, label: &'static str) -> Self {
        Self {
            group,
            label,
            last_round: Instant::now(),
            ended: BTreeMap::new(),
        }
    }

    /// Takes part in a round if one is due, to show that this rank is at work; to be called often.
    ///
    /// # Errors
    ///
    /// If another rank failed: this one need not go on.
    pub fn at_work(&mut self) -> Result<(), RecordError> {
        if self.last_round.elapsed() < round(self.group.deadline()) {
            return Ok(());
        }
        self.round(None)?;
        self.failure().map_or(Ok(()), Err)
    }

    /// Waits until all have ended their work. Returns this rank's value, or an error on every rank if one has failed: on that
    /// rank its own, on the others one that names it. Every rank must call it, also after an error.
    pub fn end<T>(self, own: Result<T, RecordError>) -> Result<T, RecordError> {
        let mut value = None;
        self.share(own.map(|own| value = Some(own)))?;
        Ok(value.expect("this rank succeeded if all did"))
    }

    /// As [`end`](Self::end), and returns the values of all ranks, by rank.
    pub fn share<T: Serialize + DeserializeOwned>(
        mut self,
        own: Result<T, RecordError>,
    ) -> Result<Vec<T>, RecordError> {
        let mut ended = Some(match &own {
            Ok(value) => Ok(serde_json::to_value(value).expect("values for ranks are JSON")),
            Err(RecordError::OtherRank { .. }) => Err(None),
            Err(error) => Err(Some(error.to_string())),
        });
        while self.ended.len() < self.group.world_size() {
            if let Err(lost) = self.round(ended.take()) {
                // This rank's own error takes precedence over a lost group.
                return Err(own.err().unwrap_or(lost));
            }
        }
        own?;
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        let values = self.ended.into_iter();
        let values = values.filter_map(|(rank, value)| Some((rank, value.ok()?)));
        let read = |(rank, value)| serde_json::from_value(value).map_err(unreadable(rank));
        values.map(read).collect()
    }

    /// One collective, with this rank's result if its work has just ended.
    fn round(&mut self, ended: Option<Ended>) -> Result<(), RecordError> {
        let own = serde_json::to_vec(&ended).expect("JSON values are JSON");
        let all = self.group.gather_bytes(self.label, own)?;
        for (rank, bytes) in all.iter().enumerate() {
            let ended: Option<_> = serde_json::from_slice(bytes).map_err(unreadable(rank))?;
            self.ended.extend(ended.map(|ended| (rank, ended)));
        }
        self.last_round = Instant::now();
        Ok(())
    }

    /// The first rank that failed by itself.
    fn failure(&self) -> Option<RecordError> {
        let mut ended = self.ended.iter();
        ended.find_map(|(&rank, ended)| {
            let message = ended.as_ref().err()?.clone()?;
            Some(RecordError::OtherRank { rank, message })
        })
    }
}

/// The error for a rank that runs another program.
fn unreadable(rank: usize) -> impl FnOnce(serde_json::Error) -> RecordError {
    move |error| RecordError::OtherRank {
        rank,
        message: format!("its message cannot be understood: {error}"),
    }
}
