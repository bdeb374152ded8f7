//! A step: [`reduce`], [`Sharding::update`], [`Sharding::publish`]. How far a gradient is on its
//! way is in its type: local, reduced, this rank's shard.

use core::ops::Range;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::optim::adaptor::GradAdaptor;
use burn::optim::{GradientsParams, LearningRate};
use burn::tensor::{Shape, Tensor, TensorPrimitive};
use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend, FloatDType, Slice, TensorData, TensorMetadata};
use burn_checkpoint::unrecorded;
use burn_decorator::{HostRead, end_uploads, gradient};
use burn_ranks::ProcessGroup;
use burn_update::{Step, StepOutcome, UpdateError};

use super::gather::Gather;
use super::parameter_shards::{ParameterShards, shard_id};
use super::shard_update::ShardUpdate;
use super::sharding::{Prepared, Sharding};
use crate::error::{ShardingFault, ZeroError};
use crate::host::{floats, not_read, read_floats};
use crate::offload::step_on_shards;
use crate::parameters::module::device_of;
use crate::parameters::{
    LeafMemory, Maker, NewValue, ParameterStore, ParameterVersion, Parameters, Shard,
};
use crate::reduce::{GradientReducer, Layout, StepTag};
use crate::settings::Memory;

impl Sharding {
    /// A step of the model: reduce, update, publish. It is left out if a gradient overflows in the
    /// reduction, on any rank, and a loss scale counts that.
    ///
    /// # Errors
    ///
    /// [`ShardingFault::NotPrepared`], [`ShardingFault::OtherModel`]; those of the group.
    pub(super) fn advance<B, M>(
        &mut self,
        module: Box<M>,
        gradients: GradAdaptor,
        inner: &mut ShardUpdate<B>,
        step: &mut Step<B::InnerBackend>,
    ) -> Result<Box<M>, UpdateError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let of_model = self.begin_step::<B, M>(&module, step.lr)?;
        let (reduced, overflowed) = reduce(&of_model, of_model.local_gradients::<B>(gradients))?;
        if !overflowed.is_empty() && step.is_scaled {
            step.overflowed = overflowed;
            step.outcome = StepOutcome::Waits;
            return Ok(module);
        }
        let gradients = reduced.into_shards(of_model.layout())?;
        let updated = self.update::<B, M>(&of_model, &module, gradients, inner, step)?;
        Ok(self.publish::<B, M>(&of_model, module, updated)?)
    }

    /// Checks that a model is the one that was prepared, and counts a step of it.
    ///
    /// # Errors
    ///
    /// [`ShardingFault::NotPrepared`], [`ShardingFault::OtherModel`].
    fn begin_step<B, M>(
        &self,
        module: &M,
        lr: LearningRate,
    ) -> Result<ModelStep<B::Device>, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let step = self.model_step::<B, M>(module, |reducer| reducer.next_step(lr))?;
        step.parameters.check_tied()?;
        Ok(step)
    }

    fn model_step<B, M>(
        &self,
        module: &M,
        at: impl FnOnce(&GradientReducer) -> StepTag,
    ) -> Result<ModelStep<B::Device>, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let device = device_of::<B, M>(module);
        let parameters = self.trained::<B, M>(module)?;
        let Prepared { reducer, store } = self.prepared()?;
        Ok(ModelStep {
            at: at(&reducer),
            reducer,
            store,
            parameters,
            device,
        })
    }

    /// Runs `inner` on this rank's shards of the parameters.
    ///
    /// # Errors
    ///
    /// Those of `inner` and of the group.
    fn update<B, M>(
        &self,
        step: &ModelStep<B::Device>,
        module: &M,
        gradients: ShardGradients<B::InnerBackend>,
        inner: &mut ShardUpdate<B>,
        of_inner: &mut Step<B::InnerBackend>,
    ) -> Result<UpdatedShards<B::InnerBackend>, UpdateError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let (layout, group) = (step.layout(), step.reducer.group());
        let norm = if inner.wants_norm(group.world_size()) {
            Some(gradients.norm(layout, group)?)
        } else {
            None
        };
        let has_gradient = gradients.has_gradient.clone();
        let gradients = gradients.into_params();

        let versions = step.store.versions_of::<B, M>(module);
        let shards = step.own_shards::<B, M>(module, &versions).into_iter();
        let shards =
            ParameterShards::with_ids(shards.map(|(parameter, own)| (shard_id(parameter), own)));
        let known = versions.iter().enumerate();
        let known = known
            .filter(|(_, version)| version.is_of_host_optimizer())
            .map(|(parameter, _)| shard_id(parameter))
            .collect();
        let (shards, on_host) =
            step_on_shards(known, || inner.step(of_inner, norm, shards, gradients));

        let mut shards = shards?.into_updated(on_host);
        shards.retain(|parameter, _| has_gradient[*parameter]);
        Ok(UpdatedShards {
            shards,
            has_gradient,
            versions,
        })
    }

    /// Makes the parameters of the model of the updated shards of all ranks: gathered now, or at
    /// stage 3 where they are used.
    ///
    /// # Errors
    ///
    /// Those of the group.
    fn publish<B, M>(
        &mut self,
        step: &ModelStep<B::Device>,
        module: Box<M>,
        updated: UpdatedShards<B::InnerBackend>,
    ) -> Result<Box<M>, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let (module, versions) = match step.store.shards() {
            Some(memory) => (module, updated.into_sharded(step, memory)?),
            None => self.gather_updated::<B, M>(step, module, updated)?,
        };
        let at = format!("after {}", step.at);
        let prepared = Prepared {
            reducer: step.reducer.clone(),
            store: step.store.after_step(versions, at)?,
        };
        let (module, _) = self.hold::<B, M>(prepared, module);
        end_uploads::<B::InnerBackend>(&step.device);
        // A budget would evict state, and shards of state have other sizes on each rank.
        burn_checkpoint::end_step();
        Ok(module)
    }

    /// The module with new leaves of the updated parameters, whose shards are gathered from all
    /// ranks, and its versions.
    ///
    /// # Errors
    ///
    /// Those of the group.
    fn gather_updated<B, M>(
        &self,
        step: &ModelStep<B::Device>,
        module: Box<M>,
        updated: UpdatedShards<B::InnerBackend>,
    ) -> Result<(Box<M>, Versions), ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let (layout, makers) = (step.layout(), updated.makers());
        let UpdatedShards {
            mut shards,
            has_gradient,
            mut versions,
        } = updated;
        for parameter in (0..has_gradient.len()).filter(|parameter| has_gradient[*parameter]) {
            versions[parameter] = Arc::new(ParameterVersion::in_leaf(makers[parameter]));
        }
        if layout.holds_all() {
            let memory = self.settings.parameters;
            let module = step.store.replace::<B, M>(module, memory, |parameter| {
                let shape = layout.parameters()[parameter].shape.clone();
                Some(shards.remove(&parameter)?.reshaped(Shape::from(shape)))
            });
            return Ok((module, versions));
        }
        let shards = read_shards(layout, shards)?;
        let gather = Gather::new(&step.reducer, step.at.clone(), shards, has_gradient);
        let module = self.replace_by_gathered::<B, M>(module, &step.store, gather)?;
        Ok((module, versions))
    }

    /// The module with the parameters that a gather brings, as new leaves.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(super) fn replace_by_gathered<B, M>(
        &self,
        module: Box<M>,
        store: &ParameterStore,
        mut gather: Gather<'_>,
    ) -> Result<Box<M>, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let mut failed = None;
        let module = store.replace::<B, M>(module, self.settings.parameters, |parameter| {
            let taken = failed.is_none().then(|| gather.take(parameter))?;
            let taken = taken.map_err(|error| failed = Some(error));
            taken.ok().flatten().map(NewValue::Host)
        });
        failed.map_or(Ok(module), Err)
    }

    /// [`RankReduction::global_norm`](super::RankReduction::global_norm).
    pub(super) fn norm_of<B, M>(
        &self,
        module: &M,
        gradients: &GradientsParams,
    ) -> Result<f32, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let step = self.model_step::<B, M>(module, |_| "norm of the gradients".into())?;
        let own = step.parameters.ids().into_iter().map(|id| {
            let gradient = gradients.get::<B::InnerBackend, 1>(id)?;
            Some(gradient.into_primitive().tensor())
        });
        let local = LocalGradients {
            by_parameter: own.collect(),
            due: due(&step.parameters.nodes, step.reducer.reduced()),
        };
        let (reduced, _) = reduce::<B::InnerBackend>(&step, local)?;
        let shards = reduced.into_shards(step.layout())?;
        shards.norm(step.layout(), step.reducer.group())
    }
}

