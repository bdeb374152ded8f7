//! A job of threads ends in bounded time, whatever one of them does.

use std::{io::Write, process, sync::Arc, thread, time::Duration};

use super::mailboxes::Mailboxes;
use crate::group::{AfterFault, GroupFault};

/// Ranks that learn of a fault while they compute end within this, mostly: nothing is said of them.
const QUIET: Duration = Duration::from_millis(500);

/// What runs at the end of a process may wait for the thread that hangs.
const LAST: Duration = Duration::from_secs(2);

/// Waits for the threads of a group. It is no member: the group does not live longer for it.
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
        let running = self.mailboxes.wait_for_rest(QUIET);
        if running.is_empty() {
            return;
        }
        match self.after_fault {
            AfterFault::Wait => {
                say(
                    &fault,
                    &running,
                    ["is", "are"],
                    "waited for (GroupOptions::after_fault)",
                );
                self.mailboxes.wait_for_ends();
            }
            AfterFault::EndProcess { grace } => {
                let ends = format!("{grace:?} to end (GroupOptions::after_fault)");
                say(&fault, &running, ["has", "have"], &ends);
                let running = self.mailboxes.wait_for_rest(grace.saturating_sub(QUIET));
                if !running.is_empty() {
                    say(
                        &fault,
                        &running,
                        ["does", "do"],
                        "not end, so the process ends",
                    );
                    end_process();
                }
            }
        }
    }
}

/// In one piece, with the ranks that still run.
fn say(fault: &GroupFault, running: &[usize], verbs: [&str; 2], what: &str) {
    let ranks: Vec<_> = running.iter().map(|rank| format!("rank {rank}")).collect();
    let verb = verbs[usize::from(ranks.len() > 1)];
    let text = format!("{fault}; {} {verb} {what}\n", ranks.join(" and "));
    let _ = std::io::stderr().write_all(text.as_bytes()); // there is nobody else to tell
}

fn end_process() -> ! {
    thread::spawn(|| {
        thread::sleep(LAST);
        process::abort();
    });
    process::exit(1)
}
