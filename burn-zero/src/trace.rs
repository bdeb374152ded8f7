//! Waits for other ranks, in the recording of the thread that waits.

use std::sync::Arc;

use burn_checkpoint::trace::collective;
use burn_ranks::{ProcessGroup, Waited};

/// Records the waits of this rank from now on, on threads that record.
pub(crate) fn trace_waits(group: &dyn ProcessGroup) {
    let record = |wait: &Waited| collective("ranks", wait.time, wait.sent_bytes);
    group.observe_waits(Arc::new(record));
}
