//! Ranks that go on together or not at all.

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
/// A disk may take longer than the deadline of a collective. So ranks that wait for others do it in rounds, one collective each,
/// in which also those that are still at work take part: a rank that misses a round hangs. In the round after a rank failed all
/// others know it and stop.
pub(crate) struct JointWork<'g> {
    group: &'g dyn ProcessGroup,
    label: &'static str,
    last_round: Instant,
    /// By rank, of those whose work has ended.
    ended: BTreeMap<usize, Ended>,
}

impl<'g> JointWork<'g> {
    /// Begins work of this name. Collective, as all else here.
    pub fn new(group: &'g dyn ProcessGroup, label: &'static str) -> Self {
        Self {
            group,
            label,
            last_round: Instant::now(),
            ended: BTreeMap::new(),
        }
    }

    /// Tells the others from time to time that this rank is at work; to be called often.
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
    /// rank its own, on the others one that names it. Every rank calls it, whatever has happened to it.
    pub fn end<T>(self, own: Result<T, RecordError>) -> Result<T, RecordError> {
        let (value, done) = match own {
            Ok(value) => (Some(value), Ok(())),
            Err(error) => (None, Err(error)),
        };
        self.share(done)?;
        Ok(value.expect("this rank succeeded if all did"))
    }

    /// As [`end`](Self::end), and returns the values of all ranks, by rank.
    pub fn share<T: Serialize + DeserializeOwned>(
        mut self,
        own: Result<T, RecordError>,
    ) -> Result<Vec<T>, RecordError> {
        let own = own.and_then(|value| serde_json::to_value(value).map_err(message));
        let mut ended = Some(match &own {
            Ok(value) => Ok(value.clone()),
            Err(RecordError::OtherRank { .. }) => Err(None),
            Err(error) => Err(Some(error.to_string())),
        });
        while self.ended.len() < self.group.world_size() {
            if let Err(lost) = self.round(ended.take()) {
                // A lost group hides no error of this rank.
                return Err(own.err().unwrap_or(lost));
            }
        }
        own?;
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        let values = self.ended.into_values().flatten();
        let values = values.map(|value| serde_json::from_value(value).map_err(message));
        values.collect()
    }

    /// One collective, in which this rank says how it ended if it has just done so.
    fn round(&mut self, ended: Option<Ended>) -> Result<(), RecordError> {
        let own = serde_json::to_vec(&ended).map_err(message)?;
        let all = self.group.gather_bytes(self.label, own)?;
        for (rank, bytes) in all.iter().enumerate() {
            if let Some(ended) = serde_json::from_slice(bytes).map_err(message)? {
                self.ended.insert(rank, ended);
            }
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

fn message(error: serde_json::Error) -> RecordError {
    RecordError::Message {
        reason: error.to_string(),
    }
}
