//! What happened to tensors, one event at a time: the raw material of pictures and of profiles of blocks.
//!
//! [`record`] collects the events of this thread until its guard is dropped. Without a guard nothing is collected.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use burn_backend::DeviceId;

use crate::stack::{Stack, Ticket};

/// One thing that happened to a tensor, or the begin or end of a scope.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Time since [`record`] was called.
    pub at: Duration,
    /// What happened.
    pub kind: EventKind,
    /// Bytes that it is about.
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
    /// A managed tensor was computed for the first time by the operation `op`.
    Alloc {
        /// The operation, such as `float_matmul`.
        op: &'static str,
        /// The node: the same number in all events of one tensor.
        node: u64,
    },
    /// Storage was dropped, the recipe stays.
    Evict {
        /// The operation that made the tensor.
        op: &'static str,
        /// The node.
        node: u64,
    },
    /// The tensor came back by its recipe.
    Replay {
        /// The operation that was run again.
        op: &'static str,
        /// The node.
        node: u64,
        /// How long that took on this thread; next to nothing where a backend is lazy.
        time: Duration,
    },
    /// The tensor moves to host memory.
    Offload {
        /// The operation that made the tensor.
        op: &'static str,
        /// The node.
        node: u64,
    },
    /// The tensor came back from host memory.
    Upload {
        /// The operation that made the tensor.
        op: &'static str,
        /// The node.
        node: u64,
    },
    /// Storage was dropped because no handle refers to the tensor any more, or its last user writes its result there.
    Free {
        /// The operation that made the tensor.
        op: &'static str,
        /// The node.
        node: u64,
    },
    /// The tensor outlives its step, such as a gradient or a new parameter: it stays, and no longer counts.
    Retire {
        /// The operation that made the tensor.
        op: &'static str,
        /// The node.
        node: u64,
    },
    /// A scope began.
    ScopeBegin {
        /// The scope's number on this thread, counted from 0 for the first under [`record`].
        scope: u64,
        /// The label given to [`checkpoint_labelled`](crate::checkpoint_labelled), or the name of its policy.
        label: String,
    },
    /// A scope ended; what it made has been evicted by now.
    ScopeEnd {
        /// The scope's number.
        scope: u64,
        /// Its label.
        label: String,
    },
}

struct Recorder {
    start: Instant,
    scopes: u64,
    events: Vec<Event>,
}

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
    static RECORDERS: RefCell<Stack<Recorder>> = const { RefCell::new(Stack::new()) };
}

/// Collects what happens on this thread from now on. Of several recordings the newest gets the events, in whichever order they end.
///
/// # Cost
///
/// About a hundred bytes and a look at the clock an event.
pub fn record() -> Recording {
    let recorder = Recorder {
        start: Instant::now(),
        scopes: 0,
        events: Vec::new(),
    };
    ON.set(true);
    Recording {
        ticket: RECORDERS.with_borrow_mut(|recorders| recorders.push(recorder)),
        thread: PhantomData,
    }
}

/// A recording under way; ends when dropped.
#[derive(Debug)]
#[must_use = "the recording ends when this is dropped"]
pub struct Recording {
    ticket: Ticket,
    thread: PhantomData<*const ()>,
}

impl Recording {
    /// The events so far, which are taken out.
    pub fn take(&self) -> Vec<Event> {
        RECORDERS.with_borrow_mut(|recorders| match recorders.get_mut(self.ticket) {
            Some(recorder) => std::mem::take(&mut recorder.events),
            None => Vec::new(),
        })
    }

    /// Ends the recording and gives its events.
    pub fn finish(self) -> Vec<Event> {
        self.take()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        RECORDERS.with_borrow_mut(|recorders| {
            recorders.remove(self.ticket);
            ON.set(!recorders.is_empty());
        });
    }
}

/// Whether this thread records: to be asked before an event is made.
#[inline]
pub(crate) fn is_on() -> bool {
    ON.get()
}

/// Adds an event if this thread records.
pub(crate) fn emit(kind: EventKind, bytes: u64, live_bytes: u64, device: Option<DeviceId>) {
    RECORDERS.with_borrow_mut(|recorders| {
        if let Some(recorder) = recorders.top_mut() {
            recorder.events.push(Event {
                at: recorder.start.elapsed(),
                kind,
                bytes,
                live_bytes,
                device,
            });
        }
    });
}

/// Says that a scope begins, and gives it a number.
pub(crate) fn scope_begins(label: &str) -> u64 {
    if !is_on() {
        return 0;
    }
    let scope = RECORDERS.with_borrow_mut(|recorders| {
        recorders.top_mut().map_or(0, |recorder| {
            recorder.scopes += 1;
            recorder.scopes - 1
        })
    });
    let label = label.to_owned();
    emit(EventKind::ScopeBegin { scope, label }, 0, 0, None);
    scope
}
