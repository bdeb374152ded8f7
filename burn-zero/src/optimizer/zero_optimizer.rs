//! The wrapper: its fields, its methods, and the implementation of Burn's `Optimizer`.

use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::optim::adaptor::GradAdaptor;
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn_decorator::exact::Exact;
use burn_decorator::ranks::SharedFn;
use burn_decorator::{gradient, message};
use burn_ranks::{ProcessGroup, SingleRank};

use super::parameter_shards::{ParameterShards, ShardOptimizer};
use super::sharding::{Sharding, UpdateShards};
use super::statistics::Statistics;
use crate::stack::with_stack;
use crate::{Recorder, ZeroError, ZeroOptimizerError, ZeroSettings, raise};

/// An optimizer that runs on this rank's shard of the parameters, with the gradients of all ranks.
///
/// ```text
/// step(gradients):                            # stage 2: shards of reduced ones, already
///     stage 0:  gradients = all_reduce(gradients)
///     stage 1:  shards = reduce_scatter(gradients)
///     inner.step(this rank's shards)          # stage 0: all
///     parameters = all_gather(shards)         # stage 0: nothing to do; stage 3: unit by unit, where they are used
/// ```
///
/// The wrapped optimizer is any of Burn's: it steps on [`ParameterShards`](crate::ParameterShards)
/// instead of the module, and keeps the state of those only. With one rank a step is the wrapped
/// optimizer's, bit for bit. A parameter with a gradient on some ranks counts as zero on the
/// others; one without a gradient on any rank is not updated, as in Burn.
///
/// # Order of layers
///
/// `scaler.wrap(MultiSteps::new(zero, accumulation)?)`, with the clipping inside `zero` and the
/// optimizer inside the clipping. A layer that skips a step or drops a micro-batch because a
/// gradient is non-finite on one rank must do so on all: loss scaler and accumulation ask all
/// ranks, in one small collective a decision
/// ([`non_finite_on_any_rank`](burn_decorator::gradient::non_finite_on_any_rank)); a loop that
/// skips by itself uses [`ProcessGroup::agree_any`]. In stages 0 and 1 gradients are reduced after
/// that decision. If one overflows in the reduction, in the sum or in
/// [`communication_dtype`](ZeroSettings::communication_dtype), all ranks skip the step if there is
/// a loss scaler, as in stage 2, and take it otherwise. Loss scaler and accumulation are refused
/// inside of `zero`. A layer that needs the norm of the gradient over all parameters belongs inside
/// and receives it by [`with_norm`](Self::with_norm).
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
/// A parameter that the module holds at several paths, clones of one `Param`, is one parameter: it
/// is sharded once, under its first path, its gradient is the sum over all its uses, and every step
/// returns it as one leaf at all its paths. Burn's own optimizers update the first path only.
///
/// # What must be the same on all ranks
///
/// Ranks that differ stop, with a message that shows both values:
///
/// - in [`new`](Self::new) and [`prepare`](Self::prepare), if settings, optimizers or models
///   differ. An optimizer's settings are compared by 3 steps on the same trial tensors: a setting
///   without effect on these is not compared;
/// - in the step itself, if its learning rate differs in a single bit: it is part of the labels of
///   the step's collectives. At stage 3, where the step gathers nothing, in the next forward;
/// - in backward under stage 2, if a rank has several optimizers, such as those of a GAN, and the
///   ranks' graphs use parameters of different ones: an optimizer reduces in the backward passes
///   whose graph uses any of its parameters. The only optimizer of a rank reduces in all, so there
///   graphs may differ;
/// - at the next collective, if one rank makes another call, for example because it skipped a step
///   after its backward pass.
///
/// A rank that leaves out a whole iteration makes the same calls as the others, one batch ahead;
/// what it adds is still a gradient of the common weights. It is found by its learning rate if that
/// changes with the iteration, and at the latest at the end, where it leaves a step too early. The
/// loop of [`ZeroStrategy`](crate::ZeroStrategy) compares the ranks after every step.
///
/// # Panics
///
/// A step panics with the message of a [`ZeroError`]: those of the group,
/// [`ZeroOptimizerError::NotPrepared`], [`ZeroOptimizerError::OtherModel`].
///
/// # Cost
///
/// With `P` parameters and `N` ranks a rank sends `2 P (N - 1) / N` elements a step in every stage;
/// under stage 2 the gradients' half of it once a backward pass. It holds `1 / N` of the
/// optimizer's state in stages 1 and 2, and in stage 2 of the gradients, plus at most three buckets
/// in backward: one that backward fills, one that waits, one that is copied into the buffer that is
/// sent. Gradients and parameters of every backend go through the host's memory, those of a GPU
/// over its bus. [`estimate`](crate::estimate()) has all figures,
/// [`peak_gradient_bytes`](Self::peak_gradient_bytes) the measured peak.
///
/// Under MPI a panic that the program does not catch ends the whole job, with its message: see
/// `MpiGroup`.
#[derive(Debug)]
pub struct ZeroOptimizer<O> {
    inner: Wrapped<O>,
    pub(super) sharding: Sharding,
}

