//! What a rank's group keeps on this side, whatever the transport.

use std::{
    cell::Cell,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
};

use parking_lot::Mutex;

use super::{
    Collectives, GroupFault, GroupOptions, collectives::Transport, job::Queue, options::round,
};
use crate::ZeroError;

/// One rank: its jobs, and the thread that runs them.
pub(super) struct Member {
    pub rank: usize,
    pub world_size: usize,
    pub options: GroupOptions,
    pub queue: Arc<Queue>,
    /// The communication thread sends, or drops the sender, when it has left the group or found it lost.
    ended: Mutex<Receiver<()>>,
    on_fault: Box<OnFault>,
}

/// Carries a fault of this rank itself to the other ranks. The rank's own jobs have failed.
type OnFault = dyn Fn(&GroupFault) + Send + Sync;

impl Member {
    /// Starts the communication thread, which connects to the other ranks by itself. `connect` gets a sender to be dropped when the
    /// thread has ended its work, and returns what is to be dropped last.
    pub fn start<T: Transport + 'static, D>(
        name: String,
        options: GroupOptions,
        on_fault: impl Fn(&GroupFault) + Send + Sync + 'static,
        connect: impl FnOnce(Arc<Queue>, Sender<()>) -> Result<(T, D), ZeroError> + Send + 'static,
    ) -> Result<Self, ZeroError> {
        let queue = Arc::new(Queue::default());
        let (started, start) = channel();
        let (end, ended) = channel();
        let patience = round(options.deadline);
        let jobs = queue.clone();
        let work = move || match connect(jobs.clone(), end) {
            Err(error) => drop(started.send(Err(error))),
            Ok((transport, last)) => {
                let _ = started.send(Ok((transport.rank(), transport.world_size())));
                Collectives::new(Box::new(transport), jobs).work(patience);
                drop(last);
            }
        };
        let thread = thread::Builder::new().name(name);
        thread.spawn(work).expect("the system starts a thread");
        let start = start.recv().expect("the thread connects or says why not");
        let (rank, world_size) = start?;
        Ok(Self {
            rank,
            world_size,
            options,
            queue,
            ended: Mutex::new(ended),
            on_fault: Box::new(on_fault),
        })
    }

    /// Ends the group by a fault of this rank.
    pub fn fail(&self, fault: GroupFault) {
        self.queue.fail(fault.clone());
        (self.on_fault)(&fault);
    }
}

thread_local! {
    /// The message of this thread's last panic, where a hook keeps it.
    pub(super) static LAST_PANIC: Cell<Option<String>> = const { Cell::new(None) };
}

impl Drop for Member {
    fn drop(&mut self) {
        if thread::panicking() && self.world_size > 1 && self.queue.fault().is_none() {
            let message = LAST_PANIC.take();
            let message = message.unwrap_or_else(|| "its thread unwinds".to_owned());
            let rank = self.rank;
            self.fail(GroupFault::PeerPanicked { rank, message });
        }
        self.queue.close();
        let _ = self.ended.lock().recv(); // an error says that the sender is dropped
    }
}

/// A type with a field `member` as a [`ProcessGroup`](super::ProcessGroup).
macro_rules! process_group {
    ($group:ident) => {
        impl $crate::group::ProcessGroup for $group {
            fn rank(&self) -> usize {
                self.member.rank
            }

            fn world_size(&self) -> usize {
                self.member.world_size
            }

            fn submit(&self, job: $crate::group::Job) {
                self.member.queue.submit(job);
            }

            fn abort(&self, reason: &str) {
                let (rank, reason) = (self.member.rank, reason.to_owned());
                let fault = $crate::group::GroupFault::Aborted { rank, reason };
                self.member.fail(fault);
            }

            fn deadline(&self) -> std::time::Duration {
                self.member.options.deadline
            }

            fn traffic(&self) -> $crate::group::Traffic {
                self.member.queue.traffic.lock().clone()
            }

            fn declare_settings(&self, text: &str) {
                self.member.queue.declare_settings(text);
            }
        }

        impl std::fmt::Debug for $group {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let (rank, ranks) = (self.member.rank, self.member.world_size);
                write!(f, "{}(rank {rank} of {ranks})", stringify!($group))
            }
        }
    };
}
pub(super) use process_group;
