//! The one store of a prepared model's parameters: by path, each with a version, and by leaf, which
//! version that was made of.
//!
//! A version is in the leaf itself (on the device, or in host memory if the parameter is
//! offloaded), or in shards of all ranks, trained or frozen. Each update makes a store of new
//! versions: whether the model still has what an update has left is the question whose version its
//! leaves are.

use core::fmt;
use core::ops::Range;
use std::collections::HashMap;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn_backend::tensor::FloatTensor;
use parking_lot::Mutex;

use super::NewValue;
use super::entries::StoreEntries;
use super::gathers::Gathers;
use super::shard::{Shard, cut};
use super::units::Units;
use super::version::{Maker, ParameterVersion};
use crate::backend::leaf_node;
use crate::error::ZeroError;
use crate::host::read;
use crate::reduce::{GradientReducer, Layout};
use crate::settings::Memory;

/// The parameters of a model, after one step of it.
pub(crate) struct ParameterStore {
    entries: Arc<StoreEntries>,
    /// By parameter.
    versions: Arc<[Arc<ParameterVersion>]>,
    /// The parameters of the leaves that were made of these versions, by node.
    leaves: Mutex<HashMap<u64, usize>>,
    /// `None` where leaves have whole parameters.
    gathers: Option<Arc<Gathers>>,
}

