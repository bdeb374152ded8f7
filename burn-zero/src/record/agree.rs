//! Ranks that go on together or not at all.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::RecordError;
use crate::group::round;
use crate::{ProcessGroup, ZeroError};

/// What a rank says in a round.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Message<T> {
    /// At work.
    Working,
    /// Done, with what it has for the others.
    Done(T),
    /// It failed.
    Failed(String),
    /// It stopped because another failed.
    Stopped,
    /// It has said how it ended.
    Said,
}

/// Work that each rank does by itself and that all end together.
///
/// A disk may take longer than the deadline of a collective. So ranks that wait for others do it in rounds, in which also
/// those that are still at work take part: a rank that does not come to a round hangs. In the round after a rank failed all
/// others know it and stop.
pub(super) struct Together<'g, T> {
    group: &'g dyn ProcessGroup,
    label: &'static str,
    round: Duration,
    last: Instant,
    /// How ranks ended that have said it.
    ended: BTreeMap<usize, Message<T>>,
}

impl<'g, T: Clone + Serialize + DeserializeOwned> Together<'g, T> {
    pub fn new(group: &'g dyn ProcessGroup, label: &'static str) -> Self {
        Self::with_round(group, label, round(group.deadline()))
    }

    fn with_round(group: &'g dyn ProcessGroup, label: &'static str, round: Duration) -> Self {
        Self {
            group,
            label,
            round,
            last: Instant::now(),
            ended: BTreeMap::new(),
        }
    }

    /// Tells the others from time to time that this rank is at work; to be called often.
    ///
    /// # Errors
    ///
    /// If another rank failed: this one need not go on.
    pub fn at_work(&mut self) -> Result<(), RecordError> {
        if self.last.elapsed() < self.round {
            return Ok(());
        }
        self.meet(Message::Working)?;
        self.first_failure().map_or(Ok(()), Err)
    }

    /// Waits until all have ended their work. Returns what every rank has, by rank, or an error on every rank if one has
    /// failed: on that rank its own, on the others one that names it. Every rank comes here whatever has happened to it.
    pub fn end(mut self, mine: Result<T, RecordError>) -> Result<Vec<T>, RecordError> {
        let mut message = match &mine {
            Ok(done) => Message::Done(done.clone()),
            Err(RecordError::OtherRank { .. }) => Message::Stopped,
            Err(error) => Message::Failed(error.to_string()),
        };
        while self.ended.len() < self.group.world_size() {
            if let Err(error) = self.meet(message) {
                // A lost group loses no error of this rank.
                return Err(mine.err().unwrap_or(error));
            }
            message = Message::Said;
        }
        mine?;
        if let Some(failure) = self.first_failure() {
            return Err(failure);
        }
        let ended = self.ended.into_values();
        let done = ended.filter_map(|message| match message {
            Message::Done(done) => Some(done),
            _ => None,
        });
        Ok(done.collect())
    }

    /// One round.
    fn meet(&mut self, mine: Message<T>) -> Result<(), RecordError> {
        let lost = |error: serde_json::Error| RecordError::Message {
            reason: error.to_string(),
        };
        let mine = serde_json::to_vec(&mine).map_err(lost)?;
        let all = self.group.gather_bytes(self.label, mine)?;
        for (rank, message) in all.iter().enumerate() {
            match serde_json::from_slice(message).map_err(lost)? {
                Message::Working | Message::Said => {}
                ended => drop(self.ended.insert(rank, ended)),
            }
        }
        self.last = Instant::now();
        Ok(())
    }

    fn first_failure(&self) -> Option<RecordError> {
        self.ended
            .iter()
            .find_map(|(&rank, message)| match message {
                Message::Failed(message) => Some(RecordError::OtherRank {
                    rank,
                    message: message.clone(),
                }),
                _ => None,
            })
    }
}

/// What every rank has, by rank, of work that takes no time: see [`Together::end`].
pub(crate) fn agree<T: Clone + Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    label: &'static str,
    mine: Result<T, RecordError>,
) -> Result<Vec<T>, RecordError> {
    Together::new(group, label).end(mine)
}

/// What was made, and whether it could be: for [`agree`].
pub(crate) fn split<T>(made: Result<T, RecordError>) -> (Option<T>, Result<(), RecordError>) {
    match made {
        Ok(made) => (Some(made), Ok(())),
        Err(error) => (None, Err(error)),
    }
}

impl From<ZeroError> for RecordError {
    fn from(error: ZeroError) -> Self {
        match error {
            ZeroError::Optimizer(error) => Self::State(error),
            error => Self::Group(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GroupOptions, ThreadGroup};
    use std::thread::sleep;

    fn failure(message: &str) -> RecordError {
        RecordError::Message {
            reason: message.to_owned(),
        }
    }

    /// Rank 1 works for three times the deadline, the others wait for it.
    #[test]
    fn work_may_take_longer_than_the_deadline() {
        let deadline = Duration::from_millis(300);
        let ranks = ThreadGroup::spawn(3, GroupOptions::with_deadline(deadline), |group| {
            let mut together = Together::with_round(&group, "work", Duration::from_millis(20));
            let mut steps = if group.rank() == 1 { 90 } else { 0 };
            let worked = loop {
                if steps == 0 {
                    break Ok(group.rank());
                }
                sleep(Duration::from_millis(10));
                if let Err(error) = together.at_work() {
                    break Err(error);
                }
                steps -= 1;
            };
            together.end(worked).unwrap()
        });
        assert_eq!(ranks.unwrap(), vec![vec![0, 1, 2]; 3]);
    }

    #[test]
    fn a_rank_that_hangs_is_found() {
        let deadline = Duration::from_millis(300);
        let ranks = ThreadGroup::spawn(2, GroupOptions::with_deadline(deadline), |group| {
            if group.rank() == 1 {
                sleep(Duration::from_millis(900));
            }
            agree(&group, "work", Ok(())).unwrap_err()
        });
        let errors = ranks.unwrap();
        assert!(matches!(&errors[0], RecordError::Group(_)), "{}", errors[0]);
    }

    #[test]
    fn a_failure_stops_those_at_work() {
        let ranks = ThreadGroup::spawn(3, GroupOptions::default(), |group| {
            let mut together = Together::<()>::with_round(&group, "work", Duration::from_millis(5));
            let worked = match group.rank() {
                2 => Err(failure("disk full")),
                _ => loop {
                    sleep(Duration::from_millis(1));
                    if let Err(error) = together.at_work() {
                        break Err(error);
                    }
                },
            };
            together.end(worked).unwrap_err().to_string()
        });
        let errors = ranks.unwrap();
        let own = failure("disk full").to_string();
        let named = format!("rank 2 failed: {own}");
        assert_eq!(errors, [named.clone(), named, own]);
    }
}
