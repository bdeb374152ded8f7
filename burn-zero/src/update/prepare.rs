//! Preparing a model before its first forward: the ranks' models and optimizers are compared, and
//! rank 0's weights broadcast.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use burn::module::{AutodiffModule, ModuleVisitor, Param, ParamId, list_param_ids};
use burn::tensor::{Tensor, TensorData, TensorMetadata, backend::AutodiffBackend};
use burn_backend::tensor::FloatTensor;
use burn_decorator::follow_path;
use burn_decorator::gradient::Ranks;
use burn_ranks::{BufferDtype, HostBuffer, ProcessGroup};
use burn_update::UpdateError;

use super::shard_update::ShardUpdate;
use super::sharding::{Prepared, Sharding};
use super::trial;
use crate::backend::{is_taken, leaf_node, stream};
use crate::error::{ShardingFault, ZeroError, raise};
use crate::host::{exchanged, floats, read};
use crate::parameters::module::{Replace, device_of, replace_tensors};
use crate::parameters::{
    ParameterStore, Parameters, Parts, Statistics, StoreEntries, Units, independent_if_shared,
    is_on_host, offloaded, replace_parameters,
};
use crate::reduce::{GradientReducer, Layout, Owner, ParameterSpec};
use crate::settings::Memory;
use crate::state;
use crate::trace::trace_waits;
use burn_decorator::module::for_each_float;

