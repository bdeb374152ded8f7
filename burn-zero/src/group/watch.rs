//! Ends the process in bounded time when a group of threads is lost and one of them does not end.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process,
    sync::{Arc, Weak, mpsc::channel},
    thread,
    time::Duration,
};

use parking_lot::Mutex;

use super::threads::Mailboxes;

/// What the other threads of a lost group get to end, or four deadlines if these are shorter.
const GRACE: Duration = Duration::from_secs(10);

/// Limit for completing files that are being written, before the process ends.
const LONGEST_WRITE: Duration = Duration::from_secs(600);

/// Limit for exit handlers, which may wait for the thread that hangs, and for ranks that waited for their files.
const LAST: Duration = Duration::from_secs(2);

/// Returns when all threads of a group have ended, or ends the process.
pub(super) fn watch(mailboxes: &Mailboxes, deadline: Duration) {
    let Some(fault) = mailboxes.wait_for_fault() else {
        return;
    };
    if mailboxes.wait_for_ends(GRACE.min(4 * deadline)).is_empty() {
        return;
    }
    let writes = match finish(LONGEST_WRITE) {
        true => "",
        false => ", before a record was written",
    };
    // A rank that waited for its files ends by its own panic now.
    let running = mailboxes.wait_for_ends(LAST);
    if !running.is_empty() {
        let ranks: Vec<_> = running.iter().map(|rank| format!("rank {rank}")).collect();
        let (ranks, verb) = (
            ranks.join(" and "),
            ["does", "do"][usize::from(ranks.len() > 1)],
        );
        eprintln!("{fault}; {ranks} {verb} not end, so the process ends{writes}");
        thread::spawn(|| {
            thread::sleep(LAST);
            process::abort();
        });
        process::exit(1)
    }
}

/// Returns when the files that its owner writes are complete.
type Finish = dyn Fn() + Send + Sync;

static WRITERS: Mutex<Vec<Weak<Finish>>> = Mutex::new(Vec::new());

/// Registers `finish`, if still alive, to be called before the process ends because of a fault, on another thread than the owner's.
pub(crate) fn finish_first(finish: &Arc<Finish>) {
    let mut writers = WRITERS.lock();
    writers.retain(|writer| writer.strong_count() > 0);
    writers.push(Arc::downgrade(finish));
}

/// Waits until all files are complete, at most for `bound`. Returns whether they are.
fn finish(bound: Duration) -> bool {
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
