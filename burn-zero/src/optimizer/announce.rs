//! The calls by which rank 0 leads the others while it makes and writes records.
//!
//! A disk may take longer than the deadline of a collective. So rank 0 tells the others in rounds that it is at work, as ranks do that
//! write a record together; a rank 0 that does not come to a round hangs.

use std::sync::Arc;
use std::thread;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::rank_context::RankContext;
use crate::ZeroError;
use crate::group::{ProcessGroup, round};

/// What rank 0 says in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    Done,
    /// It is about to make a record in which all take part.
    Record,
    Working,
}

const WORDS: [Word; 3] = [Word::Done, Word::Record, Word::Working];

/// Rank 0's turns: one thread at a time calls the others.
#[derive(Debug, Default)]
pub(super) struct Turn {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// The others do not wait for rank 0's word.
    #[default]
    Idle,
    Announcing,
}

/// The others take part in a record, and hear nothing else until it is made.
pub(crate) struct Making<'a> {
    _turn: Option<MutexGuard<'a, State>>,
}

/// Ends the rounds, also where making a record panics.
struct Ends<'a>(&'a Turn);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        *self.0.state.lock() = State::Idle;
        self.0.changed.notify_all();
    }
}

impl RankContext {
    /// While `make` runs, rank 0's optimizer calls the others before it makes a record, and they know when it is done; however
    /// long that takes.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn announce<R>(&self, make: impl FnOnce() -> R) -> Result<R, ZeroError> {
        if self.group.world_size() == 1 {
            return Ok(make());
        }
        *self.turn.state.lock() = State::Announcing;
        let made = thread::scope(|scope| {
            let (group, turn) = (self.group.clone(), &self.turn);
            let ends = Ends(turn);
            let rounds = thread::Builder::new()
                .name("rank 0, at work".to_owned())
                .spawn_scoped(scope, move || turn.tell_others(&group))
                .expect("the system starts a thread");
            let made = make();
            drop(ends);
            rounds
                .join()
                .expect("it only calls the group")
                .map(|()| made)
        })?;
        say(&*self.group, Word::Done)?;
        Ok(made)
    }

    /// Calls the other ranks, if they wait for it.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn call(&self) -> Result<Making<'_>, ZeroError> {
        let turn = self.turn.state.lock();
        if *turn == State::Idle {
            return Ok(Making { _turn: None });
        }
        say(&*self.group, Word::Record)?;
        Ok(Making { _turn: Some(turn) })
    }

    /// On the other ranks: takes part in the records that rank 0 makes, until it is done.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn attend(&self, mut take_part: impl FnMut()) -> Result<(), ZeroError> {
        loop {
            match say(&*self.group, Word::Working)? {
                Word::Done => return Ok(()),
                Word::Record => take_part(),
                Word::Working => {}
            }
        }
    }
}

impl Turn {
    /// Tells the other ranks from time to time that this one is at work, until it is not.
    fn tell_others(&self, group: &Arc<dyn ProcessGroup>) -> Result<(), ZeroError> {
        let round = round(group.deadline());
        let mut state = self.state.lock();
        while *state == State::Announcing {
            let waited = self.changed.wait_for(&mut state, round);
            if waited.timed_out() && *state == State::Announcing {
                say(&**group, Word::Working)?;
            }
        }
        Ok(())
    }
}

/// A round: what rank 0 says.
fn say(group: &dyn ProcessGroup, own: Word) -> Result<Word, ZeroError> {
    let words = group.gather_bytes("whether rank 0 makes a record", vec![own as u8])?;
    let word = words.first().and_then(|word| word.first());
    Ok(word.map_or(Word::Done, |&word| WORDS[usize::from(word)]))
}
