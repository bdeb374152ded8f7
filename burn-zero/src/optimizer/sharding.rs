//! What a rank knows of a model that is sharded over ranks, whatever updates the shards: the
//! wrapped optimizer of a [`ZeroOptimizer`](super::ZeroOptimizer), or the inside of an update.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, Optimizer};
use burn_backend::AutodiffBackend;
use burn_decorator::ranks::SharedFn;
use burn_decorator::repeated_block;
use burn_ranks::{ProcessGroup, ReduceOp};
use parking_lot::Mutex;

use super::parameter_shards::ParameterShards;
use super::prepare::attach_to;
use super::rank_context::RankContext;
use crate::parameters::{ParameterStore, Shard, Units, own_shards};
use crate::recorder::Prepared;
use crate::reduce::{GradientReducer, Layout, Owner};
use crate::trace::trace_waits;
use crate::{Stage, ZeroError, ZeroOptimizerError, ZeroSettings};

/// Updates this rank's shards of the parameters. A clone is independent of it.
pub(super) trait UpdateShards<B: AutodiffBackend>: Clone {
    /// The optimizer, whose record is the state of the shards.
    type Optimizer: Optimizer<ParameterShards<B>, B>;

    /// What a step fails with.
    type Error: From<ZeroError> + From<ZeroOptimizerError>;

    /// What it is told of a step.
    type Step;

    /// Updates the shards. `norm` is that of the gradient over all parameters and ranks, if it is
    /// wanted.
    ///
    /// # Errors
    ///
    /// Why they cannot be updated.
    fn step(
        &mut self,
        step: &mut Self::Step,
        norm: Option<f32>,
        shards: ParameterShards<B>,
        gradients: GradientsParams,
    ) -> Result<ParameterShards<B>, Self::Error>;

    /// A step of a trial, with this learning rate.
    fn trial_step(lr: f64) -> Self::Step;

    /// The learning rate of a step.
    fn lr(step: &Self::Step) -> f64;

    /// Whether a step over so many ranks needs the norm, which costs a collective.
    fn wants_norm(&self, ranks: usize) -> bool;

    /// # Errors
    ///
    /// [`ZeroOptimizerError::LayerInside`].
    fn check_layers(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }

    /// One for each of the optimizers in it, with its name, for trials.
    fn alone(&self) -> Vec<(String, Self)>;

    /// The optimizer.
    fn optimizer(&self) -> &Self::Optimizer;

    /// The optimizer, to load a record.
    fn optimizer_mut(&mut self) -> &mut Self::Optimizer;
}

/// What a rank knows of a sharded model.
#[derive(Debug)]
pub(super) struct Sharding {
    pub(super) group: Arc<dyn ProcessGroup>,
    /// Whether the group is taken from the rank context of the Learner's strategy; until then it
    /// has one rank.
    pub(super) in_learner: bool,
    pub(super) settings: ZeroSettings,
    pub(super) seed: Option<u64>,
    /// The unit of a parameter, by its path.
    pub(super) unit: Option<SharedFn<String, String>>,
    pub(super) reducer: Option<Arc<GradientReducer>>,
    /// Of the reducer.
    pub(super) owner: Option<Arc<Owner>>,
    /// By parameter: the node of a leaf whose shard has not changed since the optimizer updated it
    /// on the host.
    pub(super) leaves: HashMap<usize, u64>,
    /// State that its recorders use too.
    pub(super) prepared: Arc<Mutex<Prepared>>,
}

impl Clone for Sharding {
    fn clone(&self) -> Self {
        Self {
            seed: self.seed,
            unit: self.unit.clone(),
            reducer: self.reducer.clone(),
            owner: self.owner.clone(),
            leaves: self.leaves.clone(),
            prepared: Arc::new(Mutex::new(self.prepared.lock().clone())),
            ..Self::of(self.group.clone(), self.in_learner, self.settings.clone())
        }
    }
}

impl Sharding {
    pub(super) fn of(
        group: Arc<dyn ProcessGroup>,
        in_learner: bool,
        settings: ZeroSettings,
    ) -> Self {
        trace_waits(&*group);
        Self {
            group,
            in_learner,
            settings,
            seed: None,
            unit: None,
            reducer: None,
            owner: None,
            leaves: HashMap::new(),
            prepared: Arc::default(),
        }
    }

    /// A copy that shares what is prepared.
    pub(super) fn sharing_prepared(&self) -> Self {
        Self {
            prepared: self.prepared.clone(),
            ..self.clone()
        }
    }

    /// The unit of a parameter.
    pub(super) fn unit(&self, path: &str) -> String {
        match &self.unit {
            Some(unit) => unit.call(path.to_owned()),
            None => repeated_block(path).to_owned(),
        }
    }

