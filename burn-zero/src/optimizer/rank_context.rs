//! Where an optimizer inside of a `Learner` finds its ranks: on the thread that trains.
//!
//! A Learner hides its optimizer, and wrappers hide it from each other. What both the strategy and the optimizer can see
//! is the thread, and a thread is a rank: the strategy leaves a seat there, and the optimizer takes it.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

use burn::module::ParamId;
use burn::tensor::backend::DeviceId;
use parking_lot::Mutex;

use super::announce::Turn;
use super::prepare::PrepareRequest;
use crate::group::ProcessGroup;
use crate::reduce::GradientReducer;

thread_local! {
    static CONTEXT: RefCell<Option<Arc<RankContext>>> = const { RefCell::new(None) };
}

/// A rank's place in a training.
#[derive(Debug)]
pub(crate) struct RankContext {
    pub(crate) group: Arc<dyn ProcessGroup>,
    /// What the rank computes on.
    pub(super) device: DeviceId,
    /// Of those who sit down, until the seat is set.
    answers: Mutex<Vec<PrepareRequest>>,
    set: OnceLock<Setting>,
    pub(super) turn: Turn,
}

/// What all wait for: the model is known.
#[derive(Debug)]
pub(crate) struct Setting {
    pub(crate) reducer: Arc<GradientReducer>,
    /// Of the parameters, in their order.
    pub(crate) ids: Vec<ParamId>,
}

/// Takes the seat away from the thread.
pub(crate) struct Leave(Option<Arc<RankContext>>);

impl Drop for Leave {
    fn drop(&mut self) {
        CONTEXT.with_borrow_mut(|context| core::mem::swap(context, &mut self.0));
    }
}

impl RankContext {
    pub(crate) fn new(group: Arc<dyn ProcessGroup>, device: DeviceId) -> Arc<Self> {
        Arc::new(Self {
            group,
            device,
            answers: Mutex::default(),
            set: OnceLock::new(),
            turn: Turn::default(),
        })
    }

    /// The seat of this thread, if a strategy trains on it.
    pub(crate) fn here() -> Option<Arc<Self>> {
        CONTEXT.with_borrow(Clone::clone)
    }

    /// Puts the seat on this thread.
    pub(crate) fn put(self: &Arc<Self>) -> Leave {
        let mut leave = Leave(Some(self.clone()));
        CONTEXT.with_borrow_mut(|context| core::mem::swap(context, &mut leave.0));
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

    pub(crate) fn answer(&self, answer: PrepareRequest) {
        self.answers.lock().push(answer);
    }

    pub(crate) fn take_answers(&self) -> Vec<PrepareRequest> {
        core::mem::take(&mut self.answers.lock())
    }
}