/// The wrapped optimizer, and what it is told.
#[derive(Clone, Debug)]
struct Wrapped<O> {
    optimizer: O,
    /// The receiver of the norm over all ranks.
    norm: Option<SharedFn<f32, ()>>,
}

impl<B, O> UpdateShards<B> for Wrapped<O>
where
    B: AutodiffBackend,
    O: Optimizer<ParameterShards<B>, B>,
{
    type Optimizer = O;
    type Error = ZeroError;
    type Step = LearningRate;

    fn step(
        &mut self,
        lr: &mut LearningRate,
        norm: Option<f32>,
        shards: ParameterShards<B>,
        gradients: GradientsParams,
    ) -> Result<ParameterShards<B>, ZeroError> {
        if let Some((receive, norm)) = self.norm.as_ref().zip(norm) {
            receive.call(norm);
        }
        Ok(self.optimizer.step(*lr, shards, gradients))
    }

    fn trial_step(lr: LearningRate) -> LearningRate {
        lr
    }

    fn lr(step: &LearningRate) -> LearningRate {
        *step
    }

    fn wants_norm(&self, _: usize) -> bool {
        self.norm.is_some()
    }

    fn check_layers(&mut self) -> Result<(), ZeroError> {
        let nothing = ParameterShards::with_ids([].into_iter());
        let step = || self.optimizer.step(0.0, nothing, GradientsParams::new());
        let (_, inside) = message::describe(step);
        let layer = if inside.loss_scaler {
            "loss scaler"
        } else if inside.accumulation {
            "accumulation"
        } else {
            return Ok(());
        };
        Err(ZeroOptimizerError::LayerInside { layer }.into())
    }

    fn alone(&self) -> Vec<(String, Self)> {
        vec![(core::any::type_name::<O>().to_owned(), self.clone())]
    }

    fn optimizer(&self) -> &O {
        &self.optimizer
    }

    fn optimizer_mut(&mut self) -> &mut O {
        &mut self.optimizer
    }
}

impl<O: Clone> Clone for ZeroOptimizer<O> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            sharding: self.sharding.clone(),
        }
    }
}

impl<O> ZeroOptimizer<O> {
    /// Wraps `inner`, which must be the same on all ranks and work with the
    /// [`ZeroSettings::partition`].
    ///
    /// # Errors
    ///
    /// [`RanksError::Disagreement`](crate::RanksError::Disagreement) if the ranks' settings differ;
    /// those of the group.
    pub fn new(
        inner: O,
        group: Arc<dyn ProcessGroup>,
        settings: ZeroSettings,
    ) -> Result<Self, ZeroError> {
        group.agree_equal("settings", &format!("{settings:?}"))?;
        Ok(Self::of(inner, group, false, settings))
    }

    /// Wraps `inner` for a `Learner` that trains with [`ZeroStrategy`](crate::ZeroStrategy), which
    /// provides the group and prepares the model. A model that cannot be sharded is refused there,
    /// before the first step.
    ///
    /// Its record is that of the whole model, as the wrapped optimizer would write it without
    /// ranks: any number of ranks, and the wrapped optimizer alone, can load it.
    pub fn in_learner(inner: O, settings: ZeroSettings) -> Self {
        Self::of(inner, Arc::new(SingleRank::new()), true, settings)
    }