impl Sharding {
    /// The model with rank 0's weights, its leaves hooked on this thread:
    /// [`Update::prepare`](burn_update::Update::prepare). All ranks call it.
    pub(super) fn prepare<B, M>(
        &mut self,
        module: Box<M>,
        inner: &mut ShardUpdate<B>,
    ) -> Result<Box<M>, UpdateError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let group = self.group().map_err(ZeroError::from)?;
        self.check_free::<B, M>(&module, &*group)?;
        // Before `devices`, which initialises parameters.
        let module = self.placed::<B, M>(module, &group, None)?;
        let device = device_of::<B, M>(&module);
        inner.show(&*module)?;
        let (module, _) = self.prepare_on::<B, M>(group, module, &device, inner)?;
        Ok(module)
    }

    /// Takes the ranks of a Learner's strategy: the model on this rank's device, with the weights
    /// of rank 0, and with leaves and running statistics of its own. State that was loaded is cut
    /// to this rank's shards. All ranks call it.
    ///
    /// # Errors
    ///
    /// Those of [`prepare`](Self::prepare) and of the state.
    pub(super) fn take_ranks<B, M>(
        &mut self,
        group: &Arc<dyn ProcessGroup>,
        device: &B::Device,
        mut module: Box<M>,
        inner: &mut ShardUpdate<B>,
    ) -> Result<Box<M>, UpdateError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let settings = format!("{:?}", self.settings);
        let agreed = group.agree_equal("settings", &settings);
        agreed.map_err(ZeroError::from)?;
        self.check_free::<B, M>(&module, &**group)?;
        // Before the move to the device, so that parameters which are to be in host memory are
        // never all on it.
        module = self.placed::<B, M>(module, group, Some(device))?;
        if group.world_size() > 1 {
            // Before the move to the device: that moves a running statistic in all clones of the
            // model.
            module = independent_if_shared::<B, M>(module);
        }
        let module = Box::new(module.fork(device));
        inner.show(&*module)?;
        let (module, ids) = self.prepare_on::<B, M>(group.clone(), module, device, inner)?;
        self.cut_state::<B>(&ids, list_param_ids(&*module), device, inner)?;
        self.show();
        Ok(module)
    }

    /// Checks that the gradients of no parameter leave in backward for another optimizer. All ranks
    /// call it.
    ///
    /// # Errors
    ///
    /// [`ShardingFault::SecondUpdate`], on all ranks if on one; those of the group.
    pub(super) fn check_free<B, M>(
        &self,
        module: &M,
        group: &dyn ProcessGroup,
    ) -> Result<(), ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let own = self.reducer().ok();
        let mut search = TakenParameter {
            path: Vec::new(),
            own: own.as_ref(),
            found: None,
        };
        module.visit(&mut search);
        let own = search.found.unwrap_or_default().into_bytes();
        let all = group.gather_bytes("a parameter of another optimizer over ranks", own)?;
        match all.iter().find(|path| !path.is_empty()) {
            None => Ok(()),
            Some(path) => {
                let path = String::from_utf8_lossy(path).into_owned();
                Err(ShardingFault::SecondUpdate { path }.into())
            }
        }
    }

    /// The model with its parameters in the memory that the settings choose. When they are used,
    /// they are gathered or uploaded to `device`, or to the device they are on now if it is `None`.
    /// Those that are not initialised yet are initialised one at a time.
    ///
    /// # Errors
    ///
    /// [`ShardingFault::NoRemat`]; those of the group.
    pub(super) fn placed<B, M>(
        &self,
        module: Box<M>,
        group: &Arc<dyn ProcessGroup>,
        device: Option<&B::Device>,
    ) -> Result<Box<M>, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        match (self.gathers_units(&**group), self.settings.parameters) {
            (false, Memory::Device) => {
                boxed(replace_parameters::<B, M, ZeroError>(*module, |_, _| {
                    Ok(None)
                }))
            }
            (false, Memory::Host) => boxed(offloaded::<B, M>(*module, device)),
            (true, _) => {
                let prepared = self.prepared.lock().clone();
                let known = prepared.as_ref().map(|prepared| &*prepared.store);
                let module = in_parts::<B, M>(module, group, device, known)?;
                boxed(offloaded::<B, M>(*module, device)) // those whose type cannot be gathered
            }
        }
    }

    /// The [`placed`](Self::placed) model with the weights of rank 0, hooked on this thread, which
    /// draws random numbers of its rank from now on. Returns the ids of its parameters too, in
    /// their order.
    ///
    /// # Errors
    ///
    /// Those of [`prepare`](Self::prepare).
    pub(super) fn prepare_on<B, M>(
        &mut self,
        group: Arc<dyn ProcessGroup>,
        module: Box<M>,
        device: &B::Device,
        inner: &ShardUpdate<B>,
    ) -> Result<(Box<M>, Vec<ParamId>), UpdateError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let (ranks, rank, settings) = (group.world_size(), group.rank(), &self.settings);
        let tried = trial::run::<B>(inner, settings, ranks, device);
        let parameters = Parameters::of::<B, M>(&module);
        self.check_hooked::<B>(&parameters, ranks, device)?;
        parameters.check(ranks, settings.partition)?;
        let before = self.reducer().ok();
        let other = before
            .as_deref()
            .map(GradientReducer::layout)
            .filter(|before| before.parameters() != parameters.list);
        if let Some(before) = other
            && group
                .agree_any("state of other parameters", has_state::<B>(inner, before))
                .map_err(ZeroError::from)?
        {
            let what = "the optimizer has state of the parameters that were trained before, and other ones are trained now: make a new \
                        update for them";
            return Err(ShardingFault::OtherModel(what.into()).into());
        }
        trial::agree(&*group, tried)?;
        let described = parameters.describe();
        let agreed = group.agree_on_entries("parameters", &described);
        agreed.map_err(ZeroError::from)?;

        let frozen = if self.gathers_units(&*group) {
            Some(self.frozen_in_units::<B, M>(&module, &parameters, &*group)?)
        } else {
            None
        };
        let in_parts = frozen
            .iter()
            .flat_map(|frozen| parameters.list.iter().chain(frozen))
            .map(|it| it.path.clone())
            .collect();
        let module = broadcast::<B, M>(module, &*group, &in_parts)?;
        let layout = Arc::new(Layout::new(parameters.list, ranks, rank, settings)?);
        let owner = Arc::new(Owner);
        let of_owner = Arc::downgrade(&owner);
        let reducer = GradientReducer::new(layout, group.clone(), settings, of_owner);
        let reducer = Arc::new(reducer);
        if let Some(seed) = self.seed.filter(|_| ranks > 1) {
            stream::begin(&reducer, rank, seed);
        }
        let before = self.prepared.lock().take();
        let known = before.as_ref().map(|before| &*before.store);
        let store = self.store_of::<B, M>(known, &reducer, frozen, &module)?;
        let (module, ids) = self.hold::<B, M>(Prepared { reducer, store }, module);
        self.owner = Some(owner);
        Ok((module, ids))
    }

    /// # Errors
    ///
    /// [`ShardingFault::NotSharded`] if the settings need hooks on leaves that the backend has not.
    fn check_hooked<B: AutodiffBackend>(
        &self,
        parameters: &Parameters,
        ranks: usize,
        device: &B::Device,
    ) -> Result<(), ShardingFault> {
        let leave = ranks > 1 && self.settings.stage.shards_gradients();
        let what = if leave || self.settings.gradients == Memory::Host {
            "gradients leave during backward (stage 2, and `gradients: Memory::Host`)"
        } else if ranks > 1 && self.seed.is_some() {
            "`with_seed` gives each rank random numbers of its own"
        } else {
            return Ok(());
        };
        if parameters.are_hooked {
            return Ok(());
        }
        let backend = B::name(device);
        Err(ShardingFault::NotSharded { what, backend })
    }

    /// The frozen parameters of a module in parts, which are gathered in units with those that are
    /// `trained`.
    ///
    /// # Errors
    ///
    /// [`RanksError::Disagreement`](crate::RanksError::Disagreement) if the ranks' units differ;
    /// those of the group.
    fn frozen_in_units<B, M>(
        &self,
        module: &M,
        trained: &Parameters,
        group: &dyn ProcessGroup,
    ) -> Result<Vec<ParameterSpec>, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let frozen = frozen_parts::<B, M>(module);
        let all = trained.list.iter().chain(&frozen);
        let units = all.map(|ParameterSpec { path, .. }| {
            let unit = self.unit(path);
            format!("{path} in {unit}")
        });
        let units: Vec<_> = units.collect();
        group.agree_on_entries("units of the parameters", &units)?;
        Ok(frozen)
    }

    /// The store of a module, whose parameters are sharded together with those that are `frozen`,
    /// if that is not `None`. All ranks call it.
    ///
    /// # Errors
    ///
    /// [`ZeroError::InvalidSetting`] for more elements than `usize` counts.
    fn store_of<B, M>(
        &self,
        known: Option<&ParameterStore>,
        reducer: &Arc<GradientReducer>,
        frozen: Option<Vec<ParameterSpec>>,
        module: &M,
    ) -> Result<Arc<ParameterStore>, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let layout = reducer.layout();
        let Some(frozen) = frozen else {
            let entries = StoreEntries::trained(layout.clone());
            return Ok(ParameterStore::of_leaves::<B, M>(
                known,
                entries,
                module,
                [],
            ));
        };
        let trained = layout.parameters().len();
        let all = Arc::new(layout.with_frozen(frozen)?);
        let units = Units::new(&all, self.settings.shards, |path| self.unit(path));
        let entries = StoreEntries::with_frozen(all, trained);
        let (reducer, at) = (reducer.clone(), "after the start".to_owned());
        let store = ParameterStore::of_shards::<B, M>(known, entries, units, reducer, module, at);
        Ok(store)
    }
}

