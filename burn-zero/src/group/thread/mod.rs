//! Ranks as threads of one process.

mod mailboxes;
mod transport;
mod watch;

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
    time::Duration,
};

use mailboxes::Mailboxes;
use transport::ThreadTransport;
pub(crate) use watch::Watch;

use super::{
    GroupFault, GroupOptions, Job, ProcessGroup, Traffic,
    engine::{Engine, panic_message},
    job::Queue,
};
use crate::ZeroError;

/// A rank that is a thread of this process. A clone is the same rank.
///
/// Ranks read each other's buffers, so that a reduce-scatter reads every buffer once and writes the result once.
#[derive(Clone)]
pub struct ThreadGroup(Arc<Member>);

struct Member {
    rank: usize,
    queue: Arc<Queue>,
    mailboxes: Arc<Mailboxes>,
    options: GroupOptions,
    communication: Option<thread::JoinHandle<()>>,
}

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
            let (setting, value, expected) = ("world_size", "0".to_owned(), "at least 1");
            return Err(ZeroError::InvalidSetting {
                setting,
                value,
                expected,
            });
        }
        let mailboxes = Arc::new(Mailboxes::new(world_size));
        Ok((0..world_size)
            .map(|rank| Self::join(rank, &mailboxes, &options))
            .collect())
    }

    fn join(rank: usize, mailboxes: &Arc<Mailboxes>, options: &GroupOptions) -> Self {
        let queue = Arc::new(Queue::default());
        let transport = ThreadTransport::new(rank, mailboxes.clone(), options.clone());
        let engine = Engine::new(transport, queue.clone());
        let communication = thread::Builder::new()
            .name(format!("rank {rank}, collectives"))
            .spawn(move || drop(engine.work()))
            .expect("the system starts a thread");
        Self(Arc::new(Member {
            rank,
            queue,
            mailboxes: mailboxes.clone(),
            options: options.clone(),
            communication: Some(communication),
        }))
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
}

impl ThreadGroup {
    /// The watch on the threads of the group, each of which runs under [`guard`](Self::guard).
    pub(crate) fn watch(&self) -> Watch {
        Watch::new(self.0.mailboxes.clone(), self.0.options.after_fault)
    }

    /// Runs a rank on this thread. If it panics, the others' collectives fail with its message at once.
    pub(crate) fn guard<R>(self, rank: impl FnOnce(Self) -> R) -> Result<R, ZeroError> {
        let member = self.clone();
        let result = catch_unwind(AssertUnwindSafe(|| rank(self))).map_err(|panic| {
            let message = panic_message(&*panic);
            let fault = GroupFault::PeerPanicked {
                rank: member.rank(),
                message,
            };
            member.0.fail(fault.clone());
            ZeroError::from(fault)
        });
        member.0.mailboxes.end(member.rank());
        result
    }
}

impl Member {
    fn fail(&self, fault: GroupFault) {
        self.mailboxes.fail(0, &fault);
        self.queue.fail(fault);
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if thread::panicking() {
            let message = "its thread unwinds; the message is in its output".to_owned();
            self.fail(GroupFault::PeerPanicked {
                rank: self.rank,
                message,
            });
        }
        self.queue.close();
        if let Some(thread) = self.communication.take() {
            let _ = thread.join(); // a panic is already a fault of the group
        }
    }
}

impl ProcessGroup for ThreadGroup {
    fn rank(&self) -> usize {
        self.0.rank
    }

    fn world_size(&self) -> usize {
        self.0.mailboxes.world_size()
    }

    fn submit(&self, job: Job) {
        self.0.queue.submit(job);
    }

    fn abort(&self, reason: &str) {
        self.0.fail(GroupFault::Aborted {
            rank: self.rank(),
            reason: reason.to_owned(),
        });
    }

    fn deadline(&self) -> Duration {
        self.0.options.deadline
    }

    fn traffic(&self) -> Traffic {
        self.0.queue.traffic.lock().clone()
    }

    fn declare_settings(&self, text: &str) {
        self.0.queue.declare_settings(text);
    }
}

impl fmt::Debug for ThreadGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ThreadGroup(rank {} of {})",
            self.rank(),
            self.world_size()
        )
    }
}
