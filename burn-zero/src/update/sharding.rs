//! What a rank knows of a model that is sharded over ranks.

use std::sync::{Arc, Weak};

use burn::module::{AutodiffModule, ParamId};
use burn_backend::AutodiffBackend;
use burn_decorator::gradient::{decide_with, keep_on_host};
use burn_decorator::ranks::{ForRank, Shared, SharedFn};
use burn_decorator::repeated_block;
use burn_ranks::ProcessGroup;
use parking_lot::Mutex;

use crate::backend::attach;
use crate::error::{ShardingFault, ZeroError};
use crate::parameters::{ParameterStore, Parameters};
use crate::reduce::{GradientReducer, Owner};
use crate::settings::{Memory, Stage, ZeroSettings};
use crate::trace::trace_waits;

/// What a rank knows of a sharded model.
#[derive(Debug)]
pub(super) struct Sharding {
    /// The ranks, if it was made with them: otherwise a Learner's strategy brings them when it
    /// prepares the model.
    own_group: Option<Arc<dyn ProcessGroup>>,
    /// How many ranks the strategy must have, if the update was made for a number of them.
    pub(super) ranks_of_strategy: Option<usize>,
    pub(super) settings: ZeroSettings,
    pub(super) seed: Option<u64>,
    /// The unit of a parameter, by its path.
    pub(super) unit: Option<SharedFn<String, String>>,
    /// Of the [reducer](Self::reducer).
    pub(super) owner: Option<Arc<Owner>>,
    /// The model that was prepared last, which recorders use too.
    pub(super) prepared: Arc<LastPrepared>,
    /// Of a rank of a Learner's strategy, whose update is a copy of the one that was made by the
    /// handle.
    shown: Shared<Shown>,
}

/// The model that an update has prepared last.
pub(crate) type LastPrepared = Mutex<Option<Prepared>>;

/// What the handles of a rank see: what the strategy has prepared on it last.
#[derive(Debug, Default)]
pub(super) struct Shown(Mutex<Option<Arc<LastPrepared>>>);

impl ForRank for Shown {
    fn for_rank(&self) -> Self {
        Self::default()
    }
}

/// A model that was prepared.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    pub(crate) reducer: Arc<GradientReducer>,
    /// Its parameters after the last step.
    pub(crate) store: Arc<ParameterStore>,
}

impl Prepared {
    /// The module with leaves of the store's versions, which this thread hooks from now on. Returns
    /// the ids of its trained parameters too, in their order.
    #[expect(clippy::boxed_local, reason = "a model is large by value")]
    pub(crate) fn put<B, M>(&self, module: Box<M>) -> (Box<M>, Vec<ParamId>)
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let module = Box::new(self.store.put::<B, M>(*module));
        let trained = Parameters::of::<B, M>(&module);
        self.store.note_leaves(&trained.nodes);
        hook(&self.reducer, &trained.nodes);
        (module, trained.ids())
    }
}

/// From now on this thread hooks exactly these leaves of `reducer`, given by their nodes in the
/// order of parameters, and takes collective decisions with its ranks.
pub(crate) fn hook(reducer: &Arc<GradientReducer>, nodes: &[Option<u64>]) {
    if !reducer.is_idle() {
        attach(reducer, nodes);
    }
    let ranks: Weak<GradientReducer> = Arc::downgrade(reducer);
    if reducer.memory == Memory::Host {
        keep_on_host(ranks.clone());
    }
    if reducer.group().world_size() > 1 {
        decide_with(ranks);
    }
}

impl Clone for Sharding {
    fn clone(&self) -> Self {
        Self {
            seed: self.seed,
            unit: self.unit.clone(),
            owner: self.owner.clone(),
            prepared: Arc::new(Mutex::new(self.prepared.lock().clone())),
            shown: self.shown.clone(),
            ranks_of_strategy: self.ranks_of_strategy,
            ..Self::of(self.own_group.clone(), self.settings.clone())
        }
    }
}

