//! Ranks as threads of one process, and the group of one.

use std::{
    collections::VecDeque,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use super::{
    GroupFault, GroupOptions, ProcessGroup,
    call::Call,
    collectives::{Payload, Peers, Take, Transport, panic_message},
    member::{Member, process_group},
    watch::Watch,
};
use crate::ZeroError;

/// A rank that is a thread of this process. A clone is the same rank.
///
/// Ranks read each other's buffers, so that a reduce-scatter reads every buffer once and writes the result once.
#[derive(Clone)]
pub struct ThreadGroup {
    member: Arc<Member>,
    mailboxes: Arc<Mailboxes>,
}

process_group!(ThreadGroup);

impl ThreadGroup {
    /// The ranks of a new group, in order, to be moved to threads of your own. These are not watched: a thread that hangs is a fault
    /// for the other ranks, but a `join` on it waits forever.
    ///
    /// # Errors
    ///
    /// [`ZeroError::InvalidSetting`] for no ranks or an impossible option.
    pub fn new(world_size: usize, options: GroupOptions) -> Result<Vec<Self>, ZeroError> {
        options.check()?;
        if world_size == 0 {
            return Err(ZeroError::invalid("world_size", 0, "at least 1"));
        }
        let mailboxes = Arc::new(Mailboxes::new(world_size));
        let join = |rank| {
            let lost = mailboxes.clone();
            let transport = ThreadTransport {
                rank,
                mailboxes: mailboxes.clone(),
                deadline: options.deadline,
                call: Call::default(),
            };
            let member = Member::start(
                format!("rank {rank}, collectives"),
                options.clone(),
                move |fault| lost.fail(0, fault),
                move |_, end| Ok((transport, end)),
            )?;
            let (member, mailboxes) = (Arc::new(member), mailboxes.clone());
            Ok(Self { member, mailboxes })
        };
        (0..world_size).map(join).collect()
    }

    /// Runs `rank` on `world_size` threads, each with its rank, and returns their results in the order of ranks, when all have
    /// ended.
    ///
    /// A thread cannot be ended from outside. If ranks have failed and others do not end, because they hang or still compute, the process
    /// ends with the fault on stderr, by default 10 s after the first rank has ended: [`AfterFault`](super::AfterFault) in the options.
    ///
    /// # Errors
    ///
    /// [`GroupFault::PeerPanicked`] if a rank panics: the others' collectives fail with the same at once.
    pub fn spawn<R: Send>(
        world_size: usize,
        options: GroupOptions,
        rank: impl Fn(Self) -> R + Sync,
    ) -> Result<Vec<R>, ZeroError> {
        let groups = Self::new(world_size, options)?;
        let watch = groups[0].watch();
        let run = |group: Self| group.guard(&rank);
        thread::scope(|scope| {
            let start = |group: Self| {
                thread::Builder::new()
                    .name(format!("rank {}", group.rank()))
                    .spawn_scoped(scope, || run(group))
                    .expect("the system starts a thread")
            };
            let ranks: Vec<_> = groups.into_iter().map(start).collect();
            watch.run();
            ranks
                .into_iter()
                .map(|rank| rank.join().expect("panics are caught in the rank"))
                .collect()
        })
    }

    /// The watch on the threads of the group, each of which runs under [`guard`](Self::guard).
    pub(crate) fn watch(&self) -> Watch {
        let after_fault = self.member.options.after_fault;
        let mailboxes = self.mailboxes.clone();
        Watch {
            mailboxes,
            after_fault,
        }
    }

    /// Runs a rank on this thread. If it panics, the others' collectives fail with its message at once.
    pub(crate) fn guard<R>(self, rank: impl FnOnce(Self) -> R) -> Result<R, ZeroError> {
        let Self { member, mailboxes } = self.clone();
        let result = catch_unwind(AssertUnwindSafe(|| rank(self))).map_err(|panic| {
            let (rank, message) = (member.rank, panic_message(&*panic));
            let fault = GroupFault::PeerPanicked { rank, message };
            member.fail(fault.clone());
            ZeroError::from(fault)
        });
        mailboxes.end(member.rank);
        result
    }
}

/// A group of one rank: every collective returns its argument and sends nothing.
pub struct SingleRank {
    member: Arc<Member>,
}

impl SingleRank {
    /// The only rank.
    pub fn new() -> Self {
        let group = ThreadGroup::new(1, GroupOptions::default());
        let member = group
            .expect("one rank can be a group")
            .swap_remove(0)
            .member;
        Self { member }
    }
}

impl Default for SingleRank {
    fn default() -> Self {
        Self::new()
    }
}

process_group!(SingleRank);

/// The messages between the ranks of one process, and the state of their threads, under one lock, which is held only while a
/// message is put or taken.
pub(super) struct Mailboxes {
    state: Mutex<State>,
    /// By rank: notified when a message for it or the state of the group has changed.
    changed: Vec<Condvar>,
    /// A thread has ended, or the group is lost.
    ended: Condvar,
}

/// Shared bytes, and the range of them that the receiver reads.
type Message = (Payload, Range<usize>);

struct State {
    /// By receiver and sender.
    messages: Vec<Vec<VecDeque<Message>>>,
    peers: Peers,
    /// By rank: whether its thread has ended.
    ended: Vec<bool>,
}

impl Mailboxes {
    pub fn new(world_size: usize) -> Self {
        let boxes = || (0..world_size).map(|_| VecDeque::new()).collect();
        Self {
            state: Mutex::new(State {
                messages: (0..world_size).map(|_| boxes()).collect(),
                peers: Peers::new(world_size),
                ended: vec![false; world_size],
            }),
            changed: (0..world_size).map(|_| Condvar::new()).collect(),
            ended: Condvar::new(),
        }
    }

    fn post(&self, from: usize, to: usize, message: Message) {
        self.state.lock().messages[to][from].push_back(message);
        self.changed[to].notify_one();
    }

    fn fail(&self, sequence: u64, fault: &GroupFault) {
        self.tell_all(|state| state.peers.lose(sequence, fault));
    }

    /// Marks the thread of a rank as ended.
    fn end(&self, rank: usize) {
        self.tell_all(|state| state.ended[rank] = true);
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
            match &state.peers.lost {
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
        let ranks = 0..self.changed.len();
        ranks.filter(|&rank| !state.ended[rank]).collect()
    }

    /// Takes the next message of one rank for another.
    fn take(
        &self,
        from: usize,
        rank: usize,
        call: &Call,
        deadline: Duration,
    ) -> Result<Message, GroupFault> {
        let until = Instant::now() + deadline;
        let mut state = self.state.lock();
        loop {
            if let Some(fault) = state.peers.fault(call) {
                return Err(fault);
            }
            if let Some(message) = state.messages[rank][from].pop_front() {
                return Ok(message);
            }
            if let Some(fault) = state.peers.left(call, rank, from) {
                return Err(fault);
            }
            let timed_out = self.changed[rank].wait_until(&mut state, until).timed_out();
            let boxes = &state.messages[rank];
            if timed_out && boxes[from].is_empty() {
                let behind = from..boxes.len();
                return Err(GroupFault::Deadline {
                    rank,
                    call: call.to_string(),
                    missing: behind
                        .filter(|&peer| peer != rank && boxes[peer].is_empty())
                        .collect(),
                    deadline,
                });
            }
        }
    }
}

/// The transport by shared memory: ranks read each other's buffers.
struct ThreadTransport {
    rank: usize,
    mailboxes: Arc<Mailboxes>,
    deadline: Duration,
    /// The last one that was begun.
    call: Call,
}

impl ThreadTransport {
    /// Lets every rank read its range of `own`, and returns what the ranks that `reads` names let this one read: nothing of the others.
    fn swap(
        &self,
        own: &Payload,
        sends: &[Range<usize>],
        reads: impl Fn(usize) -> bool,
    ) -> Result<Vec<Message>, GroupFault> {
        for (to, range) in sends.iter().enumerate() {
            if to != self.rank && !range.is_empty() {
                let message = (own.clone(), range.clone());
                self.mailboxes.post(self.rank, to, message);
            }
        }
        let receive = |from: usize| match from {
            from if from == self.rank => Ok((own.clone(), sends[from].clone())),
            from if reads(from) => {
                let (rank, call) = (self.rank, &self.call);
                self.mailboxes.take(from, rank, call, self.deadline)
            }
            _ => Ok((own.clone(), 0..0)),
        };
        (0..sends.len()).map(receive).collect()
    }
}

impl Transport for ThreadTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.mailboxes.changed.len()
    }

    fn announce(&mut self, call: Call, description: &[u8]) -> Result<Vec<Vec<u8>>, GroupFault> {
        self.call = call;
        let own: Payload = Arc::new(description.to_vec());
        let sends = vec![0..description.len(); self.world_size()];
        let all = self.swap(&own, &sends, |_| true)?;
        let read = |(message, _): &Message| (**message).as_ref().to_vec();
        Ok(all.iter().map(read).collect())
    }

    fn exchange(
        &mut self,
        own: &Payload,
        sends: &[Range<usize>],
        lengths: &[usize],
        take: Take,
    ) -> Result<(), GroupFault> {
        let all = self.swap(own, sends, |from| lengths[from] > 0)?;
        let parts = all
            .iter()
            .map(|(all, range)| &(**all).as_ref()[range.clone()]);
        take(0, &parts.collect::<Vec<_>>());
        Ok(())
    }

    fn spread(&mut self, sequence: u64, fault: &GroupFault) {
        self.mailboxes.fail(sequence, fault);
    }

    fn leave(&mut self, calls: u64) {
        let leave = |state: &mut State| state.peers.left[self.rank] = Some(calls);
        self.mailboxes.tell_all(leave);
    }
}
