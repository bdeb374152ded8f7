//! What happened to tensors, one event at a time: the data for plots and for profiles of blocks.
//!
//! [`record`] collects the events of this thread until its guard is dropped. Without a guard
//! nothing is collected. Tensors are seen in scopes and under a budget only:
//! [`record_all`](crate::record_all()) sees every one.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use burn_backend::DeviceId;
use burn_decorator::cell::rare;
use parking_lot::Mutex;

/// One thing that happened to a tensor, or the begin or end of a scope.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Time since [`record`] was called.
    pub at: Duration,
    /// What happened.
    pub kind: EventKind,
    /// Bytes that the event concerns.
    pub bytes: u64,
    /// Bytes that all managed tensors of the device occupy after it, as this thread knows them.
    pub live_bytes: u64,
    /// The device; `None` for scopes.
    pub device: Option<DeviceId>,
}

/// Kinds of [`Event`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum EventKind {
    /// A managed tensor was computed for the first time; what it is for.
    Alloc(Traced, Kind),
    /// Storage was dropped, the recipe stays.
    Evict(Traced),
    /// The tensor came back by its recipe. How long that took on this thread; next to nothing where
    /// a backend is lazy.
    Replay(Traced, Duration),
    /// The tensor moves to host memory.
    Offload(Traced),
    /// The tensor came back from host memory.
    Upload(Traced),
    /// Storage was dropped because no handle refers to the tensor any more, or its last user writes
    /// its result there.
    Free(Traced),
    /// The tensor outlives its step, such as a gradient or a new parameter: it stays, and no longer
    /// counts.
    Retire(Traced),
    /// An operation uses a parameter that [`name_parameters`](crate::name_parameters) has named.
    Parameter {
        /// Its path in the module.
        path: &'static str,
    },
    /// This thread has waited for other ranks.
    Collective {
        /// What it waited for: `ranks`, for the other ranks of a group.
        op: &'static str,
        /// How long it waited.
        time: Duration,
    },
    /// A scope began.
    ScopeBegin {
        /// The label given to [`checkpoint_labelled`](crate::checkpoint_labelled), or the name of
        /// its policy.
        label: String,
    },
    /// The scope that began last ended; what it made has been evicted by now.
    ScopeEnd,
}

/// The tensor of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traced {
    /// The operation that made it, such as `float_matmul`.
    pub op: &'static str,
    /// Its node: the same number in all events of one tensor.
    pub node: u64,
}

/// What a tensor is for, derived from its operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Made in forward.
    Activation,
    /// Made from gradients, in backward or by the optimizer; known under a budget only.
    Gradient,
    /// Booleans and random numbers: masks of attention and dropout.
    Mask,
    /// Data of the host: the batch.
    Input,
    /// There before the recording.
    Before,
}

type Events = Mutex<Vec<Event>>;

/// Whether any thread has ever recorded. Read first, because a static is read faster than a
/// thread-local.
static EVER: AtomicBool = AtomicBool::new(false);

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
    /// When each recording began, and its events; it ends when they are dropped.
    static RECORDINGS: RefCell<Vec<(Instant, Weak<Events>)>> = const { RefCell::new(Vec::new()) };
}

/// Collects what happens on this thread from now on to tensors that are managed: those of scopes,
/// and under a [`MemoryBudget`](crate::MemoryBudget) all of them. For every tensor of the thread
/// use [`record_all`](crate::record_all()). Of several recordings the newest gets the events, in
/// whichever order they end.
///
/// # Cost
///
/// About a hundred bytes and one read of the clock for each event.
pub fn record() -> Recording {
    let events = Arc::default();
    let recording = (Instant::now(), Arc::downgrade(&events));
    EVER.store(true, Ordering::Relaxed);
    ON.set(true);
    RECORDINGS.with_borrow_mut(|recordings| recordings.push(recording));
    Recording { events }
}

/// A recording under way; ends when dropped.
#[derive(Debug)]
#[must_use = "the recording ends when this is dropped"]
pub struct Recording {
    events: Arc<Events>,
}

impl Recording {
    /// Takes out the events so far.
    pub fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.events.lock())
    }

    /// Ends the recording and returns its events.
    pub fn finish(self) -> Vec<Event> {
        self.take()
    }
}

/// Whether this thread records, or did until the last event: to be checked before an event is made.
#[inline]
pub(crate) fn is_on() -> bool {
    EVER.load(Ordering::Relaxed) && rare(&ON)
}

/// Records a wait for other ranks that has just ended, in which this one sent so many bytes.
pub fn collective(op: &'static str, time: Duration, sent_bytes: u64) {
    if is_on() {
        emit(EventKind::Collective { op, time }, sent_bytes, 0, None);
    }
}

/// Adds an event if this thread records.
#[cold]
pub(crate) fn emit(kind: EventKind, bytes: u64, live_bytes: u64, device: Option<DeviceId>) {
    RECORDINGS.with_borrow_mut(|recordings| {
        while let Some((start, events)) = recordings.last() {
            if let Some(events) = events.upgrade() {
                events.lock().push(Event {
                    at: start.elapsed(),
                    kind,
                    bytes,
                    live_bytes,
                    device,
                });
                return;
            }
            recordings.pop();
        }
        ON.set(false);
    });
}