impl Sharding {
    /// Over the ranks of a group, or over those of a Learner's strategy.
    pub(super) fn of(group: Option<Arc<dyn ProcessGroup>>, settings: ZeroSettings) -> Self {
        if let Some(group) = &group {
            trace_waits(&**group);
        }
        Self {
            own_group: group,
            ranks_of_strategy: None,
            settings,
            seed: None,
            unit: None,
            owner: None,
            prepared: Arc::default(),
            shown: Shared::default(),
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

    /// The model that was prepared last.
    ///
    /// # Errors
    ///
    /// [`ShardingFault::NotPrepared`].
    pub(super) fn prepared(&self) -> Result<Prepared, ShardingFault> {
        let prepared = self.prepared.lock().clone();
        prepared.ok_or(ShardingFault::NotPrepared)
    }

    /// Its reducer.
    ///
    /// # Errors
    ///
    /// [`ShardingFault::NotPrepared`].
    pub(super) fn reducer(&self) -> Result<Arc<GradientReducer>, ShardingFault> {
        Ok(self.prepared()?.reducer)
    }

    /// Shows the handles of this rank what is prepared here.
    pub(super) fn show(&self) {
        *self.shown.0.lock() = Some(self.prepared.clone());
    }

    /// As a handle sees it.
    pub(super) fn shown(&self) -> Self {
        let shown = self.shown.0.lock().clone();
        Self {
            prepared: shown.unwrap_or_else(|| self.prepared.clone()),
            ..self.clone()
        }
    }

    /// The trained parameters of a module, which are those of the model that was prepared.
    ///
    /// # Errors
    ///
    /// [`ShardingFault::NotPrepared`], [`ShardingFault::OtherModel`].
    pub(super) fn trained<B, M>(&self, module: &M) -> Result<Parameters, ShardingFault>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let trained = Parameters::of::<B, M>(module);
        trained.check_same(self.reducer()?.layout().parameters())?;
        Ok(trained)
    }

    /// Whether a Learner's strategy brings the ranks.
    pub(super) fn is_of_strategy(&self) -> bool {
        self.own_group.is_none()
    }

    /// The ranks.
    ///
    /// # Errors
    ///
    /// [`ShardingFault::NotPrepared`], if a strategy has not brought them yet.
    pub(super) fn group(&self) -> Result<Arc<dyn ProcessGroup>, ShardingFault> {
        match &self.own_group {
            Some(group) => Ok(group.clone()),
            None => Ok(self.reducer()?.shared_group().clone()),
        }
    }

    /// Whether parameters are sharded: gathered unit by unit when they are used.
    pub(super) fn gathers_units(&self, group: &dyn ProcessGroup) -> bool {
        self.settings.stage == Stage::Parameters && group.world_size() > 1
    }

    /// The module with leaves of the store's versions, hooked on this thread. Returns the ids of
    /// its trained parameters too, in their order.
    pub(super) fn hold<B, M>(&self, prepared: Prepared, module: Box<M>) -> (Box<M>, Vec<ParamId>)
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let held = prepared.put::<B, M>(module);
        *self.prepared.lock() = Some(prepared);
        held
    }

    /// Whether the model that was prepared has its parameters in shards.
    pub(super) fn has_shards(&self) -> bool {
        let prepared = self.prepared();
        prepared.is_ok_and(|prepared| prepared.store.shards().is_some())
    }

    /// The model as rank 0 uses it alone, with what something else has set since the last step. If
    /// its parameters are in shards, its [trained](Self::trained) ones were checked. All ranks call
    /// it.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(super) fn put_whole_on_rank_0<B, M>(&self, module: Box<M>) -> Result<Box<M>, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let Some(mut prepared) = self.prepared.lock().clone() else {
            return Ok(module);
        };
        if let Some(changed) = prepared.store.changed::<B, M>(&module) {
            prepared.store = changed;
            *self.prepared.lock() = Some(prepared.clone());
        }
        let whole = prepared.store.put_whole_on_rank_0::<B, M>(*module)?;
        Ok(Box::new(whole))
    }

    /// The module with the parameters of the last step, after rank 0 has used it alone.
    pub(super) fn put_again<B, M>(&self, module: Box<M>) -> Box<M>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let prepared = self.prepared.lock().clone();
        match prepared {
            Some(prepared) => prepared.put::<B, M>(module).0,
            None => module,
        }
    }
}
