//! Ranks as threads of one process, and the group of one.

use std::{
    collections::VecDeque,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{
    GroupFault, GroupOptions, Job, Member, ProcessGroup,
    call::Call,
    collectives::panic_message,
    end_process::end_process,
    part::Part,
    queue::Queue,
    transport::{Exchange, Peers, Transport},
};
use crate::{InvalidSetting, RanksError, thread::model_thread};

/// The time that the other threads of a lost group have to end; four deadlines if these are
/// shorter.
const GRACE: Duration = Duration::from_secs(10);

/// A rank that is a thread of this process. A clone is the same rank.
///
/// Ranks read each other's buffers, so that a reduce-scatter reads every buffer once and writes the
/// result once.
#[derive(Clone)]
pub struct ThreadGroup {
    member: Member,
    mailboxes: Arc<Mailboxes>,
}

impl fmt::Debug for ThreadGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThreadGroup({:?})", self.member)
    }
}

impl ProcessGroup for ThreadGroup {
    fn member(&self) -> &Member {
        &self.member
    }
}

impl ThreadGroup {
    /// The ranks of a new group, in order, to be moved to threads of your own. These are not
    /// watched: a thread that hangs is a fault for the other ranks, but a `join` on it waits
    /// forever.
    ///
    /// # Errors
    ///
    /// [`RanksError::InvalidSetting`] for no ranks or an impossible option;
    /// [`RanksError::Start`] if the system starts no thread.
    pub fn new(world_size: usize, options: GroupOptions) -> Result<Vec<Self>, RanksError> {
        options.check()?;
        InvalidSetting::unless(world_size > 0, "world_size", 0, "at least 1")?;
        let mailboxes = Arc::new(Mailboxes::new(world_size));
        let join = |rank| {
            let (lost, shared) = (mailboxes.clone(), mailboxes.clone());
            let on_fault = move |fault: &GroupFault| lost.fail(0, fault);
            let queue = Queue::new(rank, world_size, options.deadline, on_fault);
            let transport = ThreadTransport {
                queue: queue.clone(),
                mailboxes: shared,
            };
            let connect = move || Ok((queue, transport, ()));
            let member = Member::start(format!("rank {rank}, collectives"), connect)?;
            let mailboxes = mailboxes.clone();
            Ok(Self { member, mailboxes })
        };
        (0..world_size).map(join).collect()
    }

    /// Runs `rank` on `world_size` threads, each with its rank, and returns their results in the
    /// order of ranks, when all have ended. A rank leaves the group when its function returns, even
    /// if a clone of the group remains.
    ///
    /// A thread has a stack of [`MODEL_STACK_BYTES`](crate::thread::MODEL_STACK_BYTES), 64
    /// MiB, for models that are large by value; the environment variable `RUST_MIN_STACK` sets a
    /// larger one, in bytes.
    ///
    /// A thread cannot be ended from outside. If ranks have failed and others do not end, because
    /// they hang or still compute, the process ends with the fault on stderr: see
    /// [`GroupOptions::deadline`].
    ///
    /// # Errors
    ///
    /// [`GroupFault::PeerPanicked`] if a rank panics: the others' collectives fail with the same at
    /// once.
    pub fn spawn<R: Send>(
        world_size: usize,
        options: GroupOptions,
        rank: impl Fn(Self) -> R + Sync,
    ) -> Result<Vec<R>, RanksError> {
        let groups = Self::new(world_size, options)?;
        let results = Self::run_each(groups, vec![(); world_size], false, |group, ()| rank(group));
        results.into_iter().collect()
    }

    /// Runs all ranks of a [`new`](Self::new) group, each with its task: rank 0 on this thread,
    /// the others as [`spawn`](Self::spawn) does. Returns their results in the order of ranks, when
    /// all have ended.
    ///
    /// ```
    /// use burn_ranks::{GroupOptions, ProcessGroup, ThreadGroup};
    ///
    /// let groups = ThreadGroup::new(2, GroupOptions::default())?;
    /// let results = ThreadGroup::run_with(groups, vec![10.0, 20.0], |group, task| {
    ///     group.agree_sum("tasks", task)
    /// });
    /// assert_eq!(results, [Ok(Ok(30.0)), Ok(Ok(30.0))]);
    /// # Ok::<(), burn_ranks::RanksError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// For each rank those of [`spawn`](Self::spawn).
    ///
    /// # Panics
    ///
    /// Unless there is one task a rank.
    pub fn run_with<T: Send, R: Send>(
        groups: Vec<Self>,
        tasks: Vec<T>,
        rank: impl Fn(Self, T) -> R + Sync,
    ) -> Vec<Result<R, RanksError>> {
        assert_eq!(groups.len(), tasks.len(), "one task a rank");
        Self::run_each(groups, tasks, true, rank)
    }

    /// The ranks with their tasks, the first of them on this thread if `here`.
    fn run_each<T: Send, R: Send>(
        groups: Vec<Self>,
        tasks: Vec<T>,
        here: bool,
        rank: impl Fn(Self, T) -> R + Sync,
    ) -> Vec<Result<R, RanksError>> {
        // Not a clone of a group, which would keep the group alive.
        let (mailboxes, deadline) = (
            groups[0].mailboxes.clone(),
            groups[0].member.queue().deadline,
        );
        let run = |(group, task): (Self, T)| group.guard(|group| rank(group, task));
        let run = &run;
        thread::scope(|scope| {
            scope.spawn(|| mailboxes.watch(deadline));
            let mut ranks = groups.into_iter().zip(tasks).enumerate();
            let first = if here { ranks.next() } else { None };
            let start = |(number, rank)| {
                model_thread(format!("rank {number}"))
                    .spawn_scoped(scope, move || run(rank))
                    .expect("the system starts a thread")
            };
            let others: Vec<_> = ranks.map(start).collect();
            let first = first.map(|(_, rank)| run(rank));
            let others = others.into_iter();
            let others = others.map(|rank| rank.join().expect("panics are caught in the rank"));
            first.into_iter().chain(others).collect()
        })
    }