/// This rank's updated shards, all of them in host memory, in the types of the parameters.
///
/// # Errors
///
/// [`ZeroError::Read`].
fn in_host_memory<I: Backend>(
    layout: &Layout,
    shards: HashMap<usize, NewValue<I>>,
) -> Result<HashMap<usize, NewValue<I>>, ZeroError> {
    let shards = read_shards(layout, shards)?.into_iter();
    let read = shards.map(|(parameter, elements)| {
        let shape = [elements.len()];
        let data = TensorData::new(elements, shape);
        let data = data.convert_dtype(layout.parameters()[parameter].dtype);
        (parameter, NewValue::Host(data))
    });
    Ok(read.collect())
}

/// Casts new shards that were computed in another type than the parameter's.
pub(super) fn in_type_of_parameters<I: Backend>(
    layout: &Layout,
    shards: HashMap<usize, NewValue<I>>,
) -> HashMap<usize, NewValue<I>> {
    let cast = |(parameter, shard): (usize, NewValue<I>)| {
        let dtype = layout.parameters()[parameter].dtype;
        let shard = match shard {
            NewValue::Device(value) if value.dtype() != dtype => {
                NewValue::Device(unrecorded(|| I::float_cast(value, dtype.into())))
            }
            shard => shard,
        };
        (parameter, shard)
    };
    shards.into_iter().map(cast).collect()
}

