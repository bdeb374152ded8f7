//! `.reduce(..)`: the reduction over ranks as a part of a [`burn_update::Update`].

use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn_ranks::ProcessGroup;
use burn_update::{Update, UpdateError};

use super::parameter_shards::ParameterShards;
use super::rank_reduction::RankReduction;
use super::reduced_update::ReducedUpdate;
use super::shard_update::ShardUpdate;
use crate::error::REDUCE;
use crate::settings::ZeroSettings;

/// What comes after a reduction, in errors.
const AFTER: &str = ".reduce(..)";

const ONE_EACH: &str =
    "make a `RankReduction` for each update: this one holds what another update has prepared";

/// `reduce(settings, group)`: an update whose gradients are those of all ranks, and whose optimizer
/// runs on this rank's shard of the parameters.
///
/// ```
/// use std::sync::Arc;
/// use burn::{backend::Autodiff, nn, optim::AdamWConfig, prelude::*};
/// use burn_accum::{AccumConfig, ClipByNorm};
/// use burn_update::Update;
/// use burn_zero::{GroupOptions, ProcessGroup, ReduceOverRanks, Sharded, Stage, ThreadGroup, ZeroSettings};
///
/// type B = Sharded<Autodiff<burn_flex::Flex>>;
///
/// let weights = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
///     let device = Default::default();
///     let rank = group.rank();
///     let mut update = Update::new(AdamWConfig::new().init())
///         .clip_norm(1.0)? // by the norm over all ranks
///         .reduce(ZeroSettings::stage(Stage::Gradients), Arc::new(group))?
///         .accumulate(AccumConfig::mean(2))?;
///     let mut model: nn::Linear<B> = update.prepare(nn::LinearConfig::new(4, 3).init(&device))?;
///     for _ in 0..4 {
///         let x = Tensor::<B, 2>::full([8, 4], 1.0 + rank as f32, &device); // each rank has its own data
///         let gradients = update.backward(&model, model.forward(x).mean());
///         model = update.step(1e-2, model, gradients)?;
///     }
///     assert_eq!(update.updates(), 2);
///     Ok::<_, burn_update::UpdateError>(model.weight.val().into_data())
/// })?;
/// assert_eq!(weights[0].as_ref().unwrap(), weights[1].as_ref().unwrap());
/// # Ok::<(), burn_zero::RanksError>(())
/// ```
///
/// The optimizer is any of Burn's, or `Groups` of several: it steps on
/// [`ParameterShards`](crate::ParameterShards) instead of the module, and keeps the state of those
/// only. With one rank a step is that of the update without a reduction, bit for bit. A parameter
/// with a gradient on some ranks counts as zero on the others; one without a gradient on any rank
/// is not updated, as in Burn.
///
/// ```text
/// step(gradients):                            # stage 2: shards of reduced ones, already
///     stage 0:  gradients = all_reduce(gradients)
///     stage 1:  shards = reduce_scatter(gradients)
///     clip, optimizer(this rank's shards)     # stage 0: all
///     parameters = all_gather(shards)         # stage 0: nothing to do; stage 3: unit by unit, where they are used
/// ```
///
/// # Order of parts
///
/// Clipping and optimizer are of the update that is reduced, and an average may be; accumulation,
/// loss scale and parts of one's own are added after it. Another order is [`UpdateError::Order`].
///
/// A step is skipped, and a micro-batch dropped, on all ranks if on one: loss scale and
/// accumulation ask all ranks, in one small collective a decision; a loop that skips by itself uses
/// [`ProcessGroup::agree_any`]. In stages 0 and 1 gradients are reduced after that decision. If one
/// overflows in the reduction, in the sum or in
/// [`communication_dtype`](ZeroSettings::communication_dtype), all ranks skip the step if there is
/// a loss scale, as in stage 2, and take it otherwise.
///
/// Parts of one's own see gradients before they are reduced: at stages 0 and 1 those of this rank's
/// batch, at 2 and 3 this rank's shards. An average of the weights is of this rank's shards, as the
/// optimizer's state; [`Update::averaged`] gathers it, at stage 3 unit by unit where it is used.
///
/// # Preparing a model
///
/// [`Update::prepare`] registers the model and gives every rank the weights of rank 0. To be called
/// on the thread that trains, before the first forward, and again after weights were loaded or
/// parameters frozen; an update that has state of the parameters trained before refuses others. All
/// ranks call it. Every parameter that is not frozen is a leaf afterwards. Burn 0.21 makes no leaf
/// of the weight of a layer with `LinearLayout::Col`; it becomes one too, on backends that expose
/// their nodes (`Autodiff`, [`Sharded`](crate::Sharded)), unless weights were loaded into the model
/// after its first use and before this, which freezes it. Running statistics, such as BatchNorm's,
/// are not shared with clones of the given module.
///
/// It costs a broadcast of all parameters, in which rank 0 sends them about twice, and at stage 3 a
/// gather; a comparison of all paths and shapes; and trial steps of clones of the optimizer on
/// eight elements.
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
/// - in [`reduce`](Self::reduce) and [`Update::prepare`], if settings, optimizers or models differ.
///   An optimizer's settings are compared by 3 steps on the same trial tensors: a setting without
///   effect on these is not compared;
/// - in the step itself, if its learning rate differs in a single bit: it is part of the labels of
///   the step's collectives. At stage 3, where the step gathers nothing, in the next forward;
/// - in backward under stage 2, if a rank has several updates, such as those of a GAN, and the
///   ranks' graphs use parameters of different ones: an update reduces in the backward passes whose
///   graph uses any of its parameters. The only update of a rank reduces in all, so there graphs
///   may differ;
/// - at the next collective, if one rank makes another call, for example because it skipped a step
///   after its backward pass.
///
/// A rank that leaves out a whole iteration makes the same calls as the others, one batch ahead;
/// what it adds is still a gradient of the common weights. It is found by its learning rate if that
/// changes with the iteration, and at the latest at the end, where it leaves a step too early. The
/// training loop of a Learner compares the ranks after every step.
///
/// # Errors
///
/// Those of a step: of the group, [`NotPrepared`](crate::ShardingFault::NotPrepared),
/// [`OtherModel`](crate::ShardingFault::OtherModel). Of [`Update::prepare`]:
/// [`NotShardable`](crate::ShardingFault::NotShardable),
/// [`NotSharded`](crate::ShardingFault::NotSharded), [`NoRemat`](crate::ShardingFault::NoRemat),
/// [`UnsupportedDtype`](crate::ShardingFault::UnsupportedDtype),
/// [`TooManyDimensions`](crate::ShardingFault::TooManyDimensions),
/// [`SecondUpdate`](crate::ShardingFault::SecondUpdate), `OtherModel`;
/// [`RanksError::Disagreement`](crate::RanksError::Disagreement) if the ranks' optimizers or models
/// differ; those of the group. Under MPI a panic that the program does not catch ends the whole
/// job, with its message: see `MpiGroup`.
///
/// # Cost
///
/// With `P` parameters and `N` ranks a rank sends `2 P (N - 1) / N` elements a step in every stage;
/// under stage 2 the gradients' half of it once a backward pass. It holds `1 / N` of the
/// optimizer's state in stages 1 and 2, and in stage 2 of the gradients, plus at most three buckets
/// in backward: one that backward fills, one that waits, one that is copied into the buffer that is
/// sent. Gradients and parameters of every backend go through the host's memory, those of a GPU
/// over its bus. [`estimate`](crate::estimate()) has all figures,
/// [`RankReduction::peak_gradient_bytes`] the measured peak. Clipping costs one pass over this
/// rank's shards, a host read and a collective of one element.
pub trait ReduceOverRanks<B: AutodiffBackend>: Sized {
    /// An update over the ranks of `group`. [`Update::prepare`] gives them rank 0's weights. All
    /// ranks call it.
    ///
    /// # Errors
    ///
    /// [`UpdateError::Order`] if the update has a scale, an accumulation, a part of one's own or a
    /// reduction already; if the ranks' settings differ; those of the group.
    fn reduce<M: AutodiffModule<B> + 'static>(
        self,
        settings: ZeroSettings,
        group: Arc<dyn ProcessGroup>,
    ) -> Result<Update<M, B>, UpdateError> {
        self.reduce_by(&RankReduction::new(settings, group)?)
    }

    /// An update for a Learner, whose strategy brings the ranks and prepares the model:
    /// [`Update::strategy`], with one rank unless it is told more. Without that strategy a step is
    /// refused.
    ///
    /// ```no_run
    /// # use burn::{backend::Autodiff, module::AutodiffModule, optim::AdamWConfig};
    /// # use burn::lr_scheduler::constant::ConstantLr;
    /// # use burn::train::{InferenceStep, Learner, LearningComponentsMarker, SupervisedTraining, TrainStep};
    /// # use burn_zero::{Sharded, Stage, ZeroSettings};
    /// # use std::fmt::Display;
    /// # type B = Sharded<Autodiff<burn_flex::Flex>>;
    /// # use burn_update::{Update, UpdateError};
    /// # fn train<M>(
    /// #     model: M,
    /// #     training: SupervisedTraining<LearningComponentsMarker<B, ConstantLr, M, Update<M, B>>>,
    /// # ) -> Result<(), UpdateError>
    /// # where
    /// #     M: TrainStep + AutodiffModule<B> + Display + Send + 'static,
    /// #     M::InnerModule: InferenceStep,
    /// # {
    /// use burn_accum::ClipByNorm;
    /// use burn_zero::ReduceOverRanks;
    ///
    /// let update = Update::new(AdamWConfig::new().init())
    ///     .clip_norm(1.0)?
    ///     .reduce_in_learner(ZeroSettings::stage(Stage::Gradients))?;
    /// let strategy = update.strategy().threads(4); // or `.process(group)`, under mpirun and srun
    /// training.with_training_strategy(strategy.into()).launch(Learner::new(model, update, ConstantLr::new(1e-3)));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Records are of the whole model and its optimizer's whole state, written by rank 0, and are
    /// loaded by any number of ranks.
    ///
    /// # Errors
    ///
    /// [`UpdateError::Order`].
    fn reduce_in_learner<M: AutodiffModule<B> + 'static>(
        self,
        settings: ZeroSettings,
    ) -> Result<Update<M, B>, UpdateError> {
        self.reduce_by(&RankReduction::in_learner(settings))
    }

    /// [`reduce`](Self::reduce) by a reduction with further settings, which is also a handle.
    ///
    /// # Errors
    ///
    /// [`UpdateError::Order`].
    fn reduce_by<M: AutodiffModule<B> + 'static>(
        self,
        reduction: &RankReduction,
    ) -> Result<Update<M, B>, UpdateError>;
}

impl<B: AutodiffBackend> ReduceOverRanks<B> for Update<ParameterShards<B>, B> {
    fn reduce_by<M: AutodiffModule<B> + 'static>(
        self,
        reduction: &RankReduction,
    ) -> Result<Update<M, B>, UpdateError> {
        if reduction.is_used.swap(true, Ordering::Relaxed) {
            return Err(UpdateError::Order {
                part: REDUCE.to_owned(),
                instead: ONE_EACH.to_owned(),
            });
        }
        Ok(Update::by(ReducedUpdate {
            sharding: reduction.sharding.sharing_prepared(),
            inside: ShardUpdate::new(self.into_last_parts(AFTER)?),
            whole: None,
        }))
    }
}
