//! The last part of an update over ranks.

use std::sync::Arc;

use burn::module::{AutodiffModule, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Device;
use burn::tensor::backend::AutodiffBackend;
use burn_backend::Device as _;
use burn_decorator::gauge::Gauge;
use burn_ranks::ReduceOp;
use burn_update::{
    AverageConfig, LoopRequest, Optimize, Parameter, PartState, Ranks, Stateful, Step, UpdateError,
    UpdateRecord,
};

use super::shard_update::ShardUpdate;
use super::sharding::Sharding;
use crate::error::ZeroError;
use crate::parameters::Statistics;
use crate::parameters::module::device_of;
use crate::reduce::GradientReducer;
use crate::stack::with_stack;
use crate::state::to_record;
use crate::trace::trace_waits;

const NO_STRATEGY: &str = "the update reduces in a Learner (`reduce_in_learner`), whose strategy brings the ranks and prepares the model: \
                           pass `update.strategy().threads(n).into()` or `update.strategy().process(group).into()` to \
                           `with_training_strategy`; in a loop of your own use `.reduce(settings, group)`";

/// A reduction over ranks as the last part of an update: it reduces, runs the update inside of it
/// on this rank's shards, and publishes.
#[derive(Clone)]
pub(super) struct ReducedUpdate<B: AutodiffBackend> {
    pub(super) sharding: Sharding,
    pub(super) inside: ShardUpdate<B>,
    /// On rank 0, while a Learner has a record written: the state of all ranks.
    pub(super) whole: Option<PartState>,
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
        if self.sharding.is_of_strategy() {
            return Err(UpdateError::Strategy(NO_STRATEGY.to_owned()));
        }
        // In a box, because a model of many small parameters is large by value.
        let model = Box::new(model);
        let (sharding, inside) = (&mut self.sharding, &mut self.inside);
        let prepared = with_stack(|| sharding.prepare::<B, M>(model, inside));
        Ok(*prepared?)
    }

    fn frozen(&self) -> Vec<ParamId> {
        self.inside.frozen()
    }

    fn reduces(&self) -> bool {
        true
    }

    fn ranks(&self) -> Option<Arc<dyn Ranks>> {
        let reducer = self.sharding.reducer().ok()?;
        let ranks = reducer.group().world_size();
        let reduction = self.sharding.settings.reduction;
        (ranks > 1).then(|| Arc::new(RanksOfReducer { reducer, reduction }) as Arc<dyn Ranks>)
    }

    fn gathers_parameters(&self) -> bool {
        self.sharding.has_shards()
    }

    fn keep_average(&mut self, config: AverageConfig) -> Result<(), UpdateError> {
        self.inside.parts.keep_average(config)
    }

    fn average(&self) -> Option<&dyn Stateful<B>> {
        self.inside.parts.average()
    }

    fn average_mut(&mut self) -> Option<&mut dyn Stateful<B>> {
        self.inside.parts.average_mut()
    }

    fn averaged(&self, model: &M) -> Result<M::InnerModule, UpdateError> {
        let averages = self.inside.parts.averages()?;
        with_stack(|| self.sharding.averaged::<B, M>(model, averages))
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
        let (sharding, inside) = (&mut self.sharding, &mut self.inside);
        let advance = || sharding.advance::<B, M>(model, gradients.into(), inside, step);
        Ok(*with_stack(advance)?)
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
                if let Some(ranks) = sharding.ranks_of_strategy.filter(|ranks| *ranks != found) {
                    return Err(UpdateError::Strategy(other_ranks(ranks, found)));
                }
                let device = B::Device::from_id(*device);
                trace_waits(&**group);
                sharding.take_ranks::<B, M>(group, &device, model, inside)
            }
            LoopRequest::ShareStatistics => {
                let group = sharding.group().map_err(ZeroError::from)?;
                Statistics::of::<B, M>(&model).share::<B, M>(&model, &*group)?;
                Ok(model)
            }
            LoopRequest::BeginRecord => {
                let ids = sharding.trained::<B, M>(&model)?.ids();
                let model = sharding.put_whole_on_rank_0::<B, M>(model)?;
                let tree = sharding.gather_whole::<B>(&ids, inside)?;
                if let Some(tree) = tree {
                    let device = device_of::<B, M>(&model);
                    let mut record = to_record::<B, UpdateRecord<B>>(tree, &device)?;
                    self.whole = inside.parts.state_in(&mut record)?;
                    inside.parts.hold_average_of(&mut record)?;
                }
                Ok(model)
            }
            LoopRequest::EndRecord => {
                self.whole = None;
                inside.parts.release_average();
                Ok(sharding.put_again::<B, M>(model))
            }
            LoopRequest::Finish => {
                if sharding.has_shards() {
                    sharding.trained::<B, M>(&model)?;
                }
                Ok(sharding.put_whole_on_rank_0::<B, M>(model)?)
            }
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
        let group = self.reducer.group();
        let all = group.agree_sum("items of a micro-batch", own)?;
        Ok(match self.reduction {
            ReduceOp::Sum => all,
            ReduceOp::Mean => all / group.world_size() as f64,
        })
    }
}