/// Brings this rank's updated shards to the host, in f32, by parameter: those on the device as one
/// read, which waits for the device once.
///
/// # Errors
///
/// [`ZeroError::Read`].
pub(super) fn read_shards<I: Backend>(
    layout: &Layout,
    shards: HashMap<usize, NewValue<I>>,
) -> Result<HashMap<usize, Vec<f32>>, ZeroError> {
    let (mut read, mut tensors, mut of_tensors) = (HashMap::new(), Vec::new(), Vec::new());
    for (parameter, shard) in shards {
        match shard {
            NewValue::Host(data) => {
                read.insert(parameter, floats(data));
            }
            NewValue::Device(tensor) => {
                tensors.push(tensor);
                of_tensors.push(parameter);
            }
        }
    }
    let underway = HostRead::start_together::<I>(tensors);
    for (parameter, shard) in of_tensors.into_iter().zip(underway) {
        let path = &layout.parameters()[parameter].path;
        let data = shard
            .wait()
            .map_err(|error| not_read("the new value", path, &error))?;
        read.insert(parameter, floats(data));
    }
    Ok(read)
}

/// The parameters whose gradients backward has not reduced. `nodes` are those of their leaves;
/// `reduced` are the exceptions if backward reduces.
fn due(nodes: &[Option<u64>], reduced: Option<HashSet<u64>>) -> Vec<usize> {
    let is_due = |&parameter: &usize| match &reduced {
        None => true,
        Some(except) => nodes[parameter].is_some_and(|node| except.contains(&node)),
    };
    (0..nodes.len()).filter(is_due).collect()
}

/// A gradient on its way through a step, by parameter; `None` where there is none. Its type says
/// how far it is: [`LocalGradients`], [`ReducedGradients`], [`ShardGradients`].
type Gradients<I> = Vec<Option<FloatTensor<I>>>;

/// Gradients as backward has left them on this rank.
struct LocalGradients<I: Backend> {
    by_parameter: Gradients<I>,
    /// The parameters whose gradients are of this rank's batch alone. Those of the others backward
    /// has reduced.
    due: Vec<usize>,
}

