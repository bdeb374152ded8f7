//! The reduction over ranks as a part of a [`burn_update::Update`].

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::module::{AutodiffModule, Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Device, Tensor};
use burn_backend::Device as _;
use burn_decorator::gauge::Gauge;
use burn_decorator::gradient;
use burn_decorator::ranks::SharedFn;
use burn_ranks::{ProcessGroup, ReduceOp, SingleRank};
use burn_update::{
    LastParts, LoopRequest, Optimize, Parameter, PartState, Ranks, Stateful, Step, StepOutcome,
    Update, UpdateError, UpdateRecord,
};

use super::parameter_shards::{ParameterShards, shard_id};
use super::parameters::Parameters;
use super::sharding::{Sharding, UpdateShards, items_of_all_ranks};
use super::statistics::Statistics;
use crate::reduce::GradientReducer;
use crate::stack::with_stack;
use crate::state::to_record;
use crate::trace::trace_waits;
use crate::{Recorder, ZeroError, ZeroOptimizerError, ZeroSettings};

/// The name of a reduction in errors.
const REDUCE: &str = "reduce";

/// What comes after a reduction, in errors.
const AFTER: &str = ".reduce(..)";

const ONE_EACH: &str =
    "make a `RankReduction` for each update: this one holds what another update has prepared";

const NO_STRATEGY: &str = "the update reduces in a Learner (`reduce_in_learner`), whose strategy brings the ranks and prepares the model: \
                           pass `update.strategy().threads(n).into()` or `update.strategy().process(group).into()` to \
                           `with_training_strategy`; in a loop of your own use `.reduce(settings, group)`";

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
/// Clipping and optimizer, or `Groups` of them, are of the update that is reduced; accumulation,
/// loss scale and parts of one's own are added after it. Another order is
/// [`UpdateError::Order`]. [`ZeroOptimizer`](crate::ZeroOptimizer) says what must be the same on all
/// ranks, and what a step costs.
///
/// Parts of one's own see gradients before they are reduced: at stages 0 and 1 those of this rank's
/// batch, at 2 and 3 this rank's shards. An average of the weights is whole on each rank.
pub trait ReduceOverRanks<B: AutodiffBackend>: Sized {
    /// An update over the ranks of `group`. [`Update::prepare`] gives them rank 0's weights. All
    /// ranks call it.
    ///
    /// # Errors
    ///
    /// [`UpdateError::Order`] if the update has a scale, an accumulation, an average, a part of
    /// one's own or a reduction already; if the ranks' settings differ; those of the group.
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
            is_of_strategy: reduction.is_of_strategy,
            ranks: reduction.ranks,
            inside: Inside {
                parts: self.into_last_parts(AFTER)?,
            },
            trained: HashMap::new(),
            whole: None,
        }))
    }
}

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
    sharding: Sharding,
    /// Whether a Learner's strategy brings the ranks.
    is_of_strategy: bool,
    /// How many the strategy must have, where the update was made for a number of them.
    ranks: Option<usize>,
    /// Whether an update reduces by it or by a clone of it.
    is_used: Arc<AtomicBool>,
}

