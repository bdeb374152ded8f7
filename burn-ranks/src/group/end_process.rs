//! The end of a process whose group is lost.

use std::{
    process,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;

use super::GroupFault;

/// Ends the process after a fault, once the files that are being written are complete. `running`
/// are the ranks whose threads have not ended.
pub(super) fn end_process(fault: &GroupFault, running: &[usize]) -> ! {
    let writers: Vec<_> = WRITERS.lock().iter().filter_map(Weak::upgrade).collect();
    writers.iter().for_each(|finish| finish());
    let ranks: Vec<_> = running.iter().map(|rank| format!("rank {rank}")).collect();
    let ranks = ranks.join(" and ");
    eprintln!("{fault}; the process ends, and with it {ranks}");
    process::exit(1)
}

/// Returns when the files that its owner writes are complete: see [`finish_first`].
pub type Finish = dyn Fn() + Send + Sync;

static WRITERS: Mutex<Vec<Weak<Finish>>> = Mutex::new(Vec::new());

/// Registers `finish`. Before the process ends because of a fault, another thread than the owner's
/// calls it, if it is still alive.
pub fn finish_first(finish: &Arc<Finish>) {
    let mut writers = WRITERS.lock();
    writers.retain(|writer| writer.strong_count() > 0);
    writers.push(Arc::downgrade(finish));
}