/// Gradients of all ranks: of each this rank's shard, or in stage 0 all of it; a single zero where
/// the rank has no elements of the parameter, so that all ranks see a gradient of the same
/// parameters.
struct ReducedGradients<I: Backend> {
    by_parameter: Gradients<I>,
}

/// This rank's shards of reduced gradients, in the shapes for the optimizer of shards.
struct ShardGradients<I: Backend> {
    /// Of the parameters of which this rank holds elements, with their positions.
    held: Vec<(usize, FloatTensor<I>)>,
    /// By parameter: whether any rank has a gradient of it.
    has_gradient: Vec<bool>,
}

/// This rank's shards of the parameters after an update.
struct UpdatedShards<I: Backend> {
    /// By parameter: those that were updated.
    shards: HashMap<usize, NewValue<I>>,
    has_gradient: Vec<bool>,
    /// What the update started from.
    versions: Versions,
}

impl<I: Backend> UpdatedShards<I> {
    /// By parameter: what has made its shard.
    fn makers(&self) -> Vec<Maker> {
        let parameters = 0..self.has_gradient.len();
        let makers = parameters.map(|parameter| match self.shards.get(&parameter) {
            Some(NewValue::Host(_)) => Maker::HostOptimizer,
            Some(NewValue::Device(_)) | None => Maker::Other,
        });
        makers.collect()
    }

    /// The versions of a sharded model, with new ones of the updated shards in this memory.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Read`].
    fn into_sharded(
        self,
        step: &ModelStep<I::Device>,
        memory: Memory,
    ) -> Result<Versions, ZeroError> {
        let (layout, makers) = (step.layout(), self.makers());
        let Self {
            shards,
            mut versions,
            ..
        } = self;
        let shards = match memory {
            Memory::Host => in_host_memory(layout, shards)?,
            Memory::Device => in_type_of_parameters(layout, shards),
        };
        for (parameter, new) in shards {
            let new = Shard::new::<I>(new, memory, &step.device);
            versions[parameter] = Arc::new(ParameterVersion::sharded(new, makers[parameter]));
        }
        Ok(versions)
    }
}

/// By parameter.
type Versions = Vec<Arc<ParameterVersion>>;

/// A step of a model: what its reduction, its update and its publication need to know.
struct ModelStep<D> {
    reducer: Arc<GradientReducer>,
    /// The parameters after the step before.
    store: Arc<ParameterStore>,
    parameters: Parameters,
    device: D,
    /// Names the step in labels of collectives.
    at: StepTag,
}

impl<D> ModelStep<D> {
    fn layout(&self) -> &Layout {
        self.reducer.layout()
    }

    /// This rank's shards of the parameters, in the shapes for the optimizer, by position.
    fn own_shards<B, M>(
        &self,
        module: &M,
        versions: &[Arc<ParameterVersion>],
    ) -> Vec<(usize, FloatTensor<B>)>
    where
        B: AutodiffBackend<Device = D>,
        M: AutodiffModule<B>,
    {
        let layout = self.layout();
        let held = (0..self.parameters.list.len()).filter(|it| layout.held(*it) > 0);
        let Some(memory) = self.store.shards() else {
            let mut leaves = self.store.leaves::<B, M>(module);
            let own = held.filter_map(|parameter| {
                let value = B::inner(leaves.remove(&parameter)?);
                let own = cut_one::<B::InnerBackend>(layout, parameter, value);
                Some((parameter, B::from_inner(own)))
            });
            return own.collect();
        };
        let memory = match memory {
            Memory::Host => LeafMemory::alone_on_host(),
            Memory::Device => LeafMemory::Device,
        };
        let own = held.map(|parameter| {
            let own = versions[parameter].shard();
            let own = own.expect("the trained parameters of a sharded model are sharded");
            let shape = Shape::from(layout.shard_shape(parameter));
            let own = own.value::<B::InnerBackend>().reshaped(shape);
            (parameter, own.into_tensor::<B>(&memory, &self.device))
        });
        own.collect()
    }