impl ParameterStore {
    /// Of a model whose leaves have its parameters, as `known` has it so far. The optimizer on the
    /// host has just made the leaves of the parameters of `updated`.
    pub(crate) fn of_leaves<B, M>(
        known: Option<&Self>,
        entries: StoreEntries,
        module: &M,
        updated: impl IntoIterator<Item = usize>,
    ) -> Arc<Self>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let mut versions = versions_of::<B, M>(known, &entries, None, module);
        for parameter in updated {
            versions[parameter] = Arc::new(ParameterVersion::in_leaf(Maker::HostOptimizer));
        }
        Self::with(Arc::new(entries), versions.into(), None)
    }

    /// Of a model whose parameters are sharded over the ranks of `reducer`, as `known` has it so
    /// far. All ranks call it. `at` names the step in labels.
    pub(crate) fn of_shards<B, M>(
        known: Option<&Self>,
        entries: StoreEntries,
        units: Units,
        reducer: Arc<GradientReducer>,
        module: &M,
        at: String,
    ) -> Arc<Self>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let memory = Some(units.memory());
        let versions: Arc<[_]> = versions_of::<B, M>(known, &entries, memory, module).into();
        let (layout, units) = (entries.layout().clone(), Arc::new(units));
        let gathers = Gathers::new(layout, units, reducer, versions.clone(), at);
        Self::with(Arc::new(entries), versions, Some(gathers))
    }

    fn with(
        entries: Arc<StoreEntries>,
        versions: Arc<[Arc<ParameterVersion>]>,
        gathers: Option<Gathers>,
    ) -> Arc<Self> {
        Arc::new(Self {
            entries,
            versions,
            leaves: Mutex::default(),
            gathers: gathers.map(Arc::new),
        })
    }

    /// The store after a step, which has made some of these versions. All ranks call it. `at` names
    /// the step in labels.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn after_step(
        &self,
        versions: Vec<Arc<ParameterVersion>>,
        at: String,
    ) -> Result<Arc<Self>, ZeroError> {
        let versions: Arc<[_]> = versions.into();
        let gathers = match &self.gathers {
            Some(gathers) => Some(gathers.after_step(versions.clone(), at)?),
            None => None,
        };
        Ok(Self::with(self.entries.clone(), versions, gathers))
    }

    /// The store with versions that no step has made.
    fn of_others(&self, versions: Vec<Arc<ParameterVersion>>, at: String) -> Arc<Self> {
        let versions: Arc<[_]> = versions.into();
        let before = self.gathers.as_ref();
        let gathers = before.map(|before| before.of_others(versions.clone(), at));
        Self::with(self.entries.clone(), versions, gathers)
    }

    /// Other values beside these, such as averages, if parameters are sharded: this rank's
    /// `shards`, by position, and of other parameters what the module has. All ranks call it.
    pub(crate) fn beside<B, M>(
        &self,
        mut shards: HashMap<usize, Shard>,
        module: &M,
        at: String,
    ) -> Option<Arc<Self>>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let gathers = self.gathers.as_ref()?;
        let mut versions = self.versions_of::<B, M>(module);
        for (parameter, version) in versions.iter_mut().enumerate() {
            if let Some(own) = shards.remove(&parameter) {
                *version = Arc::new(ParameterVersion::sharded(own, Maker::Other));
            }
        }
        let versions: Arc<[_]> = versions.into();
        let gathers = gathers.beside(versions.clone(), at);
        Some(Self::with(self.entries.clone(), versions, Some(gathers)))
    }

    pub(crate) fn entries(&self) -> &StoreEntries {
        &self.entries
    }

    /// The parameters, trained ones and after them frozen ones that are sharded, and this rank's
    /// shards.
    pub(crate) fn layout(&self) -> &Arc<Layout> {
        self.entries.layout()
    }

    /// Where this rank's shards are, if parameters are sharded.
    pub(crate) fn shards(&self) -> Option<Memory> {
        let gathers = self.gathers.as_ref()?;
        Some(gathers.units().memory())
    }

    /// Whether a leaf was made of one of these versions.
    pub(crate) fn has<B: AutodiffBackend>(&self, leaf: &FloatTensor<B>) -> bool {
        self.parameter_of::<B>(leaf).is_some()
    }

    /// The version of the parameter at this path of which a leaf was made.
    pub(crate) fn version_of<B: AutodiffBackend>(
        &self,
        path: &str,
        leaf: &FloatTensor<B>,
    ) -> Option<&ParameterVersion> {
        let parameter = self.parameter_of::<B>(leaf)?;
        let is_there = self.layout().parameters()[parameter].path == path;
        is_there.then(|| &*self.versions[parameter])
    }

    fn parameter_of<B: AutodiffBackend>(&self, leaf: &FloatTensor<B>) -> Option<usize> {
        let node = leaf_node::<B>(leaf)?;
        self.leaves.lock().get(&node).copied()
    }

    /// Notes the leaves of the trained parameters, given by their nodes.
    pub(crate) fn note_leaves(&self, nodes: &[Option<u64>]) {
        let leaves = nodes.iter().zip(0..);
        let known = leaves.filter_map(|(node, parameter)| Some(((*node)?, parameter)));
        self.leaves.lock().extend(known);
    }

    /// The versions that a module has: these, and new ones for leaves that were not made of them.
    /// All ranks call it.
    pub(crate) fn versions_of<B, M>(&self, module: &M) -> Vec<Arc<ParameterVersion>>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        versions_of::<B, M>(Some(self), &self.entries, self.shards(), module)
    }

    /// The store of what a module has, if something else has set any of its parameters since;
    /// `None` if it has these versions. All ranks call it.
    pub(crate) fn changed<B, M>(&self, module: &M) -> Option<Arc<Self>>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let versions = self.versions_of::<B, M>(module);
        let mut pairs = versions.iter().zip(&*self.versions);
        let is_same = pairs.all(|(now, before)| Arc::ptr_eq(now, before));
        (!is_same).then(|| self.of_others(versions, "changes since the last step".to_owned()))
    }

    /// The store of a module into which a record was loaded: of sharded parameters this rank's
    /// shards, by position, of others new leaves.
    pub(crate) fn loaded<B, M>(
        &self,
        mut shards: HashMap<usize, Shard>,
        module: &M,
        at: String,
    ) -> Arc<Self>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        if self.gathers.is_none() {
            return self.of_others(self.versions_of::<B, M>(module), at);
        }
        let versions = (0..self.versions.len()).map(|parameter| {
            let own = shards.remove(&parameter);
            Arc::new(match own {
                Some(own) => ParameterVersion::sharded(own, Maker::Other),
                None => ParameterVersion::gone(),
            })
        });
        self.of_others(versions.collect(), at)
    }

    /// The module with leaves of these versions: where parameters are sharded, new ones, which are
    /// gathered when they are used.
    pub(crate) fn put<B: AutodiffBackend, M: AutodiffModule<B>>(&self, module: M) -> M {
        let Some(gathers) = &self.gathers else {
            return module;
        };
        let mut leaves = self.leaves.lock();
        self.entries.map::<B, M>(module, |parameter, place| {
            let leaf = place.put(gathers.leaf::<B>(parameter, place.device())?);
            leaves.extend(leaf_node::<B>(&leaf).map(|node| (node, parameter)));
            Some(leaf)
        })
    }

    /// The module as rank 0 uses it alone: with whole parameters, in host memory where they are
    /// sharded. The module as it is on others, which hold one unit at a time. All ranks call it.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn put_whole_on_rank_0<B, M>(&self, module: M) -> Result<M, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let Some(gathers) = &self.gathers else {
            return Ok(module);
        };
        let is_rank_0 = self.layout().rank() == 0;
        let mut whole = HashMap::new();
        gathers.all(|unit| {
            if is_rank_0 {
                whole.extend(unit);
            }
        })?;
        Ok(self.entries.map::<B, M>(module, |parameter, place| {
            let value = NewValue::Host(whole.remove(&parameter)?);
            Some(place.alone_on_host().leaf(value))
        }))
    }

    /// The module with the new values of parameters that `take` returns, as leaves in the memory of
    /// those before, or in host memory if `memory` is that. `take` is called in the order of
    /// parameters.
    #[expect(clippy::boxed_local, reason = "a model is large by value")]
    pub(crate) fn replace<B, M>(
        &self,
        module: Box<M>,
        memory: Memory,
        mut take: impl FnMut(usize) -> Option<NewValue<B::InnerBackend>>,
    ) -> Box<M>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let module = self.entries.map::<B, M>(*module, |parameter, place| {
            let value = take(parameter)?;
            Some(match memory {
                Memory::Host => place.on_host().leaf(value),
                Memory::Device => place.leaf(value),
            })
        });
        Box::new(module)
    }

    /// The leaves of a module, by position.
    pub(crate) fn leaves<B, M>(&self, module: &M) -> HashMap<usize, FloatTensor<B>>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        self.entries.leaves::<B, M>(module)
    }
}

