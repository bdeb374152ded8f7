//! The wrapper: what it is made of, and what Burn calls.

use core::fmt;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn_backend::Device as _;

use super::gradients::Gradients;
use super::parameter_shards::ParameterShards;
use super::prepare::{Asks, attach_to, prepare};
use super::rank_context::RankContext;
use super::statistics::Statistics;
use super::trial::{self, NormReceiver};
use crate::group::{Agree, ProcessGroup, ReduceOp, SingleRank};
use crate::reduce::GradientReducer;
use crate::{Recorder, ZeroError, ZeroOptimizerError, ZeroSettings, raise};

/// An optimizer that runs on this rank's shard of the parameters, with the gradients of all ranks.
///
/// ```text
/// step(gradients):                            # stage 2: pieces of reduced ones, already
///     stage 0:  gradients = all_reduce(gradients)
///     stage 1:  pieces = reduce_scatter(gradients)
///     inner.step(this rank's pieces)          # stage 0: all
///     parameters = all_gather(pieces)         # stage 0: nothing to do
/// ```
///
/// The wrapped optimizer is any of Burn's: it meets [`ParameterShards`] instead of the module, and keeps the state of those only. With
/// one rank a step is the wrapped optimizer's, bit for bit. A parameter that has a gradient on some ranks takes part with
/// zeros on the others; one that has none on any rank is left alone, as Burn does.
///
/// # Order of layers
///
/// `scaler.wrap(MultiSteps::new(zero, accumulation)?)`, and in `zero` the clipping, and in that the optimizer: a loss scaler
/// and an accumulation decide alike on all ranks, for a gradient that is non-finite on one is so on all. What needs
/// the norm of the gradient over all parameters goes inside and is handed it: [`with_norm`](Self::with_norm).
///
/// ```
/// use std::sync::Arc;
/// use burn::{backend::Autodiff, nn, optim::{AdamWConfig, GradientsParams, Optimizer}, prelude::*};
/// use burn_zero::{GroupOptions, ProcessGroup, Sharded, ZeroSettings, Stage, ThreadGroup, ZeroOptimizer};
///
/// type B = Sharded<Autodiff<burn_flex::Flex>>;
///
/// let weights = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
///     let device = Default::default();
///     let rank = group.rank();
///     let model: nn::Linear<B> = nn::LinearConfig::new(4, 3).init(&device);
///
///     let adam = AdamWConfig::new().init();
///     let mut optimizer = ZeroOptimizer::new(adam, Arc::new(group), ZeroSettings::stage(Stage::Gradients))?;
///     let mut model = optimizer.prepare(model)?; // rank 0's weights
///     for _ in 0..3 {
///         let x = Tensor::<B, 2>::full([8, 4], 1.0 + rank as f32, &device); // each rank has its own data
///         let gradients = GradientsParams::from_grads(model.forward(x).mean().backward(), &model);
///         model = optimizer.step(1e-2, model, gradients);
///     }
///     Ok::<_, burn_zero::ZeroError>(model.weight.val().into_data())
/// })?;
/// assert_eq!(weights[0].as_ref().unwrap(), weights[1].as_ref().unwrap());
/// # Ok::<(), burn_zero::ZeroError>(())
/// ```
///
/// A clone has its own optimizer state and shares the group.
///
/// # Tied parameters
///
/// A parameter that the module holds at several paths, clones of one `Param`, is one parameter: it is sharded once, under its
/// first path, its gradient is the sum over all its uses, and every step returns it as one leaf at all its paths. Burn's own
/// optimizers update the first path only and leave the others behind.
///
/// # What ranks must do alike
///
/// Ranks that differ stop, with a message that shows both sides:
///
/// - in [`new`](Self::new) and [`prepare`](Self::prepare), if sharding, optimizers or models differ. An optimizer's settings are compared by
///   what they make of the same trial tensors: one that makes no difference to 3 steps is not seen;
/// - in the step itself, if its learning rate differs in a single bit: it stands in the labels of the step's collectives;
/// - at the next collective, if one makes another call: it skipped a step after its backward pass, say.
///
/// A rank that leaves out a whole iteration makes the same calls as the others, one batch ahead of them. What it adds is still a gradient
/// of the weights that all have. It is found by its learning rate where that changes with the iteration, by the next call of the
/// loop itself, such as a record, and at the latest at the end, where it leaves a step too early. In a loop that says where it is,
/// `group.declare_settings(&format!("iteration {iteration}"))`, it is found at once, without a further collective. The loop
/// of [`ZeroStrategy`](crate::ZeroStrategy) cannot come apart in this way.
///
/// # Panics
///
/// A step panics with the message of a [`ZeroError`]: those of the group, [`ZeroOptimizerError::NotPrepared`],
/// [`ZeroOptimizerError::OtherModel`], [`ZeroOptimizerError::TiedApart`].
///
/// # Cost
///
/// With `P` parameters and `N` ranks a rank sends `2 P (N - 1) / N` elements a step in every stage; under stage 2 the
/// gradients' half of it once a backward pass. It holds `1 / N` of the optimizer's state in stages 1 and 2, and in stage
/// 2 of the gradients, plus at most three buckets in backward: one that backward fills, one that waits, one that is copied into the
/// buffer that is sent. Gradients and parameters of every backend go through the host's memory, those of a GPU over its bus.
/// [`estimate`](crate::estimate()) has all figures, [`peak_gradient_bytes`](Self::peak_gradient_bytes) what came of it.
///
/// Under MPI a panic that the program does not catch ends the whole job, with its message: see `MpiGroup`.
pub struct ZeroOptimizer<O> {
    pub(super) inner: O,
    pub(super) group: Arc<dyn ProcessGroup>,
    origin: Origin,
    settings: ZeroSettings,
    pub(super) norm: Option<NormReceiver>,
    seed: Option<u64>,
    pub(super) reducer: Option<Arc<GradientReducer>>,
}