    /// Takes the gradients of this rank out.
    fn local_gradients<B>(&self, mut gradients: GradAdaptor) -> LocalGradients<B::InnerBackend>
    where
        B: AutodiffBackend,
    {
        let own = self.parameters.ids().into_iter().map(|id| {
            // `GradAdaptor` does not store the number of dimensions.
            let (gradient, _) = gradients.remove::<B::InnerBackend, 1>(id)?;
            Some(gradient.into_primitive().tensor())
        });
        LocalGradients {
            by_parameter: own.collect(),
            due: due(&self.parameters.nodes, self.reducer.take_reduced()),
        }
    }
}

/// Reduces the gradients of this rank that backward has not, and returns the paths of those that
/// overflowed in the reduction, on any rank.
///
/// # Errors
///
/// [`ShardingFault::OtherModel`]; those of the group.
fn reduce<I: Backend>(
    step: &ModelStep<I::Device>,
    local: LocalGradients<I>,
) -> Result<(ReducedGradients<I>, Vec<String>), ZeroError> {
    let (reducer, mut own) = (&step.reducer, local.by_parameter);
    let hold = |gradient: &FloatTensor<I>| {
        let bytes = gradient.shape().num_elements() * gradient.dtype().size();
        reducer.tracker().hold(bytes)
    };
    let mut tracked: Vec<_> = own.iter().map(|g| g.as_ref().map(hold)).collect();
    if reducer.group().world_size() == 1 || local.due.is_empty() {
        return Ok((ReducedGradients { by_parameter: own }, Vec::new()));
    }
    let parameters = reducer.layout().parameters();
    for &parameter in &local.due {
        let elements = parameters[parameter].elements();
        check::<I>(reducer.layout(), parameter, &own[parameter], elements)?;
    }
    reducer.begin_step(step.at.clone(), &local.due);
    for bucket in in_buckets(reducer.layout(), &local.due) {
        let gradients: Vec<_> = bucket.iter().map(|&it| own[it].take()).collect();
        let exists: Vec<bool> = gradients.iter().map(Option::is_some).collect();
        let gradients = gradients.into_iter().flatten().collect();
        let mut reads = HostRead::start_together::<I>(gradients).into_iter();
        for (parameter, exists) in bucket.into_iter().zip(exists) {
            // From here the reducer counts the gradient's bytes.
            drop(tracked[parameter].take());
            reducer.submit(parameter, if exists { reads.next() } else { None });
        }
    }
    let reduced = reducer.finish()?;
    let overflowed = reduced
        .iter()
        .zip(parameters)
        .filter(|(reduced, _)| reduced.as_ref().is_some_and(|it| !it.is_finite))
        .map(|(_, known)| known.path.clone())
        .collect();
    let gradients = reduced.into_iter().zip(own).map(|(reduced, own)| {
        let Some(reduced) = reduced else { return own };
        Some(gradient::load(|| {
            reducer.placed::<I>(reduced.data, &step.device)
        }))
    });
    let by_parameter = gradients.collect();
    Ok((ReducedGradients { by_parameter }, overflowed))
}

/// The parameters, from the last to the first, cut into groups of about a bucket of elements: a
/// group is read from the device at once, because each read waits for the device.
fn in_buckets(layout: &Layout, parameters: &[usize]) -> Vec<Vec<usize>> {
    let most = layout.map().bucket_elements();
    let (mut buckets, mut elements) = (Vec::<Vec<usize>>::new(), 0);
    for &parameter in parameters.iter().rev() {
        let own = layout.parameters()[parameter].elements();
        match buckets.last_mut() {
            Some(bucket) if elements + own <= most => bucket.push(parameter),
            _ => {
                buckets.push(vec![parameter]);
                elements = 0;
            }
        }
        elements += own;
    }
    buckets
}