/// Looks for a parameter whose leaf another reducer hooks for an optimizer.
struct TakenParameter<'a> {
    path: Vec<String>,
    own: Option<&'a Arc<GradientReducer>>,
    /// Its path.
    found: Option<String>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for TakenParameter<'_> {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        // What is not initialised yet is no leaf, and stays so.
        if self.found.is_some() || !param.is_initialized() {
            return;
        }
        let tensor = param.val().into_primitive().tensor();
        let node = leaf_node::<B>(&tensor);
        if node.is_some_and(|node| is_taken(node, self.own)) {
            self.found = Some(self.path.join("."));
        }
    }
}

/// The module in a box. No caller then holds it by value while others run: a model of many small
/// parameters would fill its thread's stack.
fn boxed<M, E: Into<ZeroError>>(module: Result<M, E>) -> Result<Box<M>, ZeroError> {
    module.map(Box::new).map_err(Into::into)
}

/// Whether an optimizer has state of the shards that it has stepped on. State that cannot be split
/// counts too.
fn has_state<B: AutodiffBackend>(inner: &ShardUpdate<B>, layout: &Layout) -> bool {
    let split = state::split::<B, _>(inner.record(), layout, &state::ids_of_shards(layout));
    split.map_or(true, |(_, tensors)| !tensors.is_empty())
}

