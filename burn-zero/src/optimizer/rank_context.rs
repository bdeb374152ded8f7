//! The connection between a strategy and the [`ZeroOptimizer`] inside its Learner: a context on the thread that trains.
//!
//! A Learner does not expose its optimizer, nor do wrappers. But a thread is a rank, and both strategy and optimizer run on it. The
//! strategy sets a [`RankContext`] for the thread and sends [`Message::Ranks`]; the optimizer does what the context asks for.

use std::cell::RefCell;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock};
use std::thread;

use burn::module::{AutodiffModule, ParamId};
use burn::optim::Optimizer;
use burn::tensor::backend::{AutodiffBackend, DeviceId};
use burn_backend::Device as _;
use burn_decorator::message::{self, Message};
use parking_lot::Mutex;

use super::parameter_shards::ParameterShards;
use super::statistics::independent_if_shared;
use super::zero_optimizer::ZeroOptimizer;
use crate::ZeroError;
use crate::group::{Agree, ProcessGroup, round};

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
    /// What the strategy asks of the optimizer.
    asked: Mutex<Option<Ask>>,
    /// One of each optimizer that was reached.
    answers: Mutex<Vec<Result<(), ZeroError>>>,
    /// On rank 0: whether the others wait for a record. Of its threads only the one that holds the lock makes collectives.
    others_wait: Mutex<bool>,
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
        CONTEXT.set(self.0.take());
    }
}

impl RankContext {
    pub(crate) fn new(group: Arc<dyn ProcessGroup>, device: DeviceId) -> Arc<Self> {
        Arc::new(Self {
            group,
            device,
            ids: OnceLock::new(),
            asked: Mutex::default(),
            answers: Mutex::default(),
            others_wait: Mutex::default(),
        })
    }

    /// The context of this thread, if a strategy trains on it.
    pub(crate) fn here() -> Option<Arc<Self>> {
        CONTEXT.with_borrow(Clone::clone)
    }

    pub(crate) fn put_on_thread(self: &Arc<Self>) -> OnThread {
        OnThread(CONTEXT.replace(Some(self.clone())))
    }

    /// Lets the optimizer that `step`, a step without gradients, reaches take its group. That step returns the model on the rank's device,
    /// with the weights of rank 0, and with leaves and running statistics of its own. All ranks call it.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Strategy`] unless it reaches one; those of [`ZeroOptimizer::prepare`].
    pub(crate) fn prepare(&self, optimizer: &str, step: impl FnOnce()) -> Result<(), ZeroError> {
        match self.ask(Ask::Prepare, step)? {
            1 => Ok(()),
            found => Err(ZeroError::Strategy(format!(
                "ZeroStrategy trains a Learner with one `ZeroOptimizer::in_learner(optimizer, settings)`, alone or inside of other \
                 wrappers, but {optimizer} has {found} of them"
            ))),
        }
    }

    fn ids(&self) -> &[ParamId] {
        self.ids.get().map_or(&[], Vec::as_slice)
    }

    /// Runs `step` with this request, and returns how many optimizers have answered.
    fn ask(&self, what: Ask, step: impl FnOnce()) -> Result<usize, ZeroError> {
        *self.asked.lock() = Some(what);
        message::send(Message::Ranks, step);
        *self.asked.lock() = None;
        let answers = core::mem::take(&mut *self.answers.lock());
        let found = answers.len();
        answers.into_iter().collect::<Result<(), _>>()?;
        Ok(found)
    }

    /// On rank 0: runs `write`, in which Burn may make a record. The other ranks, in [`take_part`](Self::take_part), send their parts and
    /// wait until `write` returns, however long that takes: a thread tells them regularly that rank 0 is at work.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn lead_record(&self, write: impl FnOnce()) -> Result<(), ZeroError> {
        if self.group.world_size() == 1 {
            write();
            return Ok(());
        }
        *self.others_wait.lock() = true;
        thread::scope(|scope| {
            // Dropped at the end of `write`, also by a panic.
            let (ends, ended) = channel();
            let telling = thread::Builder::new()
                .name("rank 0, at work".to_owned())
                .spawn_scoped(scope, || self.tell_others(ended))
                .expect("the system starts a thread");
            write();
            drop(ends);
            telling.join().expect("it only calls the group")
        })?;
        *self.others_wait.lock() = false;
        self.tell(RecordStatus::Done).map(drop)
    }

    fn tell_others(&self, ended: Receiver<()>) -> Result<(), ZeroError> {
        let round = round(self.group.deadline());
        while ended.recv_timeout(round) == Err(RecvTimeoutError::Timeout) {
            let _only_this_thread = self.others_wait.lock();
            self.tell(RecordStatus::Working)?;
        }
        Ok(())
    }

    /// On the other ranks: sends this rank's part of each record that rank 0 makes, until `write` has returned there. `step` reaches the
    /// optimizer.
    ///
    /// # Errors
    ///
    /// Those of the group, and of a record.
    pub(crate) fn take_part(&self, mut step: impl FnMut()) -> Result<(), ZeroError> {
        loop {
            match self.tell(RecordStatus::Working)? {
                RecordStatus::Done => return Ok(()),
                RecordStatus::Record => self.ask(Ask::Record, &mut step).map(drop)?,
                RecordStatus::Working => {}
            }
        }
    }

    /// A collective that returns rank 0's status.
    fn tell(&self, own: RecordStatus) -> Result<RecordStatus, ZeroError> {
        let label = "whether rank 0 makes a record";
        let told = self.group.gather_bytes(label, vec![own as u8])?;
        use RecordStatus::{Done, Record, Working};
        Ok([Done, Record, Working][usize::from(told[0][0])])
    }
}

/// What rank 0 does while the others wait for a record.
#[derive(Clone, Copy)]
enum RecordStatus {
    /// It has written what there was to write.
    Done,
    /// It makes a record, in which all ranks take part.
    Record,
    /// Something else, such as writing.
    Working,
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
        let context = RankContext::here().filter(|_| self.in_learner);
        let (Some(Message::Ranks), Some(context)) = (message::received(), context) else {
            return module;
        };
        let what = *context.asked.lock();
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
        let (module, answer) = match done {
            Ok(module) => (module, Ok(())),
            Err(error) => (before, Err(error)),
        };
        context.answers.lock().push(answer);
        module
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
        let others_wait = context.others_wait.lock();
        if *others_wait {
            context.tell(RecordStatus::Record)?;
        }
        self.to_whole_record::<B>(context.ids(), &B::Device::from_id(context.device))
    }
}
