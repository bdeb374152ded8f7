//! Finds the scaler of a loss: by the parameters that the loss is computed from, by the thread, by
//! the process. It holds weak references only.

use std::cell::RefCell;
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;

use super::state::Shared;
use crate::cast::{Lineage, Owner};

thread_local! {
    /// The scalers that this thread uses, the last used one last.
    static OF_THREAD: RefCell<Vec<Weak<Shared>>> = const { RefCell::new(Vec::new()) };
}

/// The scalers of the process, the oldest first.
static LIVE: LazyLock<Mutex<Vec<Weak<Shared>>>> = LazyLock::new(Mutex::default);

/// Adds a new scaler.
pub(super) fn register(scaler: &Arc<Shared>) {
    let mut live = LIVE.lock();
    live.retain(|known| known.strong_count() > 0);
    let scaler = Arc::downgrade(scaler);
    if !live.iter().any(|known| known.ptr_eq(&scaler)) {
        live.push(scaler);
    }
}

/// Makes `scaler` the last one that the current thread uses: it is made there, becomes the scale of
/// an update, or one of its updates takes a step.
pub(super) fn use_on_thread(scaler: &Arc<Shared>) {
    OF_THREAD.with_borrow_mut(|used| {
        let scaler = Arc::downgrade(scaler);
        used.retain(|known| known.strong_count() > 0 && !known.ptr_eq(&scaler));
        used.push(scaler);
    });
}

/// How many scalers live that this thread uses.
pub(super) fn count_of_thread() -> usize {
    OF_THREAD.with_borrow(|used| used.iter().filter(|known| known.strong_count() > 0).count())
}

/// The scaler of a loss with this lineage that is differentiated on this thread, which `needs` one
/// (f16) or not.
///
/// A scaler takes the losses of its own model: those that are computed from a parameter that one of
/// its updates has updated. Before the first step of an update its model is not known; until then
/// the scaler takes what is differentiated on its thread, and if it has none, as on the threads of a
/// Learner with several devices, on any. So a backward pass of another training is left alone.
pub(super) fn lookup(lineage: Lineage, needs: bool) -> Option<Arc<Shared>> {
    let of_thread: Vec<_> =
        OF_THREAD.with_borrow(|used| used.iter().rev().filter_map(Weak::upgrade).collect());
    let awaits_model = |scaler: &Arc<Shared>| scaler.lock().awaits_model();
    let current = of_thread.first().cloned();
    let older = of_thread.iter().skip(1);
    let mut others = older.filter(|other| awaits_model(other));
    let found = match (current, lineage) {
        (Some(current), _) if awaits_model(&current) && may_be_of(&current, lineage) => {
            if others.next().is_some() {
                warn_several();
            }
            Some(current)
        }
        (current, Lineage::Trained(Owner::Several)) => {
            warn_several();
            current.or_else(newest)
        }
        (_, Lineage::Trained(Owner::Scaler(number))) => {
            let marked = with_number(number);
            let trains = marked.filter(|scaler| scaler.lock().models.is_any_live());
            trains.or_else(|| others.next().cloned())
        }
        _ => others.next().cloned(),
    };
    if let Some(found) = found {
        let is_of_thread = of_thread.iter().any(|known| Arc::ptr_eq(known, &found));
        found.found(lineage, is_of_thread);
        return Some(found);
    }
    if let Some(current) = of_thread.first() {
        current.lock().models.leave_alone();
    }
    if !needs {
        // A loss that needs no scale must not use the scaler of another training.
        return None;
    }
    let elsewhere = of_thread.is_empty().then(without_thread).flatten();
    if elsewhere.is_none() {
        match newest() {
            Some(_) => warn_left_alone(),
            None => warn_unscaled(),
        }
    }
    elsewhere
}

/// Whether a loss may be of the model of a scaler that does not know its model: nobody has marked
/// it, or a scaler whose training had ended.
fn may_be_of(scaler: &Arc<Shared>, lineage: Lineage) -> bool {
    match lineage {
        Lineage::Forward | Lineage::Gradient => true,
        Lineage::Trained(Owner::Several) => false,
        Lineage::Trained(Owner::Scaler(number)) => with_number(number).is_none_or(|marked| {
            let last_step = marked.lock().models.last_step();
            scaler.lock().models.follows(last_step)
        }),
    }
}

fn newest() -> Option<Arc<Shared>> {
    LIVE.lock().iter().rev().find_map(Weak::upgrade)
}

fn with_number(number: u32) -> Option<Arc<Shared>> {
    let live = LIVE.lock();
    let mut scalers = live.iter().filter_map(Weak::upgrade);
    scalers.find(|scaler| scaler.number() == number)
}

/// The newest scaler whose model is not known and whose losses are not differentiated on its own
/// thread.
fn without_thread() -> Option<Arc<Shared>> {
    let live: Vec<_> = LIVE.lock().iter().rev().filter_map(Weak::upgrade).collect();
    live.into_iter()
        .find(|scaler| scaler.lock().awaits_model_on_any_thread())
}

/// Warns that f16 gradients may underflow.
fn warn_unscaled() {
    burn_decorator::warn_user!(
        "backward in f16 without a loss scale: gradients below 6e-8 become 0; train with an update that has one, \
         `Update::new(optimizer).scale(GradScalerConfig::default())?`, or say with `GradScaler::disabled()` \
         that none is wanted"
    );
}

/// Warns that a scaler lives and does not scale this loss.
fn warn_left_alone() {
    burn_decorator::warn_user!(
        "backward in f16 of a loss that is not scaled: no parameter took part in it that an update with a live GradScaler \
         has updated; where it is a loss of a scaler's own model, write `scaler.backward(loss)` in place of \
         `loss.backward()`; where it is scaled by hand, `GradScaler::unscaled(|| loss.backward())`"
    );
}

/// Warns that a loss may be another scaler's.
fn warn_several() {
    burn_decorator::warn_user!(
        "several loss scalers live on one thread, and a loss may be of any of them: write `scaler.backward(loss)` in place \
         of `loss.backward()`, or let all updates share one scaler"
    );
}