impl Ranks for GradientReducer {
    fn union(&self, names: Vec<String>) -> Vec<String> {
        raise(self.non_finite_on_any(names))
    }
}

impl GradientReducer {
    /// The names of the parameters with a non-finite gradient on any rank, sorted. A collective.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(super) fn non_finite_on_any(&self, names: Vec<String>) -> Result<Vec<String>, ZeroError> {
        let label = "which gradients are non-finite";
        let own = names.join("\n").into_bytes();
        let all = self.group().gather_bytes(label, own)?;
        let all: Vec<_> = all.iter().map(|own| String::from_utf8_lossy(own)).collect();
        let names: BTreeSet<_> = all.iter().flat_map(|own| own.lines()).collect();
        Ok(names.into_iter().map(str::to_owned).collect())
    }
}

/// The frozen parameters that [`in_parts`] has put into parts.
fn frozen_parts<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> Vec<ParameterSpec> {
    let statistics = Statistics::of::<B, M>(module);
    let mut frozen = Vec::new();
    for_each_float(module, |path, _, tensor: FloatTensor<B>| {
        let is_frozen = !B::float_is_require_grad(&tensor) && !statistics.contains(path);
        if is_frozen && is_on_host::<B>(&tensor) && exchanged(tensor.dtype()).is_some() {
            frozen.push(ParameterSpec {
                path: path.to_owned(),
                shape: tensor.shape().to_vec(),
                dtype: tensor.dtype(),
            });
        }
    });
    frozen
}

/// The module with rank 0's parameters, trained and frozen, each in parts in the host memory of the
/// ranks, and gathered when it is used. A rank has one whole parameter at a time, which is
/// initialised here if it is not yet. Leaves of `known` stay.
///
/// # Errors
///
/// [`ShardingFault::NoRemat`]; those of the group.
#[expect(clippy::boxed_local, reason = "a model is large by value")]
fn in_parts<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: Box<M>,
    group: &Arc<dyn ProcessGroup>,
    device: Option<&B::Device>,
    known: Option<&ParameterStore>,
) -> Result<Box<M>, ZeroError> {
    boxed(replace_parameters::<B, M, ZeroError>(
        *module,
        |path, old| {
            let stays = known.is_some_and(|known| known.has::<B>(old));
            // Other types are refused later.
            let Some(dtype) = exchanged(old.dtype()).filter(|_| !stays) else {
                return Ok(None);
            };
            let parts = in_parts_of::<B>(group, path, old, dtype)?;
            let device = device.cloned().unwrap_or_else(|| B::float_device(old));
            Ok(Some(parts.leaf::<B>(&device)?))
        },
    ))
}

