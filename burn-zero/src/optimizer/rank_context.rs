//! The connection between a strategy and the [`ZeroOptimizer`](super::ZeroOptimizer) inside its
//! Learner: a context on the thread that trains.
//!
//! A Learner does not expose its optimizer, nor do wrappers. But a thread is a rank, and both
//! strategy and optimizer run on it. The strategy sets a [`RankContext`] for the thread and sends
//! [`Message::Ranks`]; the optimizer handles the request in the context.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use burn::module::{AutodiffModule, ParamId, list_param_ids};
use burn::record::Record;
use burn::tensor::backend::{AutodiffBackend, Backend, DeviceId};
use burn_backend::Device as _;
use burn_decorator::cell::with_value;
use burn_decorator::message::{self, Message};
use burn_ranks::ProcessGroup;
use ciborium::Value;
use parking_lot::Mutex;

use super::sharding::{Sharding, UpdateShards};
use super::statistics::independent_if_shared;

use crate::state::to_record;
use crate::trace::trace_waits;
use crate::{ZeroError, raise};

thread_local! {
    static CONTEXT: RefCell<Option<Arc<RankContext>>> = const { RefCell::new(None) };
}

/// What a strategy leaves on a rank's thread for the optimizer.
#[derive(Debug)]
pub(crate) struct RankContext {
    pub(crate) group: Arc<dyn ProcessGroup>,
    /// The rank's device.
    device: DeviceId,
    /// The ids of the model's parameters, in the order of the layout; set when an optimizer was
    /// prepared.
    ids: OnceLock<Vec<ParamId>>,
    /// The strategy's request to the optimizer.
    asked: Mutex<Option<Ask>>,
    /// One answer of each optimizer that the request has reached.
    answers: Mutex<Vec<Result<(), ZeroError>>>,
    /// On rank 0: the state of all ranks, for the record that is about to be written.
    whole: Mutex<Option<Value>>,
    /// Whether parameters are gathered when they are used. Such a use is a collective: all ranks
    /// use the model, or none.
    gathers_units: AtomicBool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Ask {
    /// Take the group from the context and prepare the model.
    Prepare,
    /// Send this rank's part of the state of all ranks to rank 0, for the next record.
    Record,
    /// Return a model that rank 0 uses alone: with whole parameters in its host memory, where they
    /// are sharded.
    Whole,
    /// Put the shards back.
    Sharded,
}

impl RankContext {
    pub(crate) fn new(group: Arc<dyn ProcessGroup>, device: DeviceId) -> Arc<Self> {
        trace_waits(&*group);
        Arc::new(Self {
            group,
            device,
            ids: OnceLock::new(),
            asked: Mutex::default(),
            answers: Mutex::default(),
            whole: Mutex::default(),
            gathers_units: AtomicBool::new(false),
        })
    }

    /// The context of this thread, if a strategy trains on it.
    pub(crate) fn here() -> Option<Arc<Self>> {
        CONTEXT.with_borrow(Clone::clone)
    }

    /// Runs `train` with this context on the thread.
    pub(crate) fn on_thread<R>(self: &Arc<Self>, train: impl FnOnce() -> R) -> R {
        with_value(&CONTEXT, self.clone(), train).0
    }

    /// Runs `step`, a step without gradients, in which the optimizer takes the group of this
    /// context. The step returns the model on the rank's device, with the weights of rank 0, and
    /// with leaves and running statistics of its own. All ranks call it.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Strategy`] unless the step reaches exactly one optimizer; those of
    /// [`ZeroOptimizer::prepare`](super::ZeroOptimizer::prepare).
    pub(crate) fn prepare(&self, optimizer: &str, step: impl FnOnce()) -> Result<(), ZeroError> {
        match self.ask(Ask::Prepare, step)? {
            1 => Ok(()),
            found => Err(ZeroError::Strategy(format!(
                "ZeroStrategy trains a Learner with one `ZeroOptimizer::in_learner(optimizer, settings)`, alone or inside of other \
                 wrappers, but {optimizer} has {found} of them; an `Update` with `.reduce_in_learner(settings)` is trained by \
                 `update.strategy()`"
            ))),
        }
    }

    fn ids(&self) -> &[ParamId] {
        self.ids.get().map_or(&[], Vec::as_slice)
    }

    pub(crate) fn gathers_units(&self) -> bool {
        self.gathers_units.load(Relaxed)
    }

    /// Runs `step`, a step without gradients, with this request, and returns how many optimizers
    /// have answered. All ranks call it.
    ///
    /// # Errors
    ///
    /// Those of the group, of [`ZeroOptimizer::prepare`](super::ZeroOptimizer::prepare) and of a record.
    pub(crate) fn ask(&self, what: Ask, step: impl FnOnce()) -> Result<usize, ZeroError> {
        *self.asked.lock() = Some(what);
        message::send(Message::Ranks, step);
        *self.asked.lock() = None;
        let answers = core::mem::take(&mut *self.answers.lock());
        let found = answers.len();
        answers.into_iter().collect::<Result<(), _>>()?;
        Ok(found)
    }

