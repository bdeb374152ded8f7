//! What a scaler knows of the models that its updates train.

use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};

use super::shared_scale::UpdateId;

/// Moments of the process, in their order.
type Moment = u64;

fn now() -> Moment {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The updates of a scaler that live, and whether it knows their models: the losses that are
/// computed from them are marked.
#[derive(Debug, Default)]
pub(super) struct Models {
    updates: Vec<Registered>,
    /// Whether a marked loss of this scaler was differentiated since the last step.
    saw_own: bool,
    /// The same of any of its losses.
    saw_any: bool,
    /// Whether a loss on its thread was taken for another training's since the last step.
    left_alone: bool,
    /// Whether its updates mark parameters: not if the program makes others of them after each
    /// step.
    marks: Marks,
    /// Whether any loss was differentiated on a thread of this scaler, and since no other update
    /// was registered.
    trains_on_own_thread: bool,
    /// When the last update was registered.
    registered: Moment,
    /// When the last step was taken or tried.
    stepped: Moment,
}

#[derive(Clone, Debug)]
struct Registered {
    update: Weak<()>,
    model: Model,
}

/// What is known of the parameters that an update updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Model {
    /// Nothing: it has not updated any.
    Unknown,
    /// It has updated them, so their losses are marked.
    Marked,
}

/// Whether losses are marked after an update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Marks {
    /// No loss has shown it yet.
    #[default]
    Expected,
    /// They were seen.
    Seen,
    /// They are not.
    Lost,
}

impl Models {
    /// Of a copy for another rank, whose parameters are others.
    pub(super) fn for_rank(&self) -> Self {
        let updates = self.updates.iter();
        let unknown = updates.map(|known| Registered {
            model: Model::Unknown,
            ..known.clone()
        });
        Self {
            updates: unknown.collect(),
            registered: now(),
            ..Self::default()
        }
    }

    /// Adds an update.
    pub(super) fn register(&mut self, update: &UpdateId) {
        self.trains_on_own_thread = false;
        self.registered = now();
        self.updates.push(Registered {
            update: update.downgrade(),
            model: Model::Unknown,
        });
    }

    /// The updates that live. Without any a scaler scales nothing: no step would be skipped.
    fn live(&self) -> impl Iterator<Item = &Registered> {
        let all = self.updates.iter();
        all.filter(|known| known.update.strong_count() > 0)
    }

    /// Whether an update lives.
    pub(super) fn is_any_live(&self) -> bool {
        self.live().next().is_some()
    }

    /// Whether an update lives whose model is not known: a loss that is not marked may be its.
    pub(super) fn awaits(&self) -> bool {
        self.live().any(|known| known.model == Model::Unknown)
    }

    /// Whether that loss may be differentiated on a thread that the scaler is not bound to.
    pub(super) fn awaits_on_any_thread(&self) -> bool {
        self.awaits() && !self.trains_on_own_thread
    }

    /// Whether the training of `other` had ended when the last update was registered: its models
    /// may be trained on by this scaler.
    pub(super) fn follows(&self, other: Moment) -> bool {
        other < self.registered
    }

    /// When the last step was taken or tried.
    pub(super) fn last_step(&self) -> Moment {
        self.stepped
    }

    /// A loss of this scaler is differentiated.
    pub(super) fn found(&mut self, is_marked: bool, is_on_own_thread: bool) {
        self.saw_any = true;
        self.saw_own |= is_marked;
        if is_marked {
            self.marks = Marks::Seen;
        }
        self.trains_on_own_thread |= is_on_own_thread;
    }

    /// A loss on a thread of this scaler is taken for another training's.
    pub(super) fn leave_alone(&mut self) {
        self.left_alone = true;
    }

    /// An update took a step, which `updated` parameters or not.
    pub(super) fn stepped(&mut self, update: &UpdateId, updated: bool) {
        let saw_own = core::mem::take(&mut self.saw_own);
        self.stepped = now();
        self.updates.retain(|known| known.update.strong_count() > 0);
        let saw_any = core::mem::take(&mut self.saw_any);
        let left_alone = core::mem::take(&mut self.left_alone);
        if self.marks == Marks::Expected && left_alone && !saw_any {
            // The loss of this step was its own, and not marked.
            self.marks = Marks::Lost;
            self.forget();
        }
        let is_known = saw_own || updated && self.marks != Marks::Lost;
        for known in &mut self.updates {
            if is_known && known.update.ptr_eq(&update.downgrade()) {
                known.model = Model::Marked;
            }
        }
    }

    /// The weights of the models may have been loaded, so that they are not marked.
    pub(super) fn forget(&mut self) {
        for known in &mut self.updates {
            known.model = Model::Unknown;
        }
    }
}
