//! The connection between a strategy and the [`ZeroOptimizer`] inside its Learner: a context on the thread that trains.
//!
//! A Learner does not expose its optimizer, nor do wrappers. But a thread is a rank, and both strategy and optimizer run on it. The
//! strategy sets a [`RankContext`] for the thread and sends [`Message::Ranks`]; the optimizer does what the context asks for.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};
use std::thread;

use burn::module::{AutodiffModule, ParamId};
use burn::optim::Optimizer;
use burn::tensor::backend::{AutodiffBackend, DeviceId};
use burn_backend::Device as _;
use burn_decorator::message::{self, Message};
use parking_lot::{Condvar, Mutex};

use super::parameter_shards::ParameterShards;
use super::statistics::independent_if_shared;
use super::zero_optimizer::ZeroOptimizer;
use crate::group::{Agree, ProcessGroup, round};
use crate::{StrategyError, ZeroError};

thread_local! {
    static CONTEXT: RefCell<Option<Arc<RankContext>>> = const { RefCell::new(None) };
}

/// What a strategy leaves on a rank's thread for the optimizer.
#[derive(Debug)]
pub(crate) struct RankContext {
    pub(crate) group: Arc<dyn ProcessGroup>,
    /// The rank's device.
    device: DeviceId,
    /// The ids of the model's parameters, in the order of the layout; set when an optimizer was prepared.
    ids: OnceLock<Vec<ParamId>>,
    request: Mutex<Request>,
    recording: Recording,
}

/// What the strategy asks of the optimizer.
#[derive(Debug, Default)]
struct Request {
    what: Option<Ask>,
    /// The optimizers that have answered.
    answers: usize,
    failed: Option<ZeroError>,
}

#[derive(Clone, Copy, Debug)]
enum Ask {
    /// Take the group from the context and prepare the model.
    Prepare,
    /// Send this rank's part of a record that rank 0 makes.
    Record,
}

/// Removes the context from the thread when dropped.
pub(crate) struct OnThread(Option<Arc<RankContext>>);

impl Drop for OnThread {
    fn drop(&mut self) {
        CONTEXT.with_borrow_mut(|context| core::mem::swap(context, &mut self.0));
    }
}

impl RankContext {
    pub(crate) fn new(group: Arc<dyn ProcessGroup>, device: DeviceId) -> Arc<Self> {
        Arc::new(Self {
            group,
            device,
            ids: OnceLock::new(),
            request: Mutex::default(),
            recording: Recording::default(),
        })
    }

    /// The context of this thread, if a strategy trains on it.
    pub(crate) fn here() -> Option<Arc<Self>> {
        CONTEXT.with_borrow(Clone::clone)
    }

    pub(crate) fn put_on_thread(self: &Arc<Self>) -> OnThread {
        let mut guard = OnThread(Some(self.clone()));
        CONTEXT.with_borrow_mut(|context| core::mem::swap(context, &mut guard.0));
        guard
    }

    /// Lets the optimizer that `step`, a step without gradients, reaches take its group. That step returns the model on the rank's device,
    /// with the weights of rank 0, and with leaves and running statistics of its own. All ranks call it.
    ///
    /// # Errors
    ///
    /// [`StrategyError::NoZeroOptimizer`]; those of [`ZeroOptimizer::prepare`].
    pub(crate) fn prepare(
        &self,
        optimizer: &'static str,
        step: impl FnOnce(),
    ) -> Result<(), ZeroError> {
        match self.ask(Ask::Prepare, step)? {
            1 => Ok(()),
            found => Err(StrategyError::NoZeroOptimizer { optimizer, found }.into()),
        }
    }

    fn ids(&self) -> &[ParamId] {
        self.ids.get().map_or(&[], Vec::as_slice)
    }

    /// Runs `step` with this request, and returns how many optimizers have answered.
    fn ask(&self, what: Ask, step: impl FnOnce()) -> Result<usize, ZeroError> {
        self.request.lock().what = Some(what);
        message::send(Message::Ranks, step);
        let request = core::mem::take(&mut *self.request.lock());
        request.failed.map_or(Ok(request.answers), Err)
    }

