//! A rank's side of its group: the thread that runs its jobs, and their results.

use std::{
    cell::Cell,
    fmt,
    sync::{Arc, mpsc::channel},
    thread,
    time::Instant,
};

use parking_lot::Mutex;

use super::{Collectives, Job, ProcessGroup, Waited, queue::Queue, transport::Transport};
use crate::RanksError;

/// The result of a job, once it has run. Dropping it does not cancel the job, because other ranks
/// wait for its collectives.
#[must_use = "a collective's result or error is lost unless it is waited for"]
pub struct Pending<T, E = RanksError> {
    ended: Arc<Mutex<Option<Ended<T, E>>>>,
    queue: Arc<Queue<Job>>,
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
            ranks.queue.job_has_run();
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
        let ended = queue.wait_for(|fault| {
            let ended = self.ended.lock().take();
            ended.or_else(|| {
                let fault = RanksError::Group(fault?.clone());
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

/// One rank of a group, whatever its transport. A clone is the same rank; dropping the last one
/// leaves the group.
#[derive(Clone)]
pub struct Member(Arc<LeaveOnDrop>);

/// Leaves the group when dropped.
struct LeaveOnDrop(Arc<Queue<Job>>);

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
        connect: impl FnOnce() -> Result<(Arc<Queue<Job>>, T, D), RanksError> + Send + 'static,
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

    pub(super) fn queue(&self) -> &Queue<Job> {
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
