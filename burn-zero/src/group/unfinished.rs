//! Files that are being written when a fault ends the process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

/// Returns when what its owner writes is complete.
type Finish = dyn Fn() + Send + Sync;

static WRITERS: Mutex<Vec<Weak<Finish>>> = Mutex::new(Vec::new());

/// Before the process ends `finish` is called, on another thread than the owner's, if it still lives.
pub(crate) fn register(finish: &Arc<Finish>) {
    let mut writers = WRITERS.lock();
    writers.retain(|writer| writer.strong_count() > 0);
    writers.push(Arc::downgrade(finish));
}

/// Waits until all files are complete, at most so long. Whether they are.
pub(crate) fn finish(bound: Duration) -> bool {
    let writers: Vec<_> = WRITERS.lock().iter().filter_map(Weak::upgrade).collect();
    let (done, finished) = channel();
    thread::spawn(move || {
        for finish in writers {
            // A writer that fails has said why, and cannot be helped.
            let _ = catch_unwind(AssertUnwindSafe(|| finish()));
        }
        let _ = done.send(()); // nobody waits any more
    });
    finished.recv_timeout(bound).is_ok()
}
