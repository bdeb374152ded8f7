//! Jobs of a rank's communication thread, and their results.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use super::{Collectives, GroupFault, ProcessGroup, Traffic, call::declaration};
use crate::ZeroError;

/// Work that makes collectives: made by [`Pending::start`], given to [`ProcessGroup::submit`].
pub struct Job {
    work: Box<dyn FnOnce(&mut Collectives) + Send>,
    /// Sets the result to an error, if there is none yet.
    fail: Fail,
}

type Fail = Arc<dyn Fn(&GroupFault) + Send + Sync>;

impl Job {
    /// Runs the job with the collectives of its rank.
    pub fn run(self, collectives: &mut Collectives) {
        (self.work)(collectives);
    }
}

/// The result of a job, once it has run. Dropping it does not cancel the job, because other ranks wait for its collectives.
#[derive(Debug)]
#[must_use = "a collective's result or error is lost unless it is waited for"]
pub struct Pending<T>(Arc<Slot<T>>);

#[derive(Debug)]
struct Slot<T> {
    result: Mutex<Option<Result<T, ZeroError>>>,
    filled: Condvar,
}

impl<T> Slot<T> {
    fn fill(&self, result: Result<T, ZeroError>) {
        self.result.lock().get_or_insert(result);
        self.filled.notify_all();
    }
}

impl<T: Send + 'static> Pending<T> {
    /// Submits a job to the communication thread of this rank, which runs it after all earlier ones. It may make several
    /// collectives and compute in between. It must not wait for another job of the same group, nor own the group.
    ///
    /// ```
    /// use burn_zero::{GroupOptions, ProcessGroup, ReduceOp, ThreadGroup, group::Pending};
    ///
    /// ThreadGroup::spawn(2, GroupOptions::default(), |group| {
    ///     let sum = Pending::start(&group, |ranks| {
    ///         let values = vec![1.0; 8]; // made on the communication thread
    ///         ranks.all_reduce("values", ReduceOp::Sum, values.into())
    ///     });
    ///     // The rank computes on.
    ///     assert_eq!(sum.wait()?, vec![2.0; 8].into());
    ///     Ok::<_, burn_zero::ZeroError>(())
    /// })?;
    /// # Ok::<(), burn_zero::ZeroError>(())
    /// ```
    pub fn start(
        group: &(impl ProcessGroup + ?Sized),
        work: impl FnOnce(&mut Collectives) -> Result<T, ZeroError> + Send + 'static,
    ) -> Self {
        let slot = Arc::new(Slot {
            result: Mutex::new(None),
            filled: Condvar::new(),
        });
        let (filled, failed) = (slot.clone(), slot.clone());
        group.submit(Job {
            work: Box::new(move |ranks| filled.fill(work(ranks))),
            fail: Arc::new(move |fault| failed.fill(Err(fault.clone().into()))),
        });
        Self(slot)
    }
}

impl<T> Pending<T> {
    /// Waits for the result. Each collective of the job ends within the group's deadline after each rank's last message.
    ///
    /// # Errors
    ///
    /// Those of the job; [`ZeroError::Group`] if the group is lost before it has run.
    pub fn wait(self) -> Result<T, ZeroError> {
        let mut result = self.0.result.lock();
        loop {
            match result.take() {
                Some(result) => return result,
                None => self.0.filled.wait(&mut result),
            }
        }
    }

    /// Waits at most `timeout` and says whether the job has ended.
    pub fn wait_for(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let mut result = self.0.result.lock();
        while result.is_none() && !self.0.filled.wait_until(&mut result, until).timed_out() {}
        result.is_some()
    }

    /// Whether the job has ended.
    pub fn is_done(&self) -> bool {
        self.0.result.lock().is_some()
    }
}

/// The jobs of a rank, first in first out: shared by its group and its communication thread.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    pub traffic: Mutex<Traffic>,
}

#[derive(Default)]
struct State {
    /// Each with the rank's declaration at the time of its submission.
    waiting: VecDeque<(Job, String)>,
    running: Option<Fail>,
    settings: String,
    is_closed: bool,
    fault: Option<GroupFault>,
}

impl Queue {
    /// Puts a job at the end.
    pub fn submit(&self, job: Job) {
        let mut state = self.state.lock();
        if let Some(fault) = &state.fault {
            return (job.fail)(fault);
        }
        let settings = state.settings.clone();
        state.waiting.push_back((job, settings));
        self.changed.notify_all();
    }

    /// Waits for the next job; `None` if the group is dropped and everything is done, or if it is lost. Calls `stay` each time that none
    /// was submitted for `patience`. Called after the previous job has run.
    pub fn next(&self, patience: Duration, mut stay: impl FnMut()) -> Option<(Job, String)> {
        let mut state = self.state.lock();
        state.running = None;
        loop {
            if state.fault.is_some() || (state.waiting.is_empty() && state.is_closed) {
                return None;
            }
            if let Some((job, settings)) = state.waiting.pop_front() {
                state.running = Some(job.fail.clone());
                return Some((job, settings));
            }
            if self.changed.wait_for(&mut state, patience).timed_out() {
                parking_lot::MutexGuard::unlocked(&mut state, &mut stay);
            }
        }
    }

    /// Fails every job that is running, waiting, or submitted later. Only the first fault is kept.
    pub fn fail(&self, fault: GroupFault) {
        let mut state = self.state.lock();
        let fault = state.fault.get_or_insert(fault).clone();
        let waiting: Vec<_> = state.waiting.drain(..).collect();
        let running = state.running.take();
        self.changed.notify_all();
        drop(state);
        let fails = waiting.iter().map(|(job, _)| &job.fail).chain(&running);
        fails.for_each(|fail| fail(&fault));
    }

    /// Why the group is lost, if it is.
    pub fn fault(&self) -> Option<GroupFault> {
        self.state.lock().fault.clone()
    }

    /// Lets the communication thread end after the last job.
    pub fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }

    pub fn declare_settings(&self, text: &str) {
        self.state.lock().settings = declaration(text);
    }
}
