//! What the Learner's loop of an update promises: Burn's own training, and windows that end where
//! epochs do.
//!
//! Every backend has one random generator for the whole process, so each test here takes its turn.

mod burns;
mod equal;
mod learner;
mod model;
mod progress;
mod refused;
mod resumed;
mod scaled;
mod stopped;
mod tail;
mod watch;
mod windows;

use learner::turn;
