//! Laws that compare two runs from the same seed.
//!
//! Every backend has one random generator for the whole process, so each test here locks it, and no
//! test that draws random numbers without the lock may be added to this binary.

mod cast_cache;
mod combinations;
mod explained_learner;
mod learner;
mod off;
mod parameters;
mod recompute;
mod recompute_learner;
mod stage_3;
mod threads;
mod training;
mod windows_of_one;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks the random generator for one test.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
