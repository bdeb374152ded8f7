//! Ends the process in bounded time when a group of threads is lost and one of them does not end.

use std::{
    process,
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;

use super::threads::Mailboxes;

/// The time that the other threads of a lost group have to end; four deadlines if these are shorter.
const GRACE: Duration = Duration::from_secs(10);

/// Returns when all threads of a group have ended, or ends the process.
pub(super) fn watch(mailboxes: &Mailboxes, deadline: Duration) {
    let Some(fault) = mailboxes.wait_for_fault() else {
        return;
    };
    let running = mailboxes.wait_for_ends(GRACE.min(4 * deadline));
    if running.is_empty() {
        return;
    }
    let writers: Vec<_> = WRITERS.lock().iter().filter_map(Weak::upgrade).collect();
    writers.iter().for_each(|finish| finish());
    let ranks: Vec<_> = running.iter().map(|rank| format!("rank {rank}")).collect();
    let ranks = ranks.join(" and ");
    eprintln!("{fault}; the process ends, and with it {ranks}");
    process::exit(1)
}

/// Returns when the files that its owner writes are complete.
type Finish = dyn Fn() + Send + Sync;

static WRITERS: Mutex<Vec<Weak<Finish>>> = Mutex::new(Vec::new());

/// Registers `finish`. Before the process ends because of a fault, another thread than the owner's calls it, if it is still alive.
pub(crate) fn finish_first(finish: &Arc<Finish>) {
    let mut writers = WRITERS.lock();
    writers.retain(|writer| writer.strong_count() > 0);
    writers.push(Arc::downgrade(finish));
}
