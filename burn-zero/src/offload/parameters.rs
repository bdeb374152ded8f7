//! The link between an optimizer on the host and the parameters that it updates.
//!
//! As long as only the optimizer changes a parameter, the host's copy differs from the device's in
//! precision only. Loaded, clamped or averaged weights are another leaf: a parameter whose leaf is
//! not the one that the optimizer made is downloaded.
//!
//! In an update over ranks an updated shard stays in host memory: it is sent to the other ranks
//! and uploaded with theirs. Shards are cut anew in each step, so only the reduction knows
//! their leaves. Burn's `Optimizer` between the two passes nothing on, so a [`ShardStep`] is
//! carried by the call of the step.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use burn::module::{AutodiffModule, ModuleMapper, Param, ParamId};
use burn::optim::adaptor::GradAdaptor;
use burn::tensor::{
    Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive, backend::AutodiffBackend,
};
use burn_backend::Backend;
use burn_backend::tensor::{Device, FloatTensor};
use burn_decorator::carried::{carry, is_carried, with};
use burn_decorator::module::for_each_float;
use burn_ranks::SingleRank;

use crate::error::{ShardingFault, ZeroError};
use crate::parameters::{
    LeafPlace, NewValue, ParameterStore, Parameters, StoreEntries, replace_leaves,
};
use crate::reduce::{GradientReducer, Layout};
use crate::settings::{Memory, ZeroSettings};
use crate::update::hook;

/// A step on the shards of a rank.
struct ShardStep {
    /// The shards that have not changed since the optimizer updated them on the host.
    known: HashSet<ParamId>,
    updated: HostShards,
}

/// Updated shards in host memory.
pub(crate) type HostShards = HashMap<ParamId, Arc<TensorData>>;

/// Runs a step on shards, of which `known` have not changed since the last such step. Returns the
/// shards that it updated on the host.
pub(crate) fn step_on_shards<R>(
    known: HashSet<ParamId>,
    step: impl FnOnce() -> R,
) -> (R, HostShards) {
    let updated = HostShards::new();
    let (result, at_end) = carry(ShardStep { known, updated }, step);
    (result, at_end.map(|step| step.updated).unwrap_or_default())
}

/// A parameter of a step.
pub(super) struct StepParameter<I: Backend> {
    pub(super) id: ParamId,
    pub(super) path: String,
    pub(super) value: FloatTensor<I>,
    pub(super) gradient: FloatTensor<I>,
    /// Whether the value has not changed since the optimizer's last update.
    pub(super) is_known: bool,
}

impl<I: Backend> StepParameter<I> {
    /// # Errors
    ///
    /// [`ShardingFault::OtherModel`] unless `found` is the parameter's shape.
    pub(super) fn check_shape(&self, what: &str, found: &[usize]) -> Result<(), ShardingFault> {
        let expected = self.value.shape().to_vec();
        if *found == *expected {
            return Ok(());
        }
        let path = &self.path;
        Err(ShardingFault::OtherModel(format!(
            "{what} of {path} is {found:?}, but the parameter is {expected:?}: it belongs to another model"
        )))
    }
}

/// What an optimizer on the host knows about the module.
#[derive(Debug, Default)]
pub(super) struct HostLink {
    /// The parameters after the last step, outside of an update over ranks, which has its own
    /// store.
    store: Option<Arc<ParameterStore>>,
    /// Copies gradients to the host during backward. `None` before there is a model, on a backend
    /// that is not [`Sharded`](crate::Sharded), and in an update over ranks, which has its own.
    reducer: Option<Arc<GradientReducer>>,
}

/// The reducer is of one optimizer: clones on two threads would mix the gradients of their backward
/// passes.
impl Clone for HostLink {
    fn clone(&self) -> Self {
        Self {
            store: self.store.clone(),
            reducer: None,
        }
    }
}