    /// Runs a rank on this thread. It leaves the group when it returns; if it panics, the others'
    /// collectives fail with its message at once.
    fn guard<R>(self, rank: impl FnOnce(Self) -> R) -> Result<R, RanksError> {
        let Self { member, mailboxes } = self.clone();
        let result = catch_unwind(AssertUnwindSafe(|| rank(self)));
        let queue = member.queue();
        let result = result.map_err(|panic| queue.panicked(panic_message(&*panic)).into());
        mailboxes.tell_all(|state| state.ended[queue.rank] = true);
        // A clone of the group may remain, in what the rank's function returns.
        queue.leave();
        result
    }
}

/// A group of one rank: every collective returns its argument and sends nothing.
#[derive(Debug)]
pub struct SingleRank(ThreadGroup);

impl SingleRank {
    /// The only rank.
    pub fn new() -> Self {
        let group = ThreadGroup::new(1, GroupOptions::default());
        Self(group.expect("one rank can be a group").swap_remove(0))
    }
}

impl Default for SingleRank {
    fn default() -> Self {
        Self::new()
    }
}

impl ProcessGroup for SingleRank {
    fn member(&self) -> &Member {
        &self.0.member
    }
}

/// The messages between the ranks of one process, and the state of their threads, under one lock,
/// which is held only while a message is put or taken.
pub(super) struct Mailboxes {
    state: Mutex<State>,
    /// By rank: notified when a message for it or the state of the group has changed.
    changed: Vec<Condvar>,
    /// Notified when a thread has ended or the group is lost.
    ended: Condvar,
}

struct State {
    /// By receiver and sender.
    messages: Vec<Vec<VecDeque<Part>>>,
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

    fn post(&self, from: usize, to: usize, part: Part) {
        self.state.lock().messages[to][from].push_back(part);
        self.changed[to].notify_one();
    }

    fn fail(&self, sequence: u64, fault: &GroupFault) {
        self.tell_all(|state| state.peers.lose(sequence, fault));
    }

    fn tell_all(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock());
        for rank in &self.changed {
            rank.notify_one();
        }
        self.ended.notify_all();
    }

    /// Returns when all threads of the group have ended, or ends the process: in bounded time if
    /// the group is lost and one of them does not end.
    fn watch(&self, deadline: Duration) {
        let Some(fault) = self.wait_for_fault() else {
            return;
        };
        let running = self.wait_for_ends(GRACE.min(4 * deadline));
        if !running.is_empty() {
            end_process(&fault, &running);
        }
    }

    /// Waits until all threads have ended, and returns `None`, or until one has ended in a lost
    /// group.
    fn wait_for_fault(&self) -> Option<GroupFault> {
        let mut state = self.state.lock();
        while state.ended.contains(&false) {
            match &state.peers.lost {
                Some((_, fault)) if state.ended.contains(&true) => return Some(fault.clone()),
                _ => self.ended.wait(&mut state),
            }
        }
        None
    }

    /// Waits for all threads to end, at most for `limit`. Returns the ranks whose threads still
    /// run.
    fn wait_for_ends(&self, limit: Duration) -> Vec<usize> {
        let until = Instant::now() + limit;
        let mut state = self.state.lock();
        while state.ended.contains(&false) && !self.ended.wait_until(&mut state, until).timed_out()
        {
        }
        let ranks = 0..self.changed.len();
        ranks.filter(|&rank| !state.ended[rank]).collect()
    }

    /// Waits for the next message from the rank `from` to the rank of `own`, and takes it.
    fn take(&self, from: usize, call: &Call, own: &Queue<Job>) -> Result<Part, GroupFault> {
        let (rank, deadline) = (own.rank, own.deadline);
        let until = Instant::now() + deadline;
        let mut state = self.state.lock();
        let mut yields = 0;
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
            if yields < YIELDS {
                yields += 1;
                MutexGuard::unlocked(&mut state, thread::yield_now);
                continue;
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

/// How often a rank that waits for a message lets other threads run before it sleeps. A message
/// that is almost there arrives during these microseconds; to wake a sleeping thread takes tens of
/// them.
const YIELDS: usize = 20;

/// The transport by shared memory: ranks read each other's buffers.
struct ThreadTransport {
    queue: Arc<Queue<Job>>,
    mailboxes: Arc<Mailboxes>,
}

impl Transport for ThreadTransport {
    fn exchange(&mut self, it: Exchange<'_>) -> Result<Vec<Part>, GroupFault> {
        let rank = self.queue.rank;
        for (to, range) in it.sends.iter().enumerate() {
            if to != rank && !range.is_empty() {
                let part = Part(it.own.clone(), range.clone());
                self.mailboxes.post(rank, to, part);
            }
        }
        let receive = |(from, &length): (usize, &usize)| match length {
            _ if from == rank => Ok(Part(it.own.clone(), it.sends[rank].clone())),
            0 => Ok(Part(it.own.clone(), 0..0)),
            _ => self.mailboxes.take(from, it.call, &self.queue),
        };
        it.lengths.iter().enumerate().map(receive).collect()
    }

    fn spread(&mut self, sequence: u64, fault: &GroupFault) {
        self.mailboxes.fail(sequence, fault);
    }

    fn leave(&mut self, calls: u64) {
        let leave = |state: &mut State| state.peers.left[self.queue.rank] = Some(calls);
        self.mailboxes.tell_all(leave);
    }
}