/// The module with rank 0's parameters, each in parts in the host memory of the ranks, and gathered
/// when it is used. For a Learner of one process a rank
/// ([`UpdateStrategy::process`](burn_update::UpdateStrategy::process)) at stage 3, which
/// initialises all parameters of its model before the ranks prepare it: with the model that this
/// returns, no rank has all parameters. All ranks call it, and a rank initialises one parameter at
/// a time.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use burn::{backend::Autodiff, nn::Linear};
/// # use burn_checkpoint::Remat;
/// # use burn_flex::Flex;
/// use burn_zero::{ProcessGroup, Sharded, ZeroError, shard_parameters};
///
/// type B = Sharded<Autodiff<Remat<Flex>>>;
///
/// fn for_a_learner(model: Linear<B>, group: &Arc<dyn ProcessGroup>) -> Result<Linear<B>, ZeroError> {
///     shard_parameters(model, group)
/// }
/// ```
///
/// # Errors
///
/// [`ShardingFault::NoRemat`]; those of the group.
///
/// # Cost
///
/// A broadcast of each parameter, and when the Learner prepares the model a gather and a broadcast
/// more. Meanwhile a rank holds three times its part.
pub fn shard_parameters<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
    group: &Arc<dyn ProcessGroup>,
) -> Result<M, ZeroError> {
    trace_waits(&**group);
    let module = Box::new(module);
    in_parts::<B, M>(module, group, None, None).map(|module| *module)
}

/// Rank 0's tensor in parts.
fn in_parts_of<B: AutodiffBackend>(
    group: &Arc<dyn ProcessGroup>,
    path: &str,
    old: &FloatTensor<B>,
    buffer_dtype: BufferDtype,
) -> Result<Parts, ZeroError> {
    let label = format!("initial {path}");
    let own = read::<B>(old.clone());
    let whole = receive(&**group, &label, own)?;
    Ok(Parts::of(group, label, whole, buffer_dtype))
}

/// Rank 0's module on every rank: all its tensors, frozen ones and buffers included, except those
/// whose paths are in `are_there`. Leaves and running statistics are this rank's own.
///
/// Mapping running statistics holds a lock that clones on other ranks would wait for. So each rank
/// first gets statistics of its own, and they are broadcast outside of any mapper. Parameters have
/// no lock: each is broadcast when it is replaced, so that there is never a second copy of all of
/// them.
///
/// # Errors
///
/// Those of the group.
fn broadcast<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: Box<M>,
    group: &dyn ProcessGroup,
    are_there: &HashSet<String>,
) -> Result<Box<M>, ZeroError> {
    let replace = |module: Box<M>, replace: &mut Replace<'_>| {
        Box::new(replace_tensors::<B, M>(*module, replace))
    };
    if group.world_size() == 1 {
        return Ok(replace(module, &mut |_, own| Some(own())));
    }
    let module = independent_if_shared::<B, M>(module);
    let statistics = Statistics::of::<B, M>(&module);
    statistics.share::<B, M>(&module, group)?;
    let mut failed = None;
    let module = replace(module, &mut |path, own| {
        if failed.is_some() || statistics.contains(path) || are_there.contains(path) {
            return None;
        }
        receive(group, &format!("initial {path}"), own())
            .map_err(|error| failed = Some(error))
            .ok()
    });
    failed.map_or(Ok(module), Err)
}

/// Broadcasts rank 0's data.
fn receive(
    group: &dyn ProcessGroup,
    label: &str,
    own: TensorData,
) -> Result<TensorData, ZeroError> {
    let (shape, dtype) = (own.shape.clone(), own.dtype);
    let label = &format!("{label} {:?} {dtype:?}", shape.to_vec());
    let Some(buffer_dtype) = exchanged(dtype) else {
        // Tensors of other types are rare and small: `gather_bytes` is enough for them.
        let bytes = match group.rank() {
            0 => own.bytes.to_vec(),
            _ => Vec::new(),
        };
        let first = group.gather_bytes(label, bytes)?.swap_remove(0);
        return Ok(TensorData::from_bytes_vec(first, shape, dtype));
    };
    let buffer = HostBuffer::from_f32(buffer_dtype, floats(own));
    let received = group.broadcast(label, 0, buffer)?.into_f32();
    Ok(TensorData::new(received, shape).convert_dtype(dtype))
}