impl fmt::Debug for ParameterStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParameterStore")
            .field("shards", &self.shards())
            .finish_non_exhaustive()
    }
}

/// The versions of a module's parameters: those of `known` for leaves that were made of them, if
/// the parameters are at the same path and all ranks hold the same elements of them as there. Other
/// leaves, which have the same values on all ranks, are read if parameters are sharded, in this
/// memory.
fn versions_of<B: AutodiffBackend, M: AutodiffModule<B>>(
    known: Option<&ParameterStore>,
    entries: &StoreEntries,
    shards: Option<Memory>,
    module: &M,
) -> Vec<Arc<ParameterVersion>> {
    let layout = entries.layout();
    let leaves = entries.leaves::<B, M>(module);
    let known = known.map(|known| (known, Cuts::of(known.layout(), layout)));
    let versions = (0..layout.parameters().len()).map(|parameter| {
        let Some(leaf) = leaves.get(&parameter) else {
            return Arc::new(ParameterVersion::gone());
        };
        let of_known = known.as_ref().and_then(|(known, cuts)| {
            let its_parameter = known.parameter_of::<B>(leaf)?;
            let version = &known.versions[its_parameter];
            let path_before = &known.layout().parameters()[its_parameter].path;
            let has_elements = match shards {
                None => version.is_in_leaf(),
                Some(_) => version.shard().is_some() && cuts.are_same(its_parameter, parameter),
            };
            let is_same = has_elements && *path_before == layout.parameters()[parameter].path;
            is_same.then(|| version.clone())
        });
        of_known.unwrap_or_else(|| {
            Arc::new(match shards {
                None => ParameterVersion::in_leaf(Maker::Other),
                Some(memory) => {
                    // The read may be a collective, so a rank without elements of the parameter
                    // makes it too.
                    let whole = read::<B::InnerBackend>(B::inner(leaf.clone()));
                    let own = NewValue::Host(cut(&whole, layout.shard(parameter)));
                    let device = B::float_device(leaf);
                    let own = Shard::new::<B::InnerBackend>(own, memory, &device);
                    ParameterVersion::sharded(own, Maker::Other)
                }
            })
        })
    });
    versions.collect()
}

/// By parameter: the elements of it that one rank holds.
type HeldElements = Vec<Vec<Range<usize>>>;

/// How the parameters of a store before are cut, compared with those of one now.
enum Cuts {
    /// By the same layout.
    Same,
    /// By these, by rank.
    Other {
        before: Vec<HeldElements>,
        now: Vec<HeldElements>,
    },
}

impl Cuts {
    fn of(before: &Arc<Layout>, now: &Arc<Layout>) -> Self {
        if Arc::ptr_eq(before, now) {
            return Self::Same;
        }
        let (before, now) = (before.cuts(), now.cuts());
        Self::Other { before, now }
    }

    /// Whether all ranks hold the same elements of a parameter as before, by its positions. Of all
    /// ranks: one whose own elements alone are the same, none for example, would leave out the read
    /// that the others make together.
    fn are_same(&self, position_before: usize, position: usize) -> bool {
        match self {
            Self::Same => position_before == position,
            Self::Other { before, now } => {
                let mut ranks = before.iter().zip(now);
                before.len() == now.len()
                    && ranks.all(|(before, now)| before[position_before] == now[position])
            }
        }
    }
}
