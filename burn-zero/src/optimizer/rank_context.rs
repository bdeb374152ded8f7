//! How a strategy and the [`ZeroOptimizer`] inside of its Learner find each other: on the thread that trains.
//!
//! A Learner hides its optimizer, and wrappers hide it from each other. What the strategy and the optimizer both see is the thread, and a thread
//! is a rank. The strategy leaves a [`RankContext`] on it and sends [`Message::Ranks`]; the optimizer does what the context asks for.

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
use super::prepare::{attach_to, prepare};
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
    /// What the rank computes on.
    device: DeviceId,
    /// The ids of the model's parameters, in the order of the layout, once an optimizer was prepared.
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
    /// To take the ranks and get to know the model.
    Prepare,
    /// To send its part of a record that rank 0 makes.
    Record,
}

/// Takes the context away from the thread.
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

    /// Lets the optimizer inside of `step`, a step without gradients, take its ranks. The step returns the model on the rank's device, with the
    /// weights of rank 0 and leaves and running statistics of its own. All ranks call it.
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

    /// How many optimizers have answered.
    fn ask(&self, what: Ask, step: impl FnOnce()) -> Result<usize, ZeroError> {
        self.request.lock().what = Some(what);
        message::send(Message::Ranks, step);
        let request = core::mem::take(&mut *self.request.lock());
        request.failed.map_or(Ok(request.answers), Err)
    }

    /// On rank 0: runs `write`, in which Burn may make a record. The other ranks, in [`take_part`](Self::take_part), send their parts of it, and
    /// wait until `write` returns, however long a disk takes: a thread tells them from time to time that rank 0 is at work.
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

    /// On the other ranks: sends this rank's part of each record that rank 0 makes, until it is done. The optimizer is inside of `step`.
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

/// Rank 0's state while it makes records, as it tells the other ranks in rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Done,
    /// A record follows, in which all ranks take part.
    Record,
    Working,
}

const STATES: [State; 3] = [State::Done, State::Record, State::Working];

/// A round. What rank 0 has told.
fn tell(group: &dyn ProcessGroup, own: State) -> Result<State, ZeroError> {
    let told = group.gather_bytes("whether rank 0 makes a record", vec![own as u8])?;
    let state = told.first().and_then(|state| state.first());
    Ok(state.map_or(State::Done, |&state| STATES[usize::from(state)]))
}

/// Which thread of rank 0 calls the others: the one that holds the lock.
#[derive(Debug, Default)]
struct Recording {
    others_wait: Mutex<bool>,
    changed: Condvar,
}

/// Ends the rounds, also where making a record panics.
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
    /// Does what a step that is a message asks for. Returns the model.
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
            // Before it is moved: moving a running statistic moves it in all clones of the model.
            module = independent_if_shared::<B, M>(module);
        }
        let module = module.fork(&device);
        let request = self.prepare_request::<B>(&*context.group, &device);
        let settings = format!("{:?}", request.settings);
        context.group.agree_equal("settings", &settings)?;
        let (module, reducer) = prepare::<B, M>(module, &context.group, request)?;
        let ids = attach_to::<B, M>(&reducer, &module);
        self.group = context.group.clone();
        self.reducer = Some(reducer);
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
        // Held until the record is made, so that nothing else is told meanwhile.
        let others_wait = context.recording.others_wait.lock();
        if *others_wait {
            tell(&*self.group, State::Record)?;
        }
        self.to_whole_record::<B>(context.ids(), &B::Device::from_id(context.device))
    }
}
