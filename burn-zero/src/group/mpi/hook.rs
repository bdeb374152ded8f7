//! A panic ends the job: unwinding would wait in `MPI_Finalize` for ranks that wait for this one.

use std::{
    panic, process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, ThreadId},
};

use crate::group::{GroupFault, queue::Queue};

/// Installs a panic hook that prints the panic as before, then its rank, and ends the job.
pub(super) fn install(rank: usize, queue: Arc<Queue>, active: Arc<AtomicBool>, worker: ThreadId) {
    let previous = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        previous(panic);
        if !active.load(Ordering::Acquire) {
            return;
        }
        let message = panic
            .payload_as_str()
            .unwrap_or("a panic without a message")
            .to_owned();
        let fault = GroupFault::PeerPanicked { rank, message };
        if thread::current().id() == worker {
            super::print_whole(format!("{fault}; the job ends\n"));
            process::abort();
        }
        super::end_job(&queue, fault);
    }));
}