/// Who brings the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// Whoever made the optimizer.
    Own,
    /// The strategy of the Learner that the optimizer is in; until then there is one rank.
    Learner,
}

impl<O: Clone> Clone for ZeroOptimizer<O> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            group: self.group.clone(),
            origin: self.origin,
            settings: self.settings.clone(),
            norm: self.norm.clone(),
            seed: self.seed,
            reducer: self.reducer.clone(),
        }
    }
}

impl<O> ZeroOptimizer<O> {
    /// Wraps `inner`, which is the same on all ranks.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Disagreement`] if the ranks' settings differ; those of the group.
    pub fn new(
        inner: O,
        group: Arc<dyn ProcessGroup>,
        settings: ZeroSettings,
    ) -> Result<Self, ZeroError> {
        let optimizer = core::any::type_name::<O>();
        group.agree_equal("settings", &format!("{settings:?} of {optimizer}"))?;
        Ok(Self {
            inner,
            group,
            origin: Origin::Own,
            settings,
            norm: None,
            seed: None,
            reducer: None,
        })
    }

    /// Wraps `inner` for a `Learner` that trains with [`ZeroStrategy`](crate::ZeroStrategy), which brings the ranks and
    /// prepares the model. What cannot be sharded is refused there, before the first step.
    ///
    /// Its record is that of the whole model, as the wrapped optimizer would write it without ranks: it is loaded by
    /// any number of ranks, and by the wrapped optimizer alone.
    pub fn in_learner(inner: O, settings: ZeroSettings) -> Self {
        Self {
            inner,
            group: Arc::new(SingleRank::new()),
            origin: Origin::Learner,
            settings,
            norm: None,
            seed: None,
            reducer: None,
        }
    }

    /// Hands the norm of the gradient over all parameters and ranks to `receive` before each step of the wrapped optimizer.
    ///
    /// For clipping by the global norm: burn-accum's `ClipGlobalNorm` takes it through `clip.norm().provide(value)`.
    /// Costs one pass over this rank's pieces, a host read and a collective of one element.
    #[must_use]
    pub fn with_norm(mut self, receive: impl Fn(f32) + Send + Sync + 'static) -> Self {
        self.norm = Some(Arc::new(receive));
        self
    }

