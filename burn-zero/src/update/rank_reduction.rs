//! How an update reduces, which is also a handle to what it has prepared.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn_decorator::gradient;
use burn_decorator::ranks::SharedFn;
use burn_ranks::ProcessGroup;

use super::sharding::Sharding;
use crate::error::ZeroError;
use crate::parameters::Statistics;
use crate::recorder::Recorder;
use crate::settings::ZeroSettings;

/// How an update reduces its gradients, and over which ranks. It stays a handle to what the update
/// has prepared: a [`Recorder`], figures.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use burn::{nn::Linear, optim::AdamWConfig};
/// # use burn_update::{Update, UpdateError};
/// # use burn_zero::{ProcessGroup, RankReduction, ReduceOverRanks, Stage, ZeroSettings};
/// # type B = burn_zero::Sharded<burn::backend::Autodiff<burn_flex::Flex>>;
/// # fn on_a_rank(model: Linear<B>, group: Arc<dyn ProcessGroup>) -> Result<(), UpdateError> {
/// let reduction = RankReduction::new(ZeroSettings::stage(Stage::Gradients), group)?.with_seed(7);
/// let mut update = Update::new(AdamWConfig::new().init()).reduce_by(&reduction)?;
/// let model = update.prepare(model)?;
/// let recorder = reduction.recorder()?;
/// # let _ = (model, recorder);
/// # Ok(())
/// # }
/// ```
///
/// Clones are handles to the same update. A clone of the update has a state of its own, which this
/// handle does not see.
#[derive(Debug)]
pub struct RankReduction {
    pub(super) sharding: Sharding,
    /// Whether an update reduces by it or by a clone of it.
    pub(super) is_used: Arc<AtomicBool>,
}

impl Clone for RankReduction {
    fn clone(&self) -> Self {
        Self {
            sharding: self.sharding.sharing_prepared(),
            is_used: self.is_used.clone(),
        }
    }
}

impl RankReduction {
    /// Over the ranks of `group`. All ranks call it.
    ///
    /// # Errors
    ///
    /// [`RanksError::Disagreement`](crate::RanksError::Disagreement) if the ranks' settings differ;
    /// those of the group.
    pub fn new(settings: ZeroSettings, group: Arc<dyn ProcessGroup>) -> Result<Self, ZeroError> {
        group.agree_equal("settings", &format!("{settings:?}"))?;
        Ok(Self {
            sharding: Sharding::of(Some(group), settings),
            is_used: Arc::default(),
        })
    }

    /// For a Learner, whose strategy brings the ranks:
    /// [`reduce_in_learner`](crate::ReduceOverRanks::reduce_in_learner). Where ranks are threads,
    /// each has a handle of its own: the clone in the rank's copy of the Learner, such as that of a
    /// part of the update; this one is rank 0's.
    pub fn in_learner(settings: ZeroSettings) -> Self {
        Self {
            sharding: Sharding::of(None, settings),
            is_used: Arc::default(),
        }
    }

    /// Refuses a strategy with another number of ranks.
    pub(crate) fn of_ranks(mut self, ranks: usize) -> Self {
        self.sharding.ranks_of_strategy = Some(ranks);
        self
    }

    /// Gives each rank random numbers of its own: what its thread draws on the backend, such as
    /// dropout masks, depends only on this seed, the rank and the number of earlier draws. Without
    /// it ranks that are threads share the generator of the process, and draw in an order that
    /// differs from run to run. With one rank the backend's generator is not changed.
    ///
    /// The backend must be a [`Sharded`](crate::Sharded) one, in every stage. `Backend::seed` on
    /// the rank's thread restarts its numbers with another seed;
    /// [`Update::prepare`](burn_update::Update::prepare) with this one.
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
    /// ([`repeated_block`](burn_decorator::repeated_block)), and one unit has all parameters that
    /// are in none.
    ///
    /// A rank holds two units at most. Larger units need fewer collectives: the choice of wrapped
    /// modules in FSDP2. [`Update::prepare`](burn_update::Update::prepare) compares the units of
    /// all ranks.
    ///
    /// ```
    /// use burn_zero::{RankReduction, Stage, ZeroSettings};
    ///
    /// // Encoder and decoder, each as one unit.
    /// let reduction = RankReduction::in_learner(ZeroSettings::stage(Stage::Parameters))
    ///     .with_units(|path| path.split('.').next().unwrap_or_default().to_owned());
    /// # let _ = reduction;
    /// ```
    #[must_use]
    pub fn with_units(
        mut self,
        unit: impl Fn(&str) -> String + Clone + Send + Sync + 'static,
    ) -> Self {
        self.sharding.unit = Some(SharedFn::new(move |path: String| unit(&path)));
        self
    }

    /// The group.
    ///
    /// # Errors
    ///
    /// [`ShardingFault::NotPrepared`](crate::ShardingFault::NotPrepared) if it is for a Learner,
    /// whose strategy has not brought the ranks yet.
    pub fn group(&self) -> Result<Arc<dyn ProcessGroup>, ZeroError> {
        Ok(self.sharding.shown().group()?)
    }

