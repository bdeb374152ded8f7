//! The jobs of a rank, and what its group and its communication thread tell each other.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use parking_lot::{Condvar, Mutex};

use super::{GroupFault, Traffic};

/// A thread's wait for collectives, which has ended: see
/// [`ProcessGroup::observe_waits`](super::ProcessGroup::observe_waits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waited {
    /// How long the thread waited.
    pub time: Duration,
    /// Bytes of buffers that the job it waited for sent.
    pub sent_bytes: u64,
}

/// Sees the waits of a rank.
pub(super) type Observer = dyn Fn(&Waited) + Send + Sync;

/// The jobs of a rank, first in first out: shared by its group and its communication thread.
pub(super) struct Queue<J> {
    pub rank: usize,
    pub world_size: usize,
    pub deadline: Duration,
    pub traffic: Mutex<Traffic>,
    pub observer: Mutex<Option<Arc<Observer>>>,
    state: Mutex<State<J>>,
    changed: Condvar,
    on_fault: Box<OnFault>,
}

/// Passes a fault of this rank to the other ranks, after the rank's own jobs have failed.
type OnFault = dyn Fn(&GroupFault) + Send + Sync;

struct State<J> {
    waiting: VecDeque<J>,
    is_closed: bool,
    /// Whether the communication thread has left the group or found it lost.
    has_ended: bool,
    fault: Option<GroupFault>,
}

impl<J> Queue<J> {
    pub fn new(
        rank: usize,
        world_size: usize,
        deadline: Duration,
        on_fault: impl Fn(&GroupFault) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            rank,
            world_size,
            deadline,
            traffic: Mutex::default(),
            observer: Mutex::default(),
            state: Mutex::new(State {
                waiting: VecDeque::new(),
                is_closed: false,
                has_ended: false,
                fault: None,
            }),
            changed: Condvar::new(),
            on_fault: Box::new(on_fault),
        })
    }

    fn tell<R>(&self, change: impl FnOnce(&mut State<J>) -> R) -> R {
        let result = change(&mut self.state.lock());
        self.changed.notify_all();
        result
    }

    fn wait<R>(&self, mut is_done: impl FnMut(&State<J>) -> Option<R>) -> R {
        let mut state = self.state.lock();
        loop {
            match is_done(&state) {
                Some(result) => return result,
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// Waits until `is_done` returns something: it is asked again whenever something has changed,
    /// with the fault if the group is lost.
    pub fn wait_for<R>(&self, mut is_done: impl FnMut(Option<&GroupFault>) -> Option<R>) -> R {
        self.wait(|state| is_done(state.fault.as_ref()))
    }

    /// Wakes those that wait for the result of a job, which has run.
    pub fn job_has_run(&self) {
        // With the lock, which whoever has just looked for the result holds until it waits.
        self.tell(|_| ());
    }

    /// Puts a job at the end, unless the group is lost.
    pub fn submit(&self, job: J) {
        let refused = self.tell(|state| match state.fault {
            None => {
                state.waiting.push_back(job);
                None
            }
            Some(_) => Some(job),
        });
        drop(refused); // outside of the lock
    }

    /// Waits for the next job; `None` if the rank leaves the group and everything is done, or if
    /// the group is lost.
    pub fn next(&self) -> Option<J> {
        let mut state = self.state.lock();
        while state.fault.is_none() && state.waiting.is_empty() && !state.is_closed {
            self.changed.wait(&mut state);
        }
        match state.fault {
            None => state.waiting.pop_front(),
            Some(_) => None,
        }
    }

    /// Fails every job that is running, waiting, or submitted later. Only the first fault is kept.
    pub fn fail(&self, fault: &GroupFault) {
        let waiting = self.tell(|state| {
            state.fault.get_or_insert_with(|| fault.clone());
            std::mem::take(&mut state.waiting)
        });
        drop(waiting); // outside of the lock
    }

    /// Ends the group by a fault of this rank.
    pub fn end_group(&self, fault: &GroupFault) {
        self.fail(fault);
        (self.on_fault)(fault);
    }

    /// Ends the group by a panic of this rank.
    pub fn panicked(&self, message: String) -> GroupFault {
        let rank = self.rank;
        let fault = GroupFault::PeerPanicked { rank, message };
        self.end_group(&fault);
        fault
    }

    /// Why the group is lost, if it is.
    pub fn fault(&self) -> Option<GroupFault> {
        self.state.lock().fault.clone()
    }

    /// Leaves the group when the submitted jobs are done, and waits for that. Jobs that are
    /// submitted later fail: clones of the group may remain, in what the rank returns or keeps.
    pub fn leave(&self) {
        self.tell(|state| state.is_closed = true);
        self.wait(|state| state.has_ended.then_some(()));
    }

    /// Notes that the communication thread has left the group or found it lost.
    pub fn end(&self) {
        let rank = self.rank;
        self.fail(&GroupFault::Ended { rank });
        self.tell(|state| state.has_ended = true);
    }
}