impl HostLink {
    /// The parameters that have gradients, in the order of the module. A tensor that the module
    /// holds twice is one parameter, under its first path.
    ///
    /// # Errors
    ///
    /// [`ShardingFault::OtherModel`] for a gradient of another shape.
    pub(super) fn parameters<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        module: &M,
        mut gradients: GradAdaptor,
    ) -> Result<Vec<StepParameter<B::InnerBackend>>, ShardingFault> {
        let mut found: Vec<StepParameter<B::InnerBackend>> = Vec::new();
        let trained = Parameters::of::<B, M>(module);
        let store = self.store.as_deref();
        for_each_float(module, |path, id, tensor: FloatTensor<B>| {
            if is_frozen_copy::<B>(&trained, id, &tensor) {
                return;
            }
            // `GradAdaptor` does not store the number of dimensions. It has a gradient once, which
            // the first path takes.
            let Some((gradient, _)) = gradients.remove::<B::InnerBackend, 1>(id) else {
                return;
            };
            let in_step = with(|step: &mut ShardStep| step.known.contains(&id));
            let is_known = in_step.unwrap_or_else(|| {
                let version = store.and_then(|store| store.version_of::<B>(path, &tensor));
                version.is_some_and(|version| version.is_of_host_optimizer())
            });
            found.push(StepParameter {
                id,
                path: path.to_owned(),
                gradient: gradient.into_primitive().tensor(),
                value: B::inner(tensor),
                is_known,
            });
        });
        for parameter in &found {
            parameter.check_shape("the gradient", &parameter.gradient.shape())?;
        }
        Ok(found)
    }

    /// The module with the new values that `update` returns for the parameters of `updated`. It gets
    /// their ids, after their old values were dropped to free the memory. A parameter that the
    /// module holds twice stays one leaf.
    pub(super) fn update<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        module: M,
        updated: &HashSet<ParamId>,
        mut update: impl FnMut(ParamId) -> TensorData,
    ) -> M {
        if is_carried::<ShardStep>() {
            return module.map(&mut ShardMapper { updated, update });
        }
        let trained = Parameters::of::<B, M>(&module);
        let updated = |_: &str, id, leaf: &_| {
            let is_updated = updated.contains(&id) && !is_frozen_copy::<B>(&trained, id, leaf);
            is_updated.then_some(id)
        };
        replace_leaves::<B, M, _>(module, updated, |id, old| {
            let place = LeafPlace::<B>::of(&old);
            drop(old);
            place.leaf(NewValue::Host(update(id)))
        })
    }

    /// From now on the gradients of the module's parameters are copied to the host in this thread's
    /// backward passes, in buckets of this many elements. The optimizer has just made the leaves of
    /// `updated`. Does nothing in an update over ranks.
    ///
    /// # Errors
    ///
    /// [`ZeroError::InvalidSetting`] for buckets of 0 elements.
    pub(super) fn attach<B: AutodiffBackend, M: AutodiffModule<B>>(
        &mut self,
        module: &M,
        bucket_elements: usize,
        updated: &HashSet<ParamId>,
    ) -> Result<(), ZeroError> {
        if is_carried::<ShardStep>() {
            return Ok(());
        }
        let all = Parameters::of::<B, M>(module);
        let settings = ZeroSettings {
            bucket_elements,
            gradients: Memory::Host,
            ..ZeroSettings::default()
        };
        let known = self.store.take();
        let same = known.as_ref().map(|known| known.layout());
        let layout = match same.filter(|same| same.parameters() == all.list) {
            Some(same) => same.clone(),
            None => {
                self.reducer = None;
                Arc::new(Layout::new(all.list, 1, 0, &settings)?)
            }
        };
        let entries = StoreEntries::trained(layout.clone());
        let updated = updated.iter().filter_map(|id| all.index.get(id).copied());
        let known = known.as_deref();
        let store = ParameterStore::of_leaves::<B, M>(known, entries, module, updated);
        store.note_leaves(&all.nodes);
        self.store = Some(store);
        if layout.parameters().is_empty() || !all.are_hooked {
            return Ok(());
        }
        let reducer = self.reducer.get_or_insert_with(|| {
            // A reduction around this optimizer takes the leaves over.
            let owner = Weak::new();
            let group = Arc::new(SingleRank::new());
            Arc::new(GradientReducer::new(layout, group, &settings, owner))
        });
        hook(reducer, &all.nodes);
        Ok(())
    }
}

/// Whether a tensor is a frozen copy of a trained parameter, under the same id.
fn is_frozen_copy<B: AutodiffBackend>(
    trained: &Parameters,
    id: ParamId,
    tensor: &FloatTensor<B>,
) -> bool {
    trained.index.contains_key(&id) && !B::float_is_require_grad(tensor)
}

/// Updates shards, which are neither tied nor frozen copies. A mapper of its own, because what stays
/// in host memory is a parameter that is not initialised yet: a walk over tensors makes no such.
struct ShardMapper<'a, F> {
    updated: &'a HashSet<ParamId>,
    update: F,
}

impl<B, F> ModuleMapper<B> for ShardMapper<'_, F>
where
    B: AutodiffBackend,
    F: FnMut(ParamId) -> TensorData,
{
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if !self.updated.contains(&param.id) {
            return param;
        }
        let (id, old, _) = param.consume();
        let (device, requires_grad) = (old.device(), old.is_require_grad());
        drop(old);
        leave_on_host(id, (self.update)(id), &device, requires_grad)
    }
}

/// An updated shard that stays in host memory, as a lazy parameter: it is uploaded only if it is
/// read before the reduction takes it.
fn leave_on_host<B: AutodiffBackend, const D: usize>(
    id: ParamId,
    data: TensorData,
    device: &Device<B>,
    requires_grad: bool,
) -> Param<Tensor<B, D>> {
    let shape = Shape::from(data.shape.to_vec());
    let data = Arc::new(data);
    with(|step: &mut ShardStep| step.updated.insert(id, data.clone()));
    let upload = move |device: &Device<B>, requires_grad: bool| {
        let value = B::float_from_data(TensorData::clone(&data), device);
        let value = Tensor::<B, D>::from_primitive(TensorPrimitive::Float(value));
        value.set_require_grad(requires_grad)
    };
    Param::uninitialized(id, upload, device.clone(), requires_grad, shape)
}