    /// The settings.
    pub fn settings(&self) -> &ZeroSettings {
        &self.sharding.settings
    }

    /// Saves and loads whole trainings with the update: see [`Recorder`]. Tensors of parts of one's
    /// own are only in records of a Learner
    /// ([`reduce_in_learner`](crate::ReduceOverRanks::reduce_in_learner)): with them saving is
    /// refused.
    ///
    /// # Errors
    ///
    /// [`ShardingFault::NotPrepared`](crate::ShardingFault::NotPrepared).
    pub fn recorder(&self) -> Result<Recorder, ZeroError> {
        let shown = self.sharding.shown();
        shown.reducer()?;
        Ok(Recorder::new(&shown.prepared))
    }

    /// The peak of gradient bytes on this rank since the model was prepared, by the memory tracker:
    /// under stage 2 during backward (its shard and the buckets in transfer), in the other stages
    /// in the step. Gradients in host memory ([`Memory::Host`](crate::Memory::Host)) count too,
    /// sums of an accumulation do not. 0 before the first step.
    ///
    /// To be compared with [`Estimate::peak_gradient_bytes`](crate::Estimate::peak_gradient_bytes),
    /// plus [`host_gradient_bytes`](crate::Estimate::host_gradient_bytes) in host memory.
    pub fn peak_gradient_bytes(&self) -> u64 {
        let reducer = self.sharding.shown().reducer();
        reducer.map_or(0, |reducer| reducer.tracker().peak_bytes())
    }

    /// The norm of the gradient over all parameters and ranks: that of what the step gives the
    /// optimizer. All ranks call it, between backward and the step, because it is a collective.
    ///
    /// For a training loop that measures or clips by itself. The gradients that backward leaves on
    /// a rank are its shards (stages 2 and 3) or those of its own batch (stages 0 and 1), so the
    /// sum of their squares is another number on each rank. Where nothing else needs the norm, clip
    /// in the update: `Update::new(adamw).clip_norm(1.0)?.reduce(..)?`.
    ///
    /// ```
    /// # use burn::{module::{AutodiffModule, Module, ModuleVisitor, Param}, optim::GradientsParams, tensor::{Tensor, backend::AutodiffBackend}};
    /// # use burn_update::{Update, UpdateError};
    /// # use burn_zero::RankReduction;
    /// # struct Scale<'a>(&'a mut GradientsParams, f32);
    /// # impl<B: AutodiffBackend> ModuleVisitor<B> for Scale<'_> {
    /// #     fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
    /// #         if let Some(gradient) = self.0.remove::<B::InnerBackend, D>(param.id) {
    /// #             self.0.register(param.id, gradient * self.1);
    /// #         }
    /// #     }
    /// # }
    /// # fn step<B: AutodiffBackend, M: AutodiffModule<B> + 'static>(reduction: &RankReduction, update: &mut Update<M, B>, model: M, loss: Tensor<B, 1>) -> Result<M, UpdateError> {
    /// let mut gradients = update.backward(&model, loss);
    /// let norm = reduction.global_norm::<B, _>(&model, &gradients)?; // not the sum over this rank's gradients
    /// if norm > 1.0 {
    ///     model.visit(&mut Scale(&mut gradients, 1.0 / norm)); // all ranks by the same factor
    /// }
    /// let model = update.step(1e-3, model, gradients)?;
    /// # Ok(model)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`ShardingFault::NotPrepared`](crate::ShardingFault::NotPrepared);
    /// [`ShardingFault::OtherModel`](crate::ShardingFault::OtherModel) if model and gradients are
    /// not those of the update; those of the group.
    ///
    /// # Cost
    ///
    /// A pass over this rank's shards, a host read, and a collective of one element. In stages 0
    /// and 1 of several ranks a reduction of all gradients more, which the step makes again:
    /// clipping in the update does not.
    pub fn global_norm<B, M>(
        &self,
        module: &M,
        gradients: &GradientsParams,
    ) -> Result<f32, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        gradient::update(|| self.sharding.shown().norm_of::<B, M>(module, gradients))
    }

    /// Gives the model on every rank, and all its clones, the running statistics of rank 0, such as
    /// BatchNorm's, which each rank computes from its own batches. For use before ranks validate
    /// together; PyTorch's `DistributedDataParallel(broadcast_buffers=True)` does it before each
    /// forward. [`Recorder::save`] and the training loop of a Learner do it themselves. All ranks
    /// call it.
    ///
    /// # Errors
    ///
    /// Those of the group; [`ShardingFault::NotPrepared`](crate::ShardingFault::NotPrepared) as
    /// [`group`](Self::group).
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
        Statistics::of::<B, M>(module).share::<B, M>(module, &*self.group()?)
    }
}