    /// [`ZeroOptimizer::items_of_all_ranks`](super::ZeroOptimizer::items_of_all_ranks).
    pub(super) fn items_of_all_ranks(
        &self,
    ) -> impl Fn(f64) -> Result<f64, ZeroError> + Clone + Send + Sync + use<> + 'static {
        let (own_group, in_learner, reduction) =
            (self.group.clone(), self.in_learner, self.settings.reduction);
        move |own| {
            // In a Learner the ranks are those of the thread that trains.
            let context = RankContext::here().filter(|_| in_learner);
            let group = context
                .as_ref()
                .map_or(&own_group, |context| &context.group);
            items_of_all_ranks(&**group, reduction, own)
        }
    }

    /// The peak of gradient bytes on this rank.
    pub(super) fn peak_gradient_bytes(&self) -> u64 {
        let reducer = self.reducer.as_ref();
        reducer.map_or(0, |reducer| reducer.tracker().peak_bytes())
    }

    /// The error of a step before the model was prepared.
    pub(super) fn unprepared(&self) -> ZeroOptimizerError {
        if self.in_learner {
            ZeroOptimizerError::NoStrategy
        } else {
            ZeroOptimizerError::NotPrepared
        }
    }

    /// # Errors
    ///
    /// [`ZeroOptimizerError::NotPrepared`].
    pub(super) fn layout(&self) -> Result<&Layout, ZeroOptimizerError> {
        let reducer = self.reducer.as_deref();
        Ok(reducer.ok_or(ZeroOptimizerError::NotPrepared)?.layout())
    }

    /// Whether parameters are sharded: gathered unit by unit when they are used.
    pub(super) fn gathers_units(&self, group: &dyn ProcessGroup) -> bool {
        self.settings.stage == Stage::Parameters && group.world_size() > 1
    }

    /// The module with leaves that are gathered from these shards of all ranks, when they are used.
    pub(super) fn shard<B: AutodiffBackend, M: AutodiffModule<B>>(
        &mut self,
        module: Box<M>,
        reducer: &Arc<GradientReducer>,
        units: Arc<Units>,
        own: Vec<Arc<Shard>>,
        on_host: &HashSet<usize>,
        at: &str,
    ) -> Box<M> {
        let shards = ParameterStore::new(reducer.clone(), units, own, format!("after {at}"));
        self.put::<B, M>(module, shards, on_host)
    }

    /// The module with leaves of these shards. Those of `on_host` have not changed since this
    /// rank's optimizer updated them on the host.
    #[expect(clippy::boxed_local, reason = "a model is large by value")]
    pub(super) fn put<B: AutodiffBackend, M: AutodiffModule<B>>(
        &mut self,
        module: Box<M>,
        shards: Arc<ParameterStore>,
        on_host: &HashSet<usize>,
    ) -> Box<M> {
        let module = Box::new(shards.put::<B, M>(*module));
        self.leaves = shards.nodes(on_host);
        self.prepared.lock().shards = Some(shards);
        module
    }

    /// Takes over the parameters that something else has set since the last step, if they are
    /// sharded. All ranks call it.
    pub(super) fn follow<B, M>(&mut self, module: &M)
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let Prepared { reducer, shards } = self.prepared.lock().clone();
        let (Some(reducer), Some(shards)) = (reducer, shards) else {
            return;
        };
        let (known, units) = (shards.own(), shards.units());
        let own = own_shards::<B, M>(Some(&*shards), units, module);
        let is_known = |parameter: usize| Arc::ptr_eq(&own[parameter], &known[parameter]);
        if (0..own.len()).all(is_known) {
            return;
        }
        self.leaves.retain(|parameter, _| is_known(*parameter));
        let at = "changes since the last step".to_owned();
        let shards = ParameterStore::new(reducer, units.clone(), own, at);
        self.prepared.lock().shards = Some(shards);
    }

    /// The module with whole parameters, frozen ones too, in the host memory of rank 0, if they are
    /// sharded. All ranks call it.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(super) fn put_whole_on_rank_0<B, M>(&self, module: Box<M>) -> Result<Box<M>, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let shards = self.prepared.lock().shards.clone();
        match shards {
            None => Ok(module),
            Some(shards) => Ok(Box::new(shards.put_whole_on_rank_0::<B, M>(*module)?)),
        }
    }

    /// The module with the shards of the last step, if parameters are sharded.
    pub(super) fn put_shards_again<B, M>(&mut self, module: Box<M>) -> Box<M>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let shards = self.prepared.lock().shards.clone();
        let (Some(shards), Some(reducer)) = (shards, self.reducer.clone()) else {
            return module;
        };
        let on_host = self.leaves.keys().copied().collect();
        let module = self.put::<B, M>(module, shards, &on_host);
        attach_to::<B, M>(&reducer, &module);
        module
    }
}

/// The number of items that normalizes reduced gradients, from that of this rank. A collective.
///
/// # Errors
///
/// Those of the group.
pub(super) fn items_of_all_ranks(
    group: &dyn ProcessGroup,
    reduction: ReduceOp,
    own: f64,
) -> Result<f64, ZeroError> {
    let all = group.agree_sum("items of a micro-batch", own)?;
    Ok(match reduction {
        ReduceOp::Sum => all,
        ReduceOp::Mean => all / group.world_size() as f64,
    })
}