    /// Gives each rank random numbers of its own: what its thread draws on the backend, such as dropout masks, depends only on this
    /// seed, the rank and how often it has drawn. Without it ranks that are threads draw from the one generator of the process, in
    /// an order that differs from run to run. With one rank the backend's generator is used as it is.
    ///
    /// The backend must be a [`Sharded`](crate::Sharded) one, in every stage. `Backend::seed` on the rank's thread restarts its
    /// numbers with another seed; [`prepare`](Self::prepare) with this one.
    ///
    /// Each draw seeds the backend's generator and waits for those of other ranks in the process. That is nothing on Flex; Fusion
    /// executes what it has collected before it is seeded.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Makes of this rank's number of items (tokens) in a micro-batch the number that its reduced gradients count: the sum over
    /// all ranks, or their mean where [`ZeroSettings::reduction`] is the mean.
    ///
    /// For burn-accum's `Normalization::Tokens` where ranks hold different numbers of items:
    /// `MultiSteps::new(zero, config)?.with_items_of_all_ranks(items)`. The update is then the gradient of the sum of all losses of all
    /// ranks and micro-batches, divided by the number of all items. One small collective a call.
    ///
    /// # Panics
    ///
    /// The closure panics with the message of a [`ZeroError`] of the group.
    pub fn items_of_all_ranks(&self) -> impl Fn(f64) -> f64 + Send + Sync + use<O> + 'static {
        let (own_group, origin, reduction) =
            (self.group.clone(), self.origin, self.settings.reduction);
        move |own| {
            // In a Learner the ranks are those of the thread that trains.
            let context = RankContext::here().filter(|_| origin == Origin::Learner);
            let group = context
                .as_ref()
                .map_or(&own_group, |context| &context.group);
            let all = raise(group.agree_sum("items of a micro-batch", own));
            match reduction {
                ReduceOp::Sum => all,
                ReduceOp::Mean => all / group.world_size() as f64,
            }
        }
    }

    /// The wrapped optimizer.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// Gives the wrapped optimizer back, with the state of this rank's shard.
    pub fn into_inner(self) -> O {
        self.inner
    }

    /// The ranks.
    pub fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.group
    }

    /// The settings.
    pub fn settings(&self) -> &ZeroSettings {
        &self.settings
    }

    /// The most bytes of gradients that this rank ever held at once since it got to know the model, as counted where they come and go:
    /// under stage 2 during backward (its shard and the buckets under way), in the other stages whole when they arrive at the step. Those
    /// in host memory ([`Memory::Host`](crate::Memory::Host)) count as those on the device do.
    /// Sums of an accumulation around this optimizer are not among them. 0 before the first step.
    ///
    /// [`Estimate::peak_gradient_bytes`](crate::Estimate::peak_gradient_bytes) is what to expect, and in host memory
    /// [`host_gradient_bytes`](crate::Estimate::host_gradient_bytes) besides.
    pub fn peak_gradient_bytes(&self) -> u64 {
        let reducer = self.reducer.as_ref();
        reducer.map_or(0, |reducer| reducer.tracker().peak_bytes())
    }

    /// Gets to know a model and gives every rank the weights of rank 0: before the first forward, on the thread that
    /// trains, and after its weights were loaded or its parameters frozen. All ranks call it. Tied parameters are one leaf
    /// afterwards, and running statistics, such as BatchNorm's, are shared with no clone of the module that was given.
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::NotElementwise`], [`ZeroOptimizerError::Coupled`], [`ZeroOptimizerError::SharedState`],
    /// [`ZeroOptimizerError::NotSharded`], [`ZeroOptimizerError::SeedNotSharded`], [`ZeroOptimizerError::UnsupportedDtype`];
    /// [`ZeroError::Disagreement`] if the ranks' optimizers or models differ; those of the group.
    ///
    /// # Cost
    ///
    /// A broadcast of all parameters, in which rank 0 sends them about twice, a comparison of all paths and shapes, and three steps of at most eleven clones of the wrapped optimizer with up to eight
    /// elements each: the trial that shows whether it can be sharded exactly, and that all ranks have it with the same settings. A
    /// receiver of the [norm](Self::with_norm) gets that of the trial's gradients in each of them.
    pub fn prepare<B, M>(&mut self, module: M) -> Result<M, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<ParameterShards<B>, B>,
    {
        let device = module.devices().into_iter().next().unwrap_or_default();
        let asks = self.asks::<B>(&*self.group, &device);
        let (module, reducer) = prepare::<B, M>(module, &self.group, asks)?;
        attach_to::<B, M>(&reducer, &module);
        self.reducer = Some(reducer);
        Ok(module)
    }

    /// Gives the model on every rank, and all its clones, the running statistics of rank 0, such as those of BatchNorm, which each rank
    /// makes of its own batches: before ranks validate together, as PyTorch's `DistributedDataParallel(broadcast_buffers=True)` does
    /// before each forward. [`Recorder::save`] and [`ZeroStrategy`](crate::ZeroStrategy) do it themselves. All ranks call it.
    ///
    /// # Errors
    ///
    /// Those of the group.
    ///
    /// # Cost
    ///
    /// One collective, in which rank 0 sends all of them to each other rank; none for a model without. Frozen parameters are
    /// not sent.
    pub fn share_statistics<B, M>(&self, module: &M) -> Result<(), ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        Statistics::of::<B, M>(module).share::<B, M>(module, &*self.group)
    }

    /// Saves and loads whole trainings with this optimizer in them, however it is wrapped: see [`Recorder`].
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::NotPrepared`]: in a `Learner` its own records are what is saved.
    pub fn recorder(&self) -> Result<Recorder, ZeroError> {
        let reducer = self
            .reducer
            .clone()
            .ok_or(ZeroOptimizerError::NotPrepared)?;
        Ok(Recorder::new(reducer, self.settings.clone()))
    }

    /// What it asks of these ranks: it is tried, to see whether it can be sharded among them, and with which settings.
    fn asks<B: AutodiffBackend>(&self, group: &dyn ProcessGroup, device: &B::Device) -> Asks
    where
        O: Optimizer<ParameterShards<B>, B>,
    {
        let (ranks, norm) = (group.world_size(), self.norm.as_ref());
        Asks {
            optimizer: core::any::type_name::<O>(),
            settings: self.settings.clone(),
            seed: self.seed,
            tried: trial::run::<B, O>(&self.inner, &self.settings, ranks, norm, device),
        }
    }

    /// Takes the ranks that a strategy has left on this thread.
    pub(super) fn take_rank_context<B: AutodiffBackend>(
        &mut self,
        device: &B::Device,
    ) -> Result<(), ZeroError>
    where
        O: Optimizer<ParameterShards<B>, B>,
    {
        if self.reducer.is_some() || self.origin == Origin::Own {
            return Ok(());
        }
        let context = RankContext::here().ok_or(ZeroOptimizerError::NoStrategy)?;
        let setting = context.setting().ok_or(ZeroOptimizerError::NoStrategy)?;
        self.group = context.group.clone();
        self.reducer = Some(setting.reducer.clone());
        self.cut_state::<B>(&setting.ids, device)
    }

    /// Says who sits here, if the strategy asks; makes a record of all ranks' states, if they trained.
    fn to_seated_record<B: AutodiffBackend>(
        &self,
        context: &RankContext,
    ) -> Result<O::Record, ZeroError>
    where
        O: Optimizer<ParameterShards<B>, B>,
    {
        let device = B::Device::from_id(context.device);
        match (context.setting(), &self.reducer) {
            (Some(setting), Some(_)) => {
                let _making = context.call()?;
                return self.to_whole_record::<B>(&setting.ids, &device);
            }
            (Some(_), None) => {} // no step was taken: what was loaded is whole
            (None, _) => context.answer(self.asks::<B>(&*context.group, &device)),
        }
        Ok(self.inner.to_record())
    }
}

impl<O, M, B> Optimizer<M, B> for ZeroOptimizer<O>
where
    O: Optimizer<ParameterShards<B>, B>,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    /// That of the wrapped optimizer, of this rank's shard; in a `Learner` that of the whole model, as without ranks.
    type Record = O::Record;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        raise(self.advance(lr, module, Gradients::One(grads)))
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        raise(self.advance(lr, module, Gradients::Multi(grads)))
    }

    fn to_record(&self) -> Self::Record {
        match (self.origin, RankContext::here()) {
            (Origin::Learner, Some(context)) => raise(self.to_seated_record::<B>(&context)),
            _ => self.inner.to_record(),
        }
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        self.inner = self.inner.load_record(record);
        self
    }
}

impl<O: fmt::Debug> fmt::Debug for ZeroOptimizer<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZeroOptimizer")
            .field("inner", &self.inner)
            .field("rank", &self.group.rank())
            .field("world_size", &self.group.world_size())
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
