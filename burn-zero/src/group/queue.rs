//! What a rank has submitted and its worker has yet to do.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use super::{
    Call, GroupFault, Output, Pending, Request, Task, Traffic, call::declaration, pending::Slot,
};
use crate::ZeroError;

/// A collective for the worker.
pub(crate) struct Job {
    pub call: Call,
    pub task: Task,
    /// Where each rank's part begins, and the end.
    pub offsets: Vec<usize>,
}

/// What the worker does next.
pub(crate) enum Next {
    Job(Box<Job>),
    /// Nothing came in the time that it waited.
    Nothing,
    /// The group is dropped and everything is done, or there was a fault.
    End,
}

/// Shared by a rank's group and its worker.
#[derive(Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    traffic: Mutex<Traffic>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<(Job, Arc<Slot>)>,
    running: Option<Arc<Slot>>,
    submitted: u64,
    /// What this rank has declared.
    settings: String,
    closed: bool,
    fault: Option<GroupFault>,
}

impl Queue {
    /// Puts a request at the end, in this rank's next place of the sequence.
    pub fn submit(&self, rank: usize, world_size: usize, request: Request) -> Pending {
        let (mut call, offsets) = match request.plan(rank, world_size) {
            Ok(plan) => plan,
            Err(error) => return Pending::ready(Err(error)),
        };
        let mut state = self.state.lock();
        if let Some(fault) = &state.fault {
            return Pending::ready(Err(fault.clone().into()));
        }
        call.sequence = state.submitted;
        call.settings.clone_from(&state.settings);
        state.submitted += 1;
        let slot = Arc::new(Slot::default());
        let task = request.task;
        state.waiting.push_back((
            Job {
                call,
                task,
                offsets,
            },
            slot.clone(),
        ));
        self.changed.notify_all();
        Pending::new(slot)
    }

    /// Waits for the next job, for so long at most.
    pub fn next(&self, patience: Option<Duration>) -> Next {
        let until = patience.map(|patience| Instant::now() + patience);
        let mut state = self.state.lock();
        loop {
            if state.fault.is_some() {
                return Next::End;
            }
            if let Some((job, slot)) = state.waiting.pop_front() {
                state.running = Some(slot);
                return Next::Job(Box::new(job));
            }
            if state.closed {
                return Next::End;
            }
            match until {
                None => self.changed.wait(&mut state),
                Some(until) => {
                    if self.changed.wait_until(&mut state, until).timed_out() {
                        return Next::Nothing;
                    }
                }
            }
        }
    }

    /// Gives the running job's result to whom waits for it.
    pub fn finish(&self, output: Output) {
        if let Some(slot) = self.state.lock().running.take() {
            slot.fill(Ok(output));
        }
    }

    /// Fails everything that is running, waiting, or still to be submitted. The first fault stays.
    pub fn fail(&self, fault: GroupFault) {
        let mut state = self.state.lock();
        let fault = state.fault.get_or_insert(fault).clone();
        let waiting: Vec<_> = state.waiting.drain(..).map(|(_, slot)| slot).collect();
        for slot in waiting.into_iter().chain(state.running.take()) {
            slot.fill(Err(ZeroError::Group(fault.clone())));
        }
        self.changed.notify_all();
    }

    /// Why the group is lost, if it is.
    pub fn fault(&self) -> Option<GroupFault> {
        self.state.lock().fault.clone()
    }

    /// Lets the worker end when everything is done.
    pub fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    pub fn declare_settings(&self, text: &str) {
        self.state.lock().settings = declaration(text);
    }

    pub fn traffic(&self) -> &Mutex<Traffic> {
        &self.traffic
    }
}
