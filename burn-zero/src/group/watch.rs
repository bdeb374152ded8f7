//! Ends the process in bounded time when a group of threads is lost and one of them does not end.

use std::{io::Write, process, sync::Arc, thread, time::Duration};

use super::{AfterFault, GroupFault, threads::Mailboxes, unfinished};

/// Ranks that compute usually learn of a fault and end within this time: they are not reported before.
const QUIET: Duration = Duration::from_millis(500);

/// Limit for exit handlers, which may wait for the thread that hangs.
const LAST: Duration = Duration::from_secs(2);

/// Limit for completing files that are being written, before the process ends.
const LONGEST_WRITE: Duration = Duration::from_secs(600);

/// Waits for the threads of a group, without keeping the group alive.
pub(crate) struct Watch {
    mailboxes: Arc<Mailboxes>,
    after_fault: AfterFault,
}

impl Watch {
    pub(super) fn new(mailboxes: Arc<Mailboxes>, after_fault: AfterFault) -> Self {
        Self {
            mailboxes,
            after_fault,
        }
    }

    /// Returns when all threads have ended, or ends the process.
    pub(crate) fn run(self) {
        let Some(fault) = self.mailboxes.wait_for_fault() else {
            return;
        };
        let running = self.mailboxes.wait_for_ends(Some(QUIET));
        if running.is_empty() {
            return;
        }
        match self.after_fault {
            AfterFault::Wait => {
                let waited = "waited for (GroupOptions::after_fault)";
                say(&fault, &running, ["is", "are"], waited);
                self.mailboxes.wait_for_ends(None);
            }
            AfterFault::EndProcess { grace } => {
                let ends = format!("{grace:?} to end (GroupOptions::after_fault)");
                say(&fault, &running, ["has", "have"], &ends);
                let running = self
                    .mailboxes
                    .wait_for_ends(Some(grace.saturating_sub(QUIET)));
                if running.is_empty() {
                    return;
                }
                let complete = unfinished::finish(LONGEST_WRITE);
                // A rank may have ended while files were completed.
                let running = self.mailboxes.wait_for_ends(Some(QUIET));
                if !running.is_empty() {
                    let ends = match complete {
                        true => "not end, so the process ends",
                        false => "not end, so the process ends, before a record was written",
                    };
                    say(&fault, &running, ["does", "do"], ends);
                    end_process();
                }
            }
        }
    }
}

/// Reports the fault and the ranks that still run, with one write.
fn say(fault: &GroupFault, running: &[usize], verbs: [&str; 2], what: &str) {
    let ranks: Vec<_> = running.iter().map(|rank| format!("rank {rank}")).collect();
    let verb = verbs[usize::from(ranks.len() > 1)];
    let text = format!("{fault}; {} {verb} {what}\n", ranks.join(" and "));
    let _ = std::io::stderr().write_all(text.as_bytes()); // a failure cannot be reported anywhere else
}

fn end_process() -> ! {
    thread::spawn(|| {
        thread::sleep(LAST);
        process::abort();
    });
    process::exit(1)
}