impl Clone for RankReduction {
    fn clone(&self) -> Self {
        Self {
            sharding: self.sharding.sharing_prepared(),
            is_of_strategy: self.is_of_strategy,
            ranks: self.ranks,
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
            sharding: Sharding::of(group, false, settings),
            is_of_strategy: false,
            ranks: None,
            is_used: Arc::default(),
        })
    }

    /// For a Learner, whose strategy brings the ranks:
    /// [`reduce_in_learner`](ReduceOverRanks::reduce_in_learner).
    pub fn in_learner(settings: ZeroSettings) -> Self {
        Self {
            sharding: Sharding::of(Arc::new(SingleRank::new()), false, settings),
            is_of_strategy: true,
            ranks: None,
            is_used: Arc::default(),
        }
    }

    /// Refuses a strategy with another number of ranks.
    pub(crate) fn of_ranks(mut self, ranks: usize) -> Self {
        self.ranks = Some(ranks);
        self
    }

    /// Gives each rank random numbers of its own:
    /// [`ZeroOptimizer::with_seed`](crate::ZeroOptimizer::with_seed).
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.sharding.seed = Some(seed);
        self
    }

    /// Chooses the units of stage 3:
    /// [`ZeroOptimizer::with_units`](crate::ZeroOptimizer::with_units).
    #[must_use]
    pub fn with_units(
        mut self,
        unit: impl Fn(&str) -> String + Clone + Send + Sync + 'static,
    ) -> Self {
        self.sharding.unit = Some(SharedFn::new(move |path: String| unit(&path)));
        self
    }

    /// The group.
    pub fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.sharding.group
    }

    /// The settings.
    pub fn settings(&self) -> &ZeroSettings {
        &self.sharding.settings
    }

    /// Saves and loads whole trainings with the update: see [`Recorder`]. An average of the weights,
    /// or another part's tensors, are only in records of a Learner
    /// ([`reduce_in_learner`](ReduceOverRanks::reduce_in_learner)): with them saving is refused.
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::NotPrepared`].
    pub fn recorder(&self) -> Result<Recorder, ZeroError> {
        self.reducer()?;
        Ok(Recorder::new(&self.sharding.prepared))
    }

    /// The peak of gradient bytes on this rank since the model was prepared:
    /// [`ZeroOptimizer::peak_gradient_bytes`](crate::ZeroOptimizer::peak_gradient_bytes).
    pub fn peak_gradient_bytes(&self) -> u64 {
        let reducer = self.reducer();
        reducer.map_or(0, |reducer| reducer.tracker().peak_bytes())
    }

    /// The norm of the gradient over all parameters and ranks, between backward and the step:
    /// [`ZeroOptimizer::global_norm`](crate::ZeroOptimizer::global_norm).
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::NotPrepared`]; [`ZeroOptimizerError::OtherModel`] if model and
    /// gradients are not those of the update; those of the group.
    pub fn global_norm<B, M>(
        &self,
        module: &M,
        gradients: &GradientsParams,
    ) -> Result<f32, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let mut sharding = self.sharding.sharing_prepared();
        sharding.reducer = Some(self.reducer()?);
        gradient::update(|| sharding.norm_of::<B, M>(module, gradients))
    }

    /// Gives the model on every rank the running statistics of rank 0:
    /// [`ZeroOptimizer::share_statistics`](crate::ZeroOptimizer::share_statistics).
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub fn share_statistics<B, M>(&self, module: &M) -> Result<(), ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        Statistics::of::<B, M>(module).share::<B, M>(module, &*self.sharding.group)
    }

    fn reducer(&self) -> Result<Arc<GradientReducer>, ZeroOptimizerError> {
        let reducer = self.sharding.prepared.lock().reducer.clone();
        reducer.ok_or(ZeroOptimizerError::NotPrepared)
    }
}

/// A reduction over ranks as the last part of an update: it reduces, runs the update inside of it
/// on this rank's shards, and publishes.
#[derive(Clone)]
struct ReducedUpdate<B: AutodiffBackend> {
    sharding: Sharding,
    /// Whether a Learner's strategy brings the ranks.
    is_of_strategy: bool,
    /// How many it must have.
    ranks: Option<usize>,
    inside: Inside<B>,
    /// The ids of the model's trained parameters, by those of their shards.
    trained: HashMap<ParamId, ParamId>,
    /// On rank 0, while a Learner has a record written: the state of all ranks.
    whole: Option<PartState>,
}

impl<B: AutodiffBackend> Stateful<B> for ReducedUpdate<B> {
    fn name(&self) -> String {
        self.inside.parts.name()
    }

    fn gauges(&self) -> Vec<Gauge> {
        self.inside.parts.gauges()
    }

    /// That of this rank's shards; of all ranks while a Learner has a record written.
    fn save(&self) -> Option<PartState> {
        self.whole.clone().or_else(|| self.inside.parts.save())
    }

    fn load(&mut self, state: PartState, device: &Device<B>) -> Result<(), UpdateError> {
        self.inside.parts.load(state, device)
    }
}

