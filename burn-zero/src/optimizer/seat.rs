//! Where an optimizer inside of a `Learner` finds its ranks: on the thread that trains.
//!
//! A Learner hides its optimizer, and wrappers hide it from each other. What both the strategy and the optimizer can see
//! is the thread, and a thread is a rank: the strategy leaves a seat there, and the optimizer takes it.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use burn::module::ParamId;
use parking_lot::Mutex;

use super::prepare::Asks;
use crate::ZeroError;
use crate::group::{Agree, ProcessGroup};
use crate::reduce::Exchange;

thread_local! {
    static SEAT: RefCell<Option<Arc<Seat>>> = const { RefCell::new(None) };
}

/// A rank's place in a training.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) group: Arc<dyn ProcessGroup>,
    /// Those who sit down, until the seat is set.
    answers: Mutex<Vec<Answer>>,
    set: OnceLock<Setting>,
    /// Rank 0 tells the others before it makes a record.
    announcing: AtomicBool,
}

/// What an optimizer says of itself.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) asks: Asks,
    /// Why it cannot be sharded so.
    pub(crate) refused: Option<ZeroError>,
}

/// What all wait for: the model is known.
#[derive(Debug)]
pub(crate) struct Setting {
    pub(crate) exchange: Arc<Exchange>,
    /// Of the parameters, in their order.
    pub(crate) ids: Vec<ParamId>,
}

/// Takes the seat away from the thread.
pub(crate) struct Leave(Option<Arc<Seat>>);

impl Drop for Leave {
    fn drop(&mut self) {
        SEAT.with_borrow_mut(|seat| core::mem::swap(seat, &mut self.0));
    }
}

impl Seat {
    pub(crate) fn new(group: Arc<dyn ProcessGroup>) -> Arc<Self> {
        Arc::new(Self {
            group,
            answers: Mutex::default(),
            set: OnceLock::new(),
            announcing: AtomicBool::new(false),
        })
    }

    /// The seat of this thread, if a strategy trains on it.
    pub(crate) fn here() -> Option<Arc<Self>> {
        SEAT.with_borrow(Clone::clone)
    }

    /// Puts the seat on this thread.
    pub(crate) fn put(self: &Arc<Self>) -> Leave {
        let mut leave = Leave(Some(self.clone()));
        SEAT.with_borrow_mut(|seat| core::mem::swap(seat, &mut leave.0));
        leave
    }

    /// How the seat is set; `None` while the strategy still asks who is there.
    pub(crate) fn setting(&self) -> Option<&Setting> {
        self.set.get()
    }

    pub(crate) fn set(&self, setting: Setting) {
        // A seat belongs to one training.
        let _ = self.set.set(setting);
    }

    pub(crate) fn answer(&self, answer: Answer) {
        self.answers.lock().push(answer);
    }

    pub(crate) fn take_answers(&self) -> Vec<Answer> {
        core::mem::take(&mut self.answers.lock())
    }

    /// While `make` runs, rank 0's optimizer calls the others before it makes a record, and they know when it is done.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn announce<R>(&self, make: impl FnOnce() -> R) -> Result<R, ZeroError> {
        self.announcing.store(true, Ordering::Relaxed);
        let made = make();
        self.announcing.store(false, Ordering::Relaxed);
        self.group.agree_any(RECORD_LABEL, false)?;
        Ok(made)
    }

    /// Calls the other ranks, if they wait for it.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn call(&self) -> Result<(), ZeroError> {
        if self.announcing.load(Ordering::Relaxed) {
            self.group.agree_any(RECORD_LABEL, true)?;
        }
        Ok(())
    }

    /// On the other ranks: takes part in the records that rank 0 makes, until it is done.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn attend(&self, mut take_part: impl FnMut()) -> Result<(), ZeroError> {
        while self.group.agree_any(RECORD_LABEL, false)? {
            take_part();
        }
        Ok(())
    }
}

const RECORD_LABEL: &str = "whether rank 0 makes a record";
