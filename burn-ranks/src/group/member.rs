//! A rank's side of its group: the queue of its jobs, the thread that runs them, and their results.

use std::{
    cell::Cell,
    collections::VecDeque,
    fmt,
    sync::{Arc, mpsc::channel},
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use super::{Collectives, GroupFault, ProcessGroup, Traffic, collectives::Transport};
use crate::RanksError;

/// Work that makes collectives: made by [`Pending::start`], given to [`ProcessGroup::submit`].
pub struct Job(pub(super) Box<dyn FnOnce(&mut Collectives) + Send>);

/// The result of a job, once it has run. Dropping it does not cancel the job, because other ranks
/// wait for its collectives.
#[must_use = "a collective's result or error is lost unless it is waited for"]
pub struct Pending<T, E = RanksError> {
    ended: Arc<Mutex<Option<Ended<T, E>>>>,
    queue: Arc<Queue>,
}

/// A job that has run.
struct Ended<T, E> {
    result: Result<T, E>,
    /// Bytes of buffers that it sent.
    sent_bytes: u64,
}

impl<T: Send + 'static, E: From<RanksError> + Send + 'static> Pending<T, E> {
    /// Submits a job to the communication thread of this rank, which runs it after all earlier
    /// ones. It may make several collectives and compute in between. It must not wait for another
    /// job of the same group, nor own the group.
    ///
    /// ```
    /// use burn_ranks::{GroupOptions, Pending, ProcessGroup, ReduceOp, ThreadGroup};
    ///
    /// ThreadGroup::spawn(2, GroupOptions::default(), |group| {
    ///     let sum = Pending::start(&group, |ranks| {
    ///         let values = vec![1.0; 8]; // made on the communication thread
    ///         ranks.all_reduce("values", ReduceOp::Sum, values.into())
    ///     });
    ///     // The rank computes on.
    ///     assert_eq!(sum.wait()?, vec![2.0; 8].into());
    ///     Ok::<_, burn_ranks::RanksError>(())
    /// })?;
    /// # Ok::<(), burn_ranks::RanksError>(())
    /// ```
    pub fn start(
        group: &(impl ProcessGroup + ?Sized),
        work: impl FnOnce(&mut Collectives) -> Result<T, E> + Send + 'static,
    ) -> Self {
        let ended = Arc::new(Mutex::new(None));
        let (own, queue) = (ended.clone(), group.member().0.0.clone());
        group.submit(Job(Box::new(move |ranks| {
            // Jobs run one after the other, so what is sent meanwhile is this one's.
            let sent_bytes = |ranks: &Collectives| ranks.queue.traffic.lock().total().data_bytes;
            let before = sent_bytes(ranks);
            let result = work(ranks);
            *own.lock() = Some(Ended {
                result,
                sent_bytes: sent_bytes(ranks) - before,
            });
            ranks.queue.tell(|_| ());
        })));
        Self { ended, queue }
    }

    /// Waits for the result. Each collective of the job ends within the group's deadline after each
    /// rank's last message.
    ///
    /// # Errors
    ///
    /// Those of the job; [`RanksError::Group`] if the group is lost before it has run.
    pub fn wait(self) -> Result<T, E> {
        let queue = &self.queue;
        let start = Instant::now();
        let ended = queue.wait(|state| {
            let ended = self.ended.lock().take();
            ended.or_else(|| {
                let fault = RanksError::Group(state.fault.clone()?);
                Some(Ended {
                    result: Err(fault.into()),
                    sent_bytes: 0,
                })
            })
        });
        let observer = queue.observer.lock().clone();
        if let Some(observer) = observer {
            observer(&Waited {
                time: start.elapsed(),
                sent_bytes: ended.sent_bytes,
            });
        }
        ended.result
    }
}

/// A thread's wait for collectives, which has ended: see [`ProcessGroup::observe_waits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waited {
    /// How long the thread waited.
    pub time: Duration,
    /// Bytes of buffers that the job it waited for sent.
    pub sent_bytes: u64,
}

/// Sees the waits of a rank.
pub(super) type Observer = dyn Fn(&Waited) + Send + Sync;

/// One rank of a group, whatever its transport. A clone is the same rank; dropping the last one
/// leaves the group.
#[derive(Clone)]
pub struct Member(Arc<LeaveOnDrop>);

/// Leaves the group when dropped.
struct LeaveOnDrop(Arc<Queue>);

thread_local! {
    /// The message of this thread's last panic, if a panic hook stores it.
    pub(super) static LAST_PANIC: Cell<Option<String>> = const { Cell::new(None) };
}

impl Member {
    /// Starts the communication thread, which connects to the other ranks by itself. The third
    /// value of `connect` is dropped after the transport.
    ///
    /// # Errors
    ///
    /// [`RanksError::Start`] if the system starts no thread; those of `connect`.
    pub(super) fn start<T: Transport + 'static, D>(
        name: String,
        connect: impl FnOnce() -> Result<(Arc<Queue>, T, D), RanksError> + Send + 'static,
    ) -> Result<Self, RanksError> {
        let (started, start) = channel();
        let work = move || match connect() {
            Err(error) => drop(started.send(Err(error))),
            Ok((queue, transport, last)) => {
                let _ = started.send(Ok(queue.clone()));
                Collectives::new(Box::new(transport), queue.clone()).work();
                drop(last);
                queue.end();
            }
        };
        let thread = thread::Builder::new().name(name.clone());
        let failed = |error: std::io::Error| RanksError::Start {
            what: name,
            reason: error.to_string(),
        };
        thread.spawn(work).map_err(failed)?;
        let queue = start.recv().expect("the thread connects or says why not")?;
        Ok(Self(Arc::new(LeaveOnDrop(queue))))
    }

    pub(super) fn queue(&self) -> &Queue {
        &self.0.0
    }
}

impl Drop for LeaveOnDrop {
    fn drop(&mut self) {
        let queue = &self.0;
        if thread::panicking() && queue.world_size > 1 && queue.fault().is_none() {
            let message = LAST_PANIC.take();
            let message = message.unwrap_or_else(|| "its thread unwinds".to_owned());
            queue.panicked(message);
        }
        queue.leave();
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Queue {
            rank, world_size, ..
        } = self.queue();
        write!(f, "rank {rank} of {world_size}")
    }
}

/// The jobs of a rank, first in first out: shared by its group and its communication thread.
pub(super) struct Queue {
    pub rank: usize,
    pub world_size: usize,
    pub deadline: Duration,
    pub traffic: Mutex<Traffic>,
    pub observer: Mutex<Option<Arc<Observer>>>,
    state: Mutex<State>,
    changed: Condvar,
    on_fault: Box<OnFault>,
}

/// Passes a fault of this rank to the other ranks, after the rank's own jobs have failed.
type OnFault = dyn Fn(&GroupFault) + Send + Sync;

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    is_closed: bool,
    /// Whether the communication thread has left the group or found it lost.
    has_ended: bool,
    fault: Option<GroupFault>,
}

impl Queue {
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
            state: Mutex::default(),
            changed: Condvar::new(),
            on_fault: Box::new(on_fault),
        })
    }

    fn tell<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let result = change(&mut self.state.lock());
        self.changed.notify_all();
        result
    }

    fn wait<R>(&self, mut is_done: impl FnMut(&State) -> Option<R>) -> R {
        let mut state = self.state.lock();
        loop {
            match is_done(&state) {
                Some(result) => return result,
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// Puts a job at the end, unless the group is lost.
    pub fn submit(&self, job: Job) {
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
    pub fn next(&self) -> Option<Job> {
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