    /// On rank 0: runs `write`, in which Burn may make a record. The other ranks, in [`take_part`](Self::take_part), send their parts and
    /// wait until `write` returns, however long that takes: a thread tells them regularly that rank 0 is at work.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn lead_record<R>(&self, write: impl FnOnce() -> R) -> Result<R, ZeroError> {
        if self.group.world_size() == 1 {
            return Ok(write());
        }
        *self.recording.others_wait.lock() = true;
        let written = thread::scope(|scope| {
            let recording = &self.recording;
            let ends = Ends(recording);
            let tell = || recording.tell_others(&*self.group);
            let telling = thread::Builder::new()
                .name("rank 0, at work".to_owned())
                .spawn_scoped(scope, tell)
                .expect("the system starts a thread");
            let written = write();
            drop(ends);
            let told = telling.join().expect("it only calls the group");
            told.map(|()| written)
        })?;
        tell(&*self.group, State::Done)?;
        Ok(written)
    }

    /// On the other ranks: sends this rank's part of each record that rank 0 makes, until `write` has returned there. `step` reaches the
    /// optimizer.
    ///
    /// # Errors
    ///
    /// Those of the group, and of a record.
    pub(crate) fn take_part(&self, mut step: impl FnMut()) -> Result<(), ZeroError> {
        loop {
            match tell(&*self.group, State::Working)? {
                State::Done => return Ok(()),
                State::Record => self.ask(Ask::Record, &mut step).map(drop)?,
                State::Working => {}
            }
        }
    }
}

/// Rank 0's state while it makes records, sent to the other ranks repeatedly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Done,
    /// A record follows, in which all ranks take part.
    Record,
    Working,
}

const STATES: [State; 3] = [State::Done, State::Record, State::Working];

/// One round of that: a collective that returns rank 0's state.
fn tell(group: &dyn ProcessGroup, own: State) -> Result<State, ZeroError> {
    let told = group.gather_bytes("whether rank 0 makes a record", vec![own as u8])?;
    let state = told.first().and_then(|state| state.first());
    Ok(state.map_or(State::Done, |&state| STATES[usize::from(state)]))
}

/// Of rank 0's threads only the one that holds the lock makes collectives.
#[derive(Debug, Default)]
struct Recording {
    others_wait: Mutex<bool>,
    changed: Condvar,
}

/// Ends the rounds when dropped, also by a panic.
struct Ends<'a>(&'a Recording);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        *self.0.others_wait.lock() = false;
        self.0.changed.notify_all();
    }
}

impl Recording {
    fn tell_others(&self, group: &dyn ProcessGroup) -> Result<(), ZeroError> {
        let round = round(group.deadline());
        let mut others_wait = self.others_wait.lock();
        while *others_wait {
            let waited = self.changed.wait_for(&mut others_wait, round);
            if waited.timed_out() && *others_wait {
                tell(group, State::Working)?;
            }
        }
        Ok(())
    }
}

impl<O> ZeroOptimizer<O> {
    /// Handles a step that is a message of the strategy. Returns the model.
    pub(super) fn receive<B, M>(&mut self, module: M) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<ParameterShards<B>, B>,
    {
        message::report(|inside| inside.ranks = true);
        let context = RankContext::here().filter(|_| self.is_in_learner());
        let (Some(Message::Ranks), Some(context)) = (message::received(), context) else {
            return module;
        };
        context.request.lock().answers += 1;
        let what = context.request.lock().what;
        let before = module.clone();
        let done = message::answer(|| match what {
            Some(Ask::Prepare) => self.take_ranks::<B, M>(&context, module),
            Some(Ask::Record) => {
                let device = B::Device::from_id(context.device);
                let record = self.to_whole_record::<B>(context.ids(), &device);
                record.map(|_| module)
            }
            None => Ok(module),
        });
        done.unwrap_or_else(|error| {
            context.request.lock().failed = Some(error);
            before
        })
    }

    fn take_ranks<B, M>(&mut self, context: &RankContext, mut module: M) -> Result<M, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<ParameterShards<B>, B>,
    {
        let device = B::Device::from_id(context.device);
        if context.group.world_size() > 1 {
            // Before the move to the device: that moves a running statistic in all clones of the model.
            module = independent_if_shared::<B, M>(module);
        }
        let module = module.fork(&device);
        let settings = format!("{:?}", self.settings);
        context.group.agree_equal("settings", &settings)?;
        let (module, ids) = self.prepare_on::<B, M>(context.group.clone(), module, &device)?;
        self.cut_state::<B>(&ids, &device)?;
        // A context belongs to one training.
        let _ = context.ids.set(ids);
        Ok(module)
    }

    /// The record of the whole model, which all ranks make when rank 0 is asked for one.
    pub(super) fn lead_whole_record<B>(&self, context: &RankContext) -> Result<O::Record, ZeroError>
    where
        B: AutodiffBackend,
        O: Optimizer<ParameterShards<B>, B>,
    {
        // Held until the record is made, so that the other thread makes no collective meanwhile.
        let others_wait = context.recording.others_wait.lock();
        if *others_wait {
            tell(&*self.group, State::Record)?;
        }
        self.to_whole_record::<B>(context.ids(), &B::Device::from_id(context.device))
    }
}
