//! Polling for messages: at first without pauses, for latency, then with growing pauses, to free the core.

use std::{
    thread,
    time::{Duration, Instant},
};

use ::mpi::{
    point_to_point::Status,
    request::{Request, Scope},
};

/// A message to or from a rank, until it has arrived.
pub(super) type UnderWay<'a, S> = (usize, Option<Request<'a, [u8], S>>);

/// Tests all messages, calls `done` for each that has arrived, and says whether any has.
pub(super) fn poll<'a, S: Scope<'a>>(
    messages: &mut [UnderWay<'a, S>],
    mut done: impl FnMut(usize, Status),
) -> bool {
    let mut progress = false;
    for (index, (_, message)) in messages.iter_mut().enumerate() {
        match message.take().map(Request::test) {
            Some(Ok(status)) => {
                done(index, status);
                progress = true;
            }
            Some(Err(request)) => *message = Some(request),
            None => {}
        }
    }
    progress
}

/// The ranks of the messages that have not arrived.
pub(super) fn open<'a, 'm, S: Scope<'a>>(
    messages: &'m [UnderWay<'a, S>],
) -> impl Iterator<Item = usize> + use<'a, 'm, S> {
    messages
        .iter()
        .filter(|(_, message)| message.is_some())
        .map(|(rank, _)| *rank)
}

/// Polling that gets slower, so that a rank that waits for long frees its core for threads that compute.
pub(super) struct Wait {
    deadline: Duration,
    since: Instant,
    polls: u32,
}

impl Wait {
    /// Polls without a pause, about 10 us.
    const EAGER: u32 = 50;
    /// Up to this poll each one yields the core.
    const YIELDING: u32 = 500;
    /// Up to this poll each one is followed by a short pause.
    const NAPPING: u32 = 1000;

    pub fn new(deadline: Duration) -> Self {
        Self {
            deadline,
            since: Instant::now(),
            polls: 0,
        }
    }

    pub fn restart(&mut self) {
        *self = Self::new(self.deadline);
    }

    pub fn is_over(&self) -> bool {
        self.since.elapsed() > self.deadline
    }

    pub fn pause(&mut self) {
        self.polls = self.polls.saturating_add(1);
        if self.polls <= Self::EAGER {
            std::hint::spin_loop();
        } else if self.polls <= Self::YIELDING {
            thread::yield_now();
        } else if self.polls <= Self::NAPPING {
            thread::sleep(Duration::from_micros(50));
        } else {
            thread::sleep(Duration::from_micros(500));
        }
    }
}
