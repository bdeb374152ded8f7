//! Where the ranks of one process leave messages for each other, and what is known of their threads.

use std::{
    any::Any,
    collections::VecDeque,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use crate::group::{Call, GroupFault};

/// What one rank leaves for another.
pub(super) enum Message {
    /// What it calls.
    Call(Arc<Call>),
    /// A vector of the type that the call says, and the elements of it that are for the receiver.
    Values(Arc<dyn Any + Send + Sync>, Range<usize>),
}

/// One mailbox a rank.
pub(super) struct Mailboxes {
    boxes: Vec<Mailbox>,
    /// The threads that have ended.
    ended: Mutex<Vec<bool>>,
    /// A thread has ended, or the group is lost.
    news: Condvar,
}

struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Messages of each rank.
    messages: Vec<VecDeque<Message>>,
    /// Collectives in which each rank took part, if it has left.
    left: Vec<Option<u64>>,
    /// The fault of the earliest call, and that call, from which on it ends everything.
    fault: Option<(u64, GroupFault)>,
}

impl Mailboxes {
    pub fn new(world_size: usize) -> Self {
        let mailbox = |_| Mailbox {
            state: Mutex::new(State {
                messages: (0..world_size).map(|_| VecDeque::new()).collect(),
                left: vec![None; world_size],
                fault: None,
            }),
            changed: Condvar::new(),
        };
        Self {
            boxes: (0..world_size).map(mailbox).collect(),
            ended: Mutex::new(vec![false; world_size]),
            news: Condvar::new(),
        }
    }

    pub fn world_size(&self) -> usize {
        self.boxes.len()
    }

    pub fn post(&self, from: usize, to: usize, message: Message) {
        self.change(to, |state| state.messages[from].push_back(message));
    }

    /// Marks the group as lost on all ranks, from the call `sequence` on: what all have sent for calls before that one
    /// may still be under way. The fault of the earliest call stays.
    pub fn fail(&self, sequence: u64, fault: &GroupFault) {
        for rank in 0..self.world_size() {
            self.change(rank, |state| {
                if state
                    .fault
                    .as_ref()
                    .is_none_or(|(earliest, _)| sequence < *earliest)
                {
                    state.fault = Some((sequence, fault.clone()));
                }
            });
        }
        // Whoever has looked for a fault and found none waits by now.
        drop(self.ended.lock());
        self.news.notify_all();
    }

    /// Why the group is lost.
    fn fault(&self) -> Option<GroupFault> {
        let state = self.boxes[0].state.lock();
        state.fault.as_ref().map(|(_, fault)| fault.clone())
    }

    /// Marks the thread of a rank as ended.
    pub fn end(&self, rank: usize) {
        self.ended.lock()[rank] = true;
        self.news.notify_all();
    }

    /// Waits until all threads have ended.
    pub fn wait_for_ends(&self) {
        let mut ended = self.ended.lock();
        while ended.contains(&false) {
            self.news.wait(&mut ended);
        }
    }

    /// Waits until all threads have ended, and returns nothing, or until one has in a lost group.
    pub fn wait_for_fault(&self) -> Option<GroupFault> {
        let mut ended = self.ended.lock();
        while ended.contains(&false) {
            match self.fault() {
                Some(fault) if ended.contains(&true) => return Some(fault),
                _ => self.news.wait(&mut ended),
            }
        }
        None
    }

    /// Waits so long for all threads to end. Those that have not.
    pub fn wait_for_rest(&self, time: Duration) -> Vec<usize> {
        let until = Instant::now() + time;
        let mut ended = self.ended.lock();
        while ended.contains(&false) && !self.news.wait_until(&mut ended, until).timed_out() {}
        let ranks = (0..self.world_size()).filter(|&rank| !ended[rank]);
        ranks.collect()
    }

    pub fn leave(&self, rank: usize, calls: u64) {
        for peer in 0..self.world_size() {
            self.change(peer, |state| state.left[rank] = Some(calls));
        }
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
        let mailbox = &self.boxes[to];
        let mut state = mailbox.state.lock();
        loop {
            if let Some((sequence, fault)) = &state.fault
                && *sequence <= call.sequence
            {
                return Err(fault.clone());
            }
            if let Some(message) = state.messages[from].pop_front() {
                return Ok(message);
            }
            if let Some(calls) = state.left[from] {
                let call = call.to_string();
                return Err(GroupFault::PeerLeft {
                    rank: to,
                    call,
                    peer: from,
                    calls,
                });
            }
            if mailbox.changed.wait_until(&mut state, until).timed_out()
                && state.messages[from].is_empty()
            {
                let missing = (0..self.world_size())
                    .filter(|&rank| rank != to && state.messages[rank].is_empty() && rank >= from)
                    .collect();
                let call = call.to_string();
                return Err(GroupFault::Deadline {
                    rank: to,
                    call,
                    missing,
                    deadline,
                });
            }
        }
    }

    fn change(&self, rank: usize, change: impl FnOnce(&mut State)) {
        change(&mut self.boxes[rank].state.lock());
        self.boxes[rank].changed.notify_all();
    }
}