    /// On rank 0: runs `write`, in which Burn may write a record of the gathered state. The other
    /// ranks pass `None` and wait until it returns, at most for the group's deadline.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn write_record(&self, write: Option<impl FnOnce()>) -> Result<(), ZeroError> {
        write.into_iter().for_each(|write| write());
        *self.whole.lock() = None;
        Ok(self.group.barrier("rank 0 has written its record")?)
    }

    /// The gathered state of all ranks; `None` outside of [`write_record`](Self::write_record). It
    /// stays, because a wrapper may make more than one record of its optimizer for the one that is
    /// written.
    pub(super) fn whole<B: Backend, R: Record<B>>(&self) -> Option<R> {
        let tree = self.whole.lock();
        let device = B::Device::from_id(self.device);
        Some(raise(to_record::<B, R>(tree.as_ref()?, &device)))
    }
}

impl Sharding {
    /// The record of the whole model, while a strategy has one written.
    pub(super) fn whole_record<B: Backend, R: Record<B>>(&self) -> Option<R> {
        let context = RankContext::here().filter(|_| self.in_learner);
        context.and_then(|context| context.whole::<B, R>())
    }

    /// Handles a step that is a message of the strategy. Returns the model.
    pub(super) fn receive<B, M>(
        &mut self,
        module: Box<M>,
        inner: &mut impl UpdateShards<B, Error = ZeroError>,
    ) -> Box<M>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        message::report(|inside| inside.ranks = true);
        let context = RankContext::here().filter(|_| self.in_learner);
        let (Some(Message::Ranks), Some(context)) = (message::received(), context) else {
            return module;
        };
        let what = *context.asked.lock();
        let before = module.clone();
        let done = message::answer(|| match what {
            Some(Ask::Prepare) => {
                let device = B::Device::from_id(context.device);
                let nothing = |_: &M, _: &mut _| Ok(());
                let taken = self.take_ranks(&context.group, &device, module, inner, nothing);
                taken.map(|(module, ids)| {
                    // A context belongs to one training.
                    let _ = context.ids.set(ids);
                    let is_sharded = self.prepared.lock().shards.is_some();
                    context.gathers_units.store(is_sharded, Relaxed);
                    module
                })
            }
            Some(Ask::Record) => self.gather_whole::<B>(context.ids(), inner).map(|tree| {
                *context.whole.lock() = tree;
                module
            }),
            Some(Ask::Whole) => {
                self.follow::<B, M>(&module);
                self.put_whole_on_rank_0::<B, M>(module)
            }
            Some(Ask::Sharded) => Ok(self.put_shards_again::<B, M>(module)),
            None => Ok(module),
        });
        let (module, answer) = match done {
            Ok(module) => (module, Ok(())),
            Err(error) => (before, Err(error)),
        };
        context.answers.lock().push(answer);
        module
    }

    /// Takes the ranks of a Learner's strategy: the model on this rank's device, with the weights of
    /// rank 0, and with leaves and running statistics of its own; and the ids of its parameters.
    /// State that was loaded is cut to this rank's shards. All ranks call it.
    ///
    /// # Errors
    ///
    /// Those of [`prepare`](Self::prepare) and of the state.
    pub(super) fn take_ranks<B, M, U>(
        &mut self,
        group: &Arc<dyn ProcessGroup>,
        device: &B::Device,
        mut module: Box<M>,
        inner: &mut U,
        show: impl FnOnce(&M, &mut U) -> Result<(), U::Error>,
    ) -> Result<(Box<M>, Vec<ParamId>), U::Error>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        U: UpdateShards<B>,
    {
        let settings = format!("{:?}", self.settings);
        let agreed = group.agree_equal("settings", &settings);
        agreed.map_err(ZeroError::from)?;
        self.check_free::<B, M>(&module, &**group)?;
        // Before the move to the device, so that parameters which are to be in host memory are
        // never all on it.
        module = self.placed::<B, M>(module, group, Some(device))?;
        if group.world_size() > 1 {
            // Before the move to the device: that moves a running statistic in all clones of the
            // model.
            module = independent_if_shared::<B, M>(module);
        }
        let module = Box::new(module.fork(device));
        show(&module, inner)?;
        let (module, ids) = self.prepare_on::<B, M, U>(group.clone(), module, device, inner)?;
        self.cut_state::<B>(&ids, list_param_ids(&*module), device, inner)?;
        Ok((module, ids))
    }
}
