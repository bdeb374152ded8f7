//! Mailboxes between the ranks of one process, and the state of their threads.

use std::{
    any::Any,
    collections::VecDeque,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use crate::group::{Call, GroupFault};

/// A message from one rank to another.
pub(super) enum Message {
    /// The sender's call.
    Call(Arc<Call>),
    /// A vector of the call's type, and the range of its elements for the receiver.
    Values(Arc<dyn Any + Send + Sync>, Range<usize>),
}

/// The mailboxes of all ranks, under one lock, which is held only while a message is put or taken.
pub(super) struct Mailboxes {
    state: Mutex<State>,
    /// By rank: notified when a message for it or the state of the group has changed.
    changed: Vec<Condvar>,
    /// A thread has ended, or the group is lost.
    ended: Condvar,
}

struct State {
    /// By receiver and sender.
    messages: Vec<Vec<VecDeque<Message>>>,
    /// Collectives in which each rank took part, if it has left.
    left: Vec<Option<u64>>,
    /// By rank: whether its thread has ended.
    ended: Vec<bool>,
    /// The fault with the earliest call, and that call: it and all later ones fail.
    fault: Option<(u64, GroupFault)>,
}

impl Mailboxes {
    pub fn new(world_size: usize) -> Self {
        let boxes = || (0..world_size).map(|_| VecDeque::new()).collect();
        Self {
            state: Mutex::new(State {
                messages: (0..world_size).map(|_| boxes()).collect(),
                left: vec![None; world_size],
                ended: vec![false; world_size],
                fault: None,
            }),
            changed: (0..world_size).map(|_| Condvar::new()).collect(),
            ended: Condvar::new(),
        }
    }

    pub fn world_size(&self) -> usize {
        self.changed.len()
    }

    pub fn post(&self, from: usize, to: usize, message: Message) {
        self.state.lock().messages[to][from].push_back(message);
        self.changed[to].notify_one();
    }

    /// Marks the group as lost, from the call `sequence` on: messages of earlier calls may still be taken. The fault with the
    /// earliest call is kept.
    pub fn fail(&self, sequence: u64, fault: &GroupFault) {
        self.tell_all(|state| match &state.fault {
            Some((earliest, _)) if *earliest <= sequence => {}
            _ => state.fault = Some((sequence, fault.clone())),
        });
    }

    /// Marks the thread of a rank as ended.
    pub fn end(&self, rank: usize) {
        self.tell_all(|state| state.ended[rank] = true);
    }

    pub fn leave(&self, rank: usize, calls: u64) {
        self.tell_all(|state| state.left[rank] = Some(calls));
    }

    fn tell_all(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock());
        for rank in &self.changed {
            rank.notify_one();
        }
        self.ended.notify_all();
    }

    /// Waits until all threads have ended, and returns `None`, or until one has ended in a lost group.
    pub fn wait_for_fault(&self) -> Option<GroupFault> {
        let mut state = self.state.lock();
        while state.ended.contains(&false) {
            match &state.fault {
                Some((_, fault)) if state.ended.contains(&true) => return Some(fault.clone()),
                _ => self.ended.wait(&mut state),
            }
        }
        None
    }

    /// Waits for all threads to end, at most for `limit`. Returns the ranks whose threads still run.
    pub fn wait_for_ends(&self, limit: Option<Duration>) -> Vec<usize> {
        let until = limit.map(|limit| Instant::now() + limit);
        let mut state = self.state.lock();
        while state.ended.contains(&false) {
            match until {
                None => self.ended.wait(&mut state),
                Some(until) if self.ended.wait_until(&mut state, until).timed_out() => break,
                Some(_) => {}
            }
        }
        let ranks = (0..self.world_size()).filter(|&rank| !state.ended[rank]);
        ranks.collect()
    }

    /// Takes the next message of one rank for another.
    pub fn take(
        &self,
        from: usize,
        to: usize,
        call: &Call,
        deadline: Duration,
    ) -> Result<Message, GroupFault> {
        let until = Instant::now() + deadline;
        let mut state = self.state.lock();
        loop {
            if let Some((sequence, fault)) = &state.fault
                && *sequence <= call.sequence
            {
                return Err(fault.clone());
            }
            if let Some(message) = state.messages[to][from].pop_front() {
                return Ok(message);
            }
            let (rank, call) = (to, || call.to_string());
            if let Some(calls) = state.left[from] {
                return Err(GroupFault::PeerLeft {
                    rank,
                    call: call(),
                    peer: from,
                    calls,
                });
            }
            let timed_out = self.changed[to].wait_until(&mut state, until).timed_out();
            let boxes = &state.messages[to];
            if timed_out && boxes[from].is_empty() {
                let behind = from..self.world_size();
                return Err(GroupFault::Deadline {
                    rank,
                    call: call(),
                    missing: behind
                        .filter(|&peer| peer != to && boxes[peer].is_empty())
                        .collect(),
                    deadline,
                });
            }
        }
    }
}
