//! Ends the process in bounded time when a group of threads is lost and one of them does not end.

use std::{io::Write, process, sync::Arc, thread, time::Duration};

use super::{AfterFault, threads::Mailboxes, unfinished};

/// Ranks that compute usually learn of a fault and end within this time: they are not reported before.
const QUIET: Duration = Duration::from_millis(500);

/// Limit for exit handlers, which may wait for the thread that hangs.
const LAST: Duration = Duration::from_secs(2);

/// Limit for completing files that are being written, before the process ends.
const LONGEST_WRITE: Duration = Duration::from_secs(600);

/// Waits for the threads of a group, without keeping the group alive.
pub(crate) struct Watch {
    pub(super) mailboxes: Arc<Mailboxes>,
    pub(super) after_fault: AfterFault,
}

impl Watch {
    /// Returns when all threads have ended, or ends the process.
    pub(crate) fn run(self) {
        let Some(fault) = self.mailboxes.wait_for_fault() else {
            return;
        };
        // Reports the ranks that still run after a wait, with one write, and returns whether there are any.
        let report = |wait: Option<Duration>, verbs: [&str; 2], what: &str| {
            let running = self.mailboxes.wait_for_ends(wait);
            let ranks: Vec<_> = running.iter().map(|rank| format!("rank {rank}")).collect();
            if !ranks.is_empty() {
                let (ranks, verb) = (ranks.join(" and "), verbs[usize::from(ranks.len() > 1)]);
                let text = format!("{fault}; {ranks} {verb} {what}\n");
                let _ = std::io::stderr().write_all(text.as_bytes()); // a failure cannot be reported anywhere else
            }
            !running.is_empty()
        };
        let grace = match self.after_fault {
            AfterFault::Wait => {
                let waited = "waited for (GroupOptions::after_fault)";
                report(Some(QUIET), ["is", "are"], waited);
                self.mailboxes.wait_for_ends(None);
                return;
            }
            AfterFault::EndProcess { grace } => grace,
        };
        let ends = format!("{grace:?} to end (GroupOptions::after_fault)");
        let rest = Some(grace.saturating_sub(QUIET));
        if !report(Some(QUIET), ["has", "have"], &ends)
            || self.mailboxes.wait_for_ends(rest).is_empty()
        {
            return;
        }
        let ends = match unfinished::finish(LONGEST_WRITE) {
            true => "not end, so the process ends",
            false => "not end, so the process ends, before a record was written",
        };
        // A rank may have ended while files were completed.
        if report(Some(QUIET), ["does", "do"], ends) {
            thread::spawn(|| {
                thread::sleep(LAST);
                process::abort();
            });
            process::exit(1)
        }
    }
}
