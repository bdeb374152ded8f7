//! What a rank knows of a model that is sharded over ranks.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn_backend::AutodiffBackend;
use burn_decorator::ranks::SharedFn;
use burn_decorator::repeated_block;
use burn_ranks::ProcessGroup;
use parking_lot::Mutex;

use super::prepare::attach_to;
use crate::parameters::{ParameterStore, Shard, Units, own_shards};
use crate::recorder::Prepared;
use crate::reduce::{GradientReducer, Owner};
use crate::trace::trace_waits;
use crate::{ShardingError, Stage, ZeroError, ZeroSettings};

/// What a rank knows of a sharded model.
#[derive(Debug)]
pub(super) struct Sharding {
    pub(super) group: Arc<dyn ProcessGroup>,
    pub(super) settings: ZeroSettings,
    pub(super) seed: Option<u64>,
    /// The unit of a parameter, by its path.
    pub(super) unit: Option<SharedFn<String, String>>,
    /// Of the [reducer](Self::reducer).
    pub(super) owner: Option<Arc<Owner>>,
    /// By parameter: the node of a leaf whose shard has not changed since the optimizer updated it
    /// on the host.
    pub(super) leaves: HashMap<usize, u64>,
    /// What was prepared last, which its recorders use too.
    pub(super) prepared: Arc<Mutex<Prepared>>,
}

impl Clone for Sharding {
    fn clone(&self) -> Self {
        Self {
            seed: self.seed,
            unit: self.unit.clone(),
            owner: self.owner.clone(),
            leaves: self.leaves.clone(),
            prepared: Arc::new(Mutex::new(self.prepared.lock().clone())),
            ..Self::of(self.group.clone(), self.settings.clone())
        }
    }
}

impl Sharding {
    pub(super) fn of(group: Arc<dyn ProcessGroup>, settings: ZeroSettings) -> Self {
        trace_waits(&*group);
        Self {
            group,
            settings,
            seed: None,
            unit: None,
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

    /// The reducer of the model that was prepared last.
    ///
    /// # Errors
    ///
    /// [`ShardingError::NotPrepared`].
    pub(super) fn reducer(&self) -> Result<Arc<GradientReducer>, ShardingError> {
        let reducer = self.prepared.lock().reducer.clone();
        reducer.ok_or(ShardingError::NotPrepared)
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
        let Prepared { reducer, shards } = self.prepared.lock().clone();
        let (Some(reducer), Some(shards)) = (reducer, shards) else {
            return module;
        };
        let on_host = self.leaves.keys().copied().collect();
        let module = self.put::<B, M>(module, shards, &on_host);
        attach_to::<B, M>(&reducer, &module);
        module
    }
}