    fn of(
        inner: O,
        group: Arc<dyn ProcessGroup>,
        in_learner: bool,
        settings: ZeroSettings,
    ) -> Self {
        Self {
            inner: Wrapped {
                optimizer: inner,
                norm: None,
            },
            sharding: Sharding::of(group, in_learner, settings),
        }
    }

    /// Calls `receive` with the norm of the gradient over all parameters and ranks before each step
    /// of the wrapped optimizer.
    ///
    /// For clipping by the global norm: burn-accum's `ClipGlobalNorm` takes it through
    /// `clip.norm().provide(value)`. Costs one pass over this rank's shards, a host read and a
    /// collective of one element.
    #[must_use]
    pub fn with_norm(mut self, receive: impl Fn(f32) + Clone + Send + Sync + 'static) -> Self {
        self.inner.norm = Some(SharedFn::new(receive));
        self
    }

    /// Gives each rank random numbers of its own: what its thread draws on the backend, such as
    /// dropout masks, depends only on this seed, the rank and the number of earlier draws. Without
    /// it ranks that are threads share the generator of the process, and draw in an order that
    /// differs from run to run. With one rank the backend's generator is not changed.
    ///
    /// The backend must be a [`Sharded`](crate::Sharded) one, in every stage. `Backend::seed` on
    /// the rank's thread restarts its numbers with another seed; [`prepare`](Self::prepare) with
    /// this one.
    ///
    /// Each draw seeds the backend's generator and waits for draws of other ranks in the process.
    /// That is cheap on Flex; Fusion executes its queued operations before it is seeded.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.sharding.seed = Some(seed);
        self
    }

    /// Chooses the units of stage 3: parameters for whose paths `unit` returns the same name are
    /// gathered together. Without it a unit is a repeated block, such as `blocks.0`
    /// ([`repeated_block`](burn_decorator::repeated_block)), and one unit has all parameters that are
    /// in none.
    ///
    /// A rank holds two units at most. Larger units need fewer collectives: the choice of wrapped
    /// modules in FSDP2. [`prepare`](Self::prepare) compares the units of all ranks.
    ///
    /// ```
    /// use burn_zero::{Stage, ZeroOptimizer, ZeroSettings};
    ///
    /// # fn wrap<O>(adamw: O) -> ZeroOptimizer<O> {
    /// // Encoder and decoder, each as one unit.
    /// ZeroOptimizer::in_learner(adamw, ZeroSettings::stage(Stage::Parameters))
    ///     .with_units(|path| path.split('.').next().unwrap_or_default().to_owned())
    /// # }
    /// ```
    #[must_use]
    pub fn with_units(
        mut self,
        unit: impl Fn(&str) -> String + Clone + Send + Sync + 'static,
    ) -> Self {
        self.sharding.unit = Some(SharedFn::new(move |path: String| unit(&path)));
        self
    }

    /// A function from this rank's number of items (tokens) in a micro-batch to the number that
    /// normalizes the reduced gradients: the sum over all ranks, or their mean if
    /// [`ZeroSettings::reduction`] is the mean.
    ///
    /// For burn-accum's `Normalization::Tokens` where ranks hold different numbers of items:
    /// `MultiSteps::new(zero, config)?.with_items_of_all_ranks(items)`. The update is then the
    /// gradient of the sum of all losses of all ranks and micro-batches, divided by the number of
    /// all items. One small collective a call.
    ///
    /// # Panics
    ///
    /// The closure panics with the message of a [`ZeroError`] of the group.
    pub fn items_of_all_ranks(
        &self,
    ) -> impl Fn(f64) -> f64 + Clone + Send + Sync + use<O> + 'static {
        let items = self.sharding.items_of_all_ranks();
        move |own| raise(items(own))
    }

    /// The wrapped optimizer.
    pub fn inner(&self) -> &O {
        &self.inner.optimizer
    }

    /// The wrapped optimizer, with the state of this rank's shards.
    pub fn into_inner(self) -> O {
        self.inner.optimizer
    }

    /// The group.
    pub fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.sharding.group
    }

    /// The settings.
    pub fn settings(&self) -> &ZeroSettings {
        &self.sharding.settings
    }

    /// The peak of gradient bytes on this rank since [`prepare`](Self::prepare), by the memory
    /// tracker: under stage 2 during backward (its shard and the buckets in transfer), in the other
    /// stages in the step. Gradients in host memory ([`Memory::Host`](crate::Memory::Host)) count
    /// too, sums of an accumulation around this optimizer do not. 0 before the first step.
    ///
    /// To be compared with [`Estimate::peak_gradient_bytes`](crate::Estimate::peak_gradient_bytes),
    /// plus [`host_gradient_bytes`](crate::Estimate::host_gradient_bytes) in host memory.
    pub fn peak_gradient_bytes(&self) -> u64 {
        self.sharding.peak_gradient_bytes()
    }

    /// Registers a model and gives every rank the weights of rank 0. To be called on the thread
    /// that trains, before the first forward and again after weights were loaded or parameters
    /// frozen; an optimizer that has state of the parameters trained before refuses others. All
    /// ranks call it. Every parameter that is not frozen is a leaf afterwards. Burn 0.21 makes no
    /// leaf of the weight of a layer with `LinearLayout::Col`; it becomes one too, on backends that
    /// expose their nodes (`Autodiff`, [`Sharded`](crate::Sharded)), unless weights were loaded
    /// into the model after its first use and before this, which freezes it. Tied parameters are
    /// one leaf, and running statistics, such as BatchNorm's, are not shared with clones of the
    /// given module.
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::NotShardable`], [`ZeroOptimizerError::LayerInside`],
    /// [`ZeroOptimizerError::NotSharded`], [`ZeroOptimizerError::NoRemat`],
    /// [`ZeroOptimizerError::UnsupportedDtype`], [`ZeroOptimizerError::TooManyDimensions`],
    /// [`ZeroOptimizerError::OtherModel`];
    /// [`RanksError::Disagreement`](crate::RanksError::Disagreement) if the ranks' optimizers or models
    /// differ; those of the group.
    ///
    /// # Cost
    ///
    /// A broadcast of all parameters, in which rank 0 sends them about twice, and at stage 3 a
    /// gather; a comparison of all paths and shapes; and trial steps of clones of the optimizer on
    /// eight elements. A receiver of the [norm](Self::with_norm) is called with the norm of the
    /// trial's gradients too.
    pub fn prepare<B, M>(&mut self, module: M) -> Result<M, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: ShardOptimizer<B>,
    {
        // In a box, because a model of many small parameters is large by value, and many functions
        // pass it on.
        let module = Box::new(module);
        let prepared = with_stack(|| {
            self.sharding
                .prepare::<B, M, _>(module, &mut self.inner, |_, _| Ok(()))
        });
        Ok(*prepared?)
    }

    /// Gives the model on every rank, and all its clones, the running statistics of rank 0, such as
    /// BatchNorm's, which each rank computes from its own batches. For use before ranks validate
    /// together; PyTorch's `DistributedDataParallel(broadcast_buffers=True)` does it before each
    /// forward. [`Recorder::save`] and [`ZeroStrategy`](crate::ZeroStrategy) do it themselves. All
    /// ranks call it.
    ///
    /// # Errors
    ///
    /// Those of the group.
    ///
    /// # Cost
    ///
    /// One collective, in which rank 0 sends them to each other rank; none for a model without
    /// running statistics. Frozen parameters are not sent.
    pub fn share_statistics<B, M>(&self, module: &M) -> Result<(), ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        Statistics::of::<B, M>(module).share::<B, M>(module, &*self.sharding.group)
    }

    /// The norm of the gradient over all parameters and ranks: that of what the step gives the
    /// wrapped optimizer. All ranks call it, between backward and the step, because it is a
    /// collective.
    ///
    /// For a training loop that measures or clips by itself. The gradients that backward leaves on
    /// a rank are its shards (stages 2 and 3) or those of its own batch (stages 0 and 1), so the
    /// sum of their squares is another number on each rank. In a Learner, and where nothing else
    /// needs the norm, clip inside of this optimizer: [`with_norm`](Self::with_norm).
    ///
    /// ```
    /// # use burn::{module::{AutodiffModule, Module, ModuleVisitor, Param}, optim::{GradientsParams, Optimizer}, tensor::{Tensor, backend::AutodiffBackend}};
    /// # use burn_zero::{ParameterShards, ZeroError, ZeroOptimizer, parts::ShardOptimizer};
    /// # struct Scale<'a>(&'a mut GradientsParams, f32);
    /// # impl<B: AutodiffBackend> ModuleVisitor<B> for Scale<'_> {
    /// #     fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
    /// #         if let Some(gradient) = self.0.remove::<B::InnerBackend, D>(param.id) {
    /// #             self.0.register(param.id, gradient * self.1);
    /// #         }
    /// #     }
    /// # }
    /// # fn step<B: AutodiffBackend, M: AutodiffModule<B>, O: ShardOptimizer<B>>(optimizer: &mut ZeroOptimizer<O>, model: M, loss: Tensor<B, 1>) -> Result<M, ZeroError> {
    /// let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
    /// let norm = optimizer.global_norm::<B, _>(&model, &gradients)?; // not the sum over this rank's gradients
    /// if norm > 1.0 {
    ///     model.visit(&mut Scale(&mut gradients, 1.0 / norm)); // all ranks by the same factor
    /// }
    /// let model = optimizer.step(1e-3, model, gradients);
    /// # Ok(model)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::NotPrepared`]; [`ZeroOptimizerError::OtherModel`] if model and
    /// gradients are not those of this optimizer; those of the group.
    ///
    /// # Cost
    ///
    /// A pass over this rank's shards, a host read, and a collective of one element. In stages 0
    /// and 1 of several ranks a reduction of all gradients more, which the step makes again:
    /// clipping inside of this optimizer does not.
    pub fn global_norm<B, M>(
        &self,
        module: &M,
        gradients: &GradientsParams,
    ) -> Result<f32, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        gradient::update(|| self.sharding.norm_of::<B, M>(module, gradients))
    }

    /// Saves and loads whole trainings with this optimizer, in any layers: see [`Recorder`]. It is
    /// for the model that was [prepared](Self::prepare) last, and fails after this optimizer was
    /// dropped.
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::NotPrepared`], also in a `Learner`, which saves records of its own.
    pub fn recorder(&self) -> Result<Recorder, ZeroError> {
        match &self.sharding.reducer {
            Some(_) => Ok(Recorder::new(&self.sharding.prepared)),
            None => Err(ZeroOptimizerError::NotPrepared.into()),
        }
    }

    /// A step. Panics with the message of its error, as Burn's trait allows no other failure.
    fn update_with<B, M>(
        &mut self,
        lr: LearningRate,
        module: Box<M>,
        gradients: GradAdaptor,
    ) -> Box<M>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<ParameterShards<B>, B>,
    {
        let (sharding, inner) = (&mut self.sharding, &mut self.inner);
        // If a loss scaler records an overflow, all ranks skip the step.
        let on_overflow = gradient::report_overflow;
        let step =
            || sharding.advance::<B, M, _>(module, gradients, inner, &mut { lr }, on_overflow);
        raise(gradient::update(|| with_stack(step)))
    }
}

impl<O, M, B> Optimizer<M, B> for ZeroOptimizer<O>
where
    O: ShardOptimizer<B>,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    /// The wrapped optimizer's record, of this rank's shards; in a `Learner` of the whole model, as
    /// without ranks. Never stored in half precision.
    type Record = Exact<O::Record>;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        match message::received() {
            Some(_) => {
                let module = Box::new(module);
                let (sharding, inner) = (&mut self.sharding, &mut self.inner);
                *with_stack(|| sharding.receive::<B, M>(module, inner))
            }
            None => *self.update_with(lr, Box::new(module), grads.into()),
        }
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        *self.update_with(lr, Box::new(module), grads.into())
    }

    fn to_record(&self) -> Self::Record {
        let whole = self.sharding.whole_record::<B, _>();
        whole.unwrap_or_else(|| Exact(self.inner.optimizer.to_record()))
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        self.inner.optimizer = self.inner.optimizer.load_record(record.into_inner());
        self
    }
}
