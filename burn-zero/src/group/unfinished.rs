//! Files that are being written when a fault ends the process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

/// Returns when the files that its owner writes are complete.
type Finish = dyn Fn() + Send + Sync;

static WRITERS: Mutex<Vec<Weak<Finish>>> = Mutex::new(Vec::new());

/// Registers `finish`, if still alive, to be called before the process ends, on another thread than the owner's.
pub(crate) fn register(finish: &Arc<Finish>) {
    let mut writers = WRITERS.lock();
    writers.retain(|writer| writer.strong_count() > 0);
    writers.push(Arc::downgrade(finish));
}

/// Waits until all files are complete, at most for `bound`. Returns whether they are.
pub(crate) fn finish(bound: Duration) -> bool {
    let writers: Vec<_> = WRITERS.lock().iter().filter_map(Weak::upgrade).collect();
    let (done, finished) = channel();
    thread::spawn(move || {
        for finish in writers {
            // A writer that fails has reported why; the others continue.
            let _ = catch_unwind(AssertUnwindSafe(|| finish()));
        }
        let _ = done.send(()); // the receiver may have timed out
    });
    finished.recv_timeout(bound).is_ok()
}