impl<I: Backend> ReducedGradients<I> {
    /// # Errors
    ///
    /// [`ShardingFault::OtherModel`].
    fn into_shards(self, layout: &Layout) -> Result<ShardGradients<I>, ShardingFault> {
        let has_gradient = self.by_parameter.iter().map(Option::is_some).collect();
        let mut held = Vec::new();
        for (parameter, gradient) in self.by_parameter.into_iter().enumerate() {
            // A rank without elements of a parameter has a single zero.
            let elements = layout.held(parameter);
            check::<I>(layout, parameter, &gradient, elements.max(1))?;
            if let Some(gradient) = gradient.filter(|_| elements > 0) {
                let shape = Shape::from(layout.shard_shape(parameter));
                held.push((parameter, I::float_reshape(gradient, shape)));
            }
        }
        Ok(ShardGradients { held, has_gradient })
    }
}

impl<I: Backend> ShardGradients<I> {
    /// The norm over all ranks.
    ///
    /// # Errors
    ///
    /// Those of the group.
    fn norm(&self, layout: &Layout, group: &dyn ProcessGroup) -> Result<f32, ZeroError> {
        let own = squared_norm::<I>(layout, &self.held);
        let all = group.agree_sum("squared norm of the gradient", own)?;
        Ok(all.sqrt() as f32)
    }

    /// As Burn's optimizers take them.
    fn into_params(self) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        for (parameter, gradient) in self.held {
            // `GradientsParams` does not store the number of dimensions.
            let gradient = Tensor::<I, 1>::from_primitive(TensorPrimitive::Float(gradient));
            gradients.register(shard_id(parameter), gradient);
        }
        gradients
    }
}

/// # Errors
///
/// [`ShardingFault::OtherModel`] unless a gradient has as many elements as expected.
fn check<I: Backend>(
    layout: &Layout,
    parameter: usize,
    gradient: &Option<FloatTensor<I>>,
    expected: usize,
) -> Result<(), ShardingFault> {
    let known = &layout.parameters()[parameter];
    let elements = gradient
        .as_ref()
        .map_or(expected, |it| it.shape().num_elements());
    if elements == expected || known.elements() == 0 {
        return Ok(());
    }
    Err(ShardingFault::OtherModel(format!(
        "the gradient of {} has {elements} elements where {expected} belong: all gradients of a step come from the model \
         that the update prepared or returned last; after loading weights prepare it again",
        known.path
    )))
}

/// This rank's shard of a parameter.
fn cut_one<I: Backend>(layout: &Layout, parameter: usize, value: FloatTensor<I>) -> FloatTensor<I> {
    let shard = if layout.holds_all() {
        value
    } else {
        pick::<I>(value, layout.shard(parameter))
    };
    I::float_reshape(shard, Shape::from(layout.shard_shape(parameter)))
}

/// The sum of the squares of this rank's shard of the gradient. Stage 0 uses the shard too, though
/// a rank holds the whole gradient, so that every stage has the same bits.
fn squared_norm<I: Backend>(layout: &Layout, held: &[(usize, FloatTensor<I>)]) -> f64 {
    let own = held
        .iter()
        .filter(|(parameter, _)| !layout.shard(*parameter).is_empty());
    let squares = own.map(|(parameter, gradient)| {
        let mut gradient = gradient.clone();
        if layout.holds_all() {
            gradient = pick::<I>(gradient, layout.shard(*parameter));
        }
        let gradient = I::float_cast(gradient, FloatDType::F32);
        I::float_sum(I::float_mul(gradient.clone(), gradient))
    });
    let squares: Vec<_> = squares.collect();
    if squares.is_empty() {
        return 0.0;
    }
    let squares = read_floats::<I>(I::float_cat(squares, 0));
    squares.into_iter().map(f64::from).sum()
}

/// Some elements of a tensor, flat.
fn pick<I: Backend>(tensor: FloatTensor<I>, ranges: &[Range<usize>]) -> FloatTensor<I> {
    let elements = tensor.shape().num_elements();
    let flat = I::float_reshape(tensor, Shape::from(vec![elements]));
    let slice = |range: &Range<usize>| I::float_slice(flat.clone(), &[Slice::from(range.clone())]);
    match ranges {
        [all] if *all == (0..elements) => flat,
        [range] => slice(range),
        ranges => I::float_cat(ranges.iter().map(slice).collect(), 0),
    }
}