impl<M, B> Optimize<M, B> for ReducedUpdate<B>
where
    M: AutodiffModule<B> + 'static,
    B: AutodiffBackend,
{
    /// The model with rank 0's weights, hooked on this thread.
    fn prepare(&mut self, model: M, _: &[Parameter]) -> Result<M, UpdateError> {
        if self.is_of_strategy {
            return Err(UpdateError::Strategy(NO_STRATEGY.to_owned()));
        }
        // In a box, because a model of many small parameters is large by value.
        let model = Box::new(model);
        let (sharding, inside) = (&mut self.sharding, &mut self.inside);
        let trained = &mut self.trained;
        let show = |model: &M, inside: &mut _| show_model(model, inside, trained);
        let prepared = with_stack(|| sharding.prepare::<B, M, _>(model, inside, show));
        Ok(*prepared?)
    }

    fn frozen(&self) -> Vec<ParamId> {
        let shards = self.inside.parts.frozen().into_iter();
        let trained = shards.filter_map(|shard| self.trained.get(&shard).copied());
        trained.collect()
    }

    fn reduces(&self) -> bool {
        true
    }

    fn ranks(&self) -> Option<Arc<dyn Ranks>> {
        let reducer = self.sharding.reducer.clone()?;
        let ranks = reducer.group().world_size();
        let reduction = self.sharding.settings.reduction;
        (ranks > 1).then(|| Arc::new(RanksOfReducer { reducer, reduction }) as Arc<dyn Ranks>)
    }

    fn gathers_parameters(&self) -> bool {
        self.sharding.prepared.lock().shards.is_some()
    }

    fn serve(&mut self, request: &LoopRequest, model: M) -> Result<M, UpdateError> {
        let model = Box::new(model);
        Ok(*with_stack(|| self.serve_boxed(request, model))?)
    }

    fn update(
        &mut self,
        step: &mut Step<B::InnerBackend>,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M, UpdateError> {
        let model = Box::new(model);
        let is_scaled = step.is_scaled;
        let mut left_out = Vec::new();
        let (sharding, inside) = (&mut self.sharding, &mut self.inside);
        let gradients = gradients.into();
        let mut of_shards = step.clone();
        let updated = with_stack(|| {
            // The update's own scale, or a loss scaler around the update.
            let on_overflow = |names: Vec<String>| {
                let skips = is_scaled || gradient::report_overflow(names.clone());
                if skips {
                    left_out = names;
                }
                skips
            };
            sharding.advance::<B, M, _>(model, gradients, inside, &mut of_shards, on_overflow)
        });
        let model = *updated?;
        step.norm = of_shards.norm;
        if !left_out.is_empty() {
            step.overflowed = left_out;
            step.outcome = StepOutcome::Waits;
        }
        Ok(model)
    }
}

impl<B: AutodiffBackend> ReducedUpdate<B> {
    /// [`Optimize::serve`], of a model that is large by value.
    fn serve_boxed<M: AutodiffModule<B>>(
        &mut self,
        request: &LoopRequest,
        model: Box<M>,
    ) -> Result<Box<M>, UpdateError> {
        let (sharding, inside) = (&mut self.sharding, &mut self.inside);
        match request {
            LoopRequest::Prepare { group, device } => {
                let found = group.world_size();
                if let Some(ranks) = self.ranks.filter(|ranks| *ranks != found) {
                    return Err(UpdateError::Strategy(other_ranks(ranks, found)));
                }
                let device = B::Device::from_id(*device);
                trace_waits(&**group);
                let trained = &mut self.trained;
                let show = |model: &M, inside: &mut _| show_model(model, inside, trained);
                let taken = sharding.take_ranks::<B, M, _>(group, &device, model, inside, show);
                let (model, _) = taken?;
                Ok(model)
            }
            LoopRequest::ShareStatistics => {
                Statistics::of::<B, M>(&model).share::<B, M>(&model, &*sharding.group)?;
                Ok(model)
            }
            LoopRequest::BeginRecord => {
                let ids = Parameters::of::<B, M>(&model).ids();
                let model = whole_on_rank_0::<B, M>(sharding, model)?;
                let tree = sharding.gather_whole::<B>(&ids, inside)?;
                self.whole = match tree {
                    Some(tree) => {
                        let device = model.devices().into_iter().next().unwrap_or_default();
                        let record = to_record::<B, UpdateRecord<B>>(tree, &device)?;
                        inside.parts.state_in(record)?
                    }
                    None => None,
                };
                Ok(model)
            }
            LoopRequest::EndRecord => {
                self.whole = None;
                Ok(sharding.put_shards_again::<B, M>(model))
            }
            LoopRequest::Finish => whole_on_rank_0::<B, M>(sharding, model),
            request => Err(UpdateError::Strategy(format!(
                "burn-update's loop asks {request:?}, which this version of burn-zero does not know: use one version of both"
            ))),
        }
    }
}

/// Why an update for so many ranks cannot train with others.
fn other_ranks(ranks: usize, found: usize) -> String {
    format!(
        "the update is of a DeepSpeed file's batch sizes over {ranks} ranks, but the strategy has {found}: give \
         `from_deepspeed_in_learner` and the strategy one number"
    )
}

/// The model as rank 0 uses it alone. All ranks call it.
fn whole_on_rank_0<B: AutodiffBackend, M: AutodiffModule<B>>(
    sharding: &mut Sharding,
    model: Box<M>,
) -> Result<Box<M>, UpdateError> {
    sharding.follow::<B, M>(&model);
    Ok(sharding.put_whole_on_rank_0::<B, M>(model)?)
}

/// Tells the optimizer inside which parameters the model has, under the ids of their shards.
/// `trained` gets the ids of those that are trained.
fn show_model<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    inside: &mut Inside<B>,
    trained: &mut HashMap<ParamId, ParamId>,
) -> Result<(), UpdateError> {
    let parameters = Parameters::of::<B, M>(model);
    let ids = parameters.ids().into_iter().enumerate();
    *trained = ids.map(|(index, id)| (shard_id(index), id)).collect();
    let mut listed = Parameter::list::<B, M>(model);
    for parameter in &mut listed {
        if let Some(index) = parameters.index.get(&parameter.id) {
            parameter.id = shard_id(*index);
        }
    }
    inside.parts.prepare(nothing(), &listed)
}

/// Clipping and optimizer, on this rank's shards.
#[derive(Clone)]
struct Inside<B: AutodiffBackend> {
    parts: LastParts<ParameterShards<B>, B>,
}

/// A module of no shard.
fn nothing<B: AutodiffBackend>() -> ParameterShards<B> {
    ParameterShards::with_ids([].into_iter())
}

impl<B: AutodiffBackend> UpdateShards<B> for Inside<B> {
    type Optimizer = Update<ParameterShards<B>, B>;
    type Error = UpdateError;
    type Step = Step<B::InnerBackend>;

    fn step(
        &mut self,
        step: &mut Self::Step,
        norm: Option<f32>,
        shards: ParameterShards<B>,
        gradients: GradientsParams,
    ) -> Result<ParameterShards<B>, UpdateError> {
        let device = shards.devices().into_iter().next().unwrap_or_default();
        step.norm = norm.map(|norm| Tensor::from_data([norm], (&device, DType::F32)));
        self.parts.update(step, shards, gradients)
    }

    fn trial_step(lr: f64) -> Self::Step {
        LastParts::<ParameterShards<B>, B>::trial_step(lr)
    }

    fn lr(step: &Self::Step) -> f64 {
        step.lr
    }

    fn wants_norm(&self, ranks: usize) -> bool {
        ranks > 1 && self.parts.wants_norm()
    }

    fn alone(&self) -> Vec<(String, Self)> {
        let each = self.parts.each_alone().into_iter();
        each.map(|(name, parts)| (name, Self { parts })).collect()
    }

    fn optimizer(&self) -> &Self::Optimizer {
        self.parts.as_optimizer()
    }

    fn optimizer_mut(&mut self) -> &mut Self::Optimizer {
        self.parts.as_optimizer_mut()
    }
}

/// The ranks of a reducer, as the parts of an update ask them.
#[derive(Debug)]
struct RanksOfReducer {
    reducer: Arc<GradientReducer>,
    reduction: ReduceOp,
}

impl Ranks for RanksOfReducer {
    fn non_finite_on_any(&self, own: Vec<String>) -> Result<Vec<String>, UpdateError> {
        Ok(self.reducer.non_finite_on_any(own)?)
    }

    fn items(&self, own: f64) -> Result<f64, UpdateError> {
        Ok(items_of_all_ranks(
            self.reducer.group(),
            self.reduction,
            own,
        )?)
    }
}

/// A fault of the group stays one, so that the rank that failed is named.
impl From<ZeroError> for UpdateError {
    fn from(error: ZeroError) -> Self {
        match error {
            ZeroError::Ranks(error) => Self::Ranks(error),
            other => Self::of_part(REDUCE, other),
        }
    }
}

impl From<ZeroOptimizerError> for UpdateError {
    fn from(error: ZeroOptimizerError) -> Self {
        ZeroError::from(error).into()
    }
}
