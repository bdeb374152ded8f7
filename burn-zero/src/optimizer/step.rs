//! A step: reduces gradients, runs the wrapped optimizer on this rank's shards, and gathers the
//! parameters.

use core::ops::Range;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::optim::adaptor::GradAdaptor;
use burn::optim::{GradientsParams, LearningRate, Optimizer};
use burn::tensor::{Shape, Tensor, TensorPrimitive};
use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend, FloatDType, Slice, TensorData, TensorMetadata};
use burn_decorator::{HostRead, end_uploads, gradient};
use burn_ranks::ProcessGroup;

use super::gather::Gather;
use super::parameter_shards::{ParameterShards, shard_id};
use super::parameters::Parameters;
use super::prepare::attach_to;
use super::zero_optimizer::ZeroOptimizer;
use crate::backend::leaf_node;
use crate::host::read_floats;
use crate::offload::step_on_shards;
use crate::parameters::{NewValue, ParameterStore, Residence, Shard, Units, own_shards};
use crate::recorder::Prepared;
use crate::reduce::{GradientReducer, Layout, StepTag};
use crate::stack::with_stack;
use crate::{Memory, Stage, ZeroError, ZeroOptimizerError, raise};

/// Gradients, by parameter.
type Gradients<I> = Vec<Option<FloatTensor<I>>>;

impl<O> ZeroOptimizer<O> {
    /// A step. Panics with the message of its error, as Burn's trait allows no other failure.
    pub(super) fn update_with<B, M>(
        &mut self,
        lr: LearningRate,
        module: Box<M>,
        gradients: GradAdaptor,
    ) -> Box<M>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<ParameterShards<B>, B>,
    {
        let step = || self.advance::<B, M>(lr, module, gradients);
        raise(gradient::update(|| with_stack(step)))
    }

    /// # Errors
    ///
    /// [`ZeroOptimizerError::NotPrepared`], [`ZeroOptimizerError::OtherModel`]; those of the group.
    fn advance<B, M>(
        &mut self,
        lr: LearningRate,
        module: Box<M>,
        mut gradients: GradAdaptor,
    ) -> Result<Box<M>, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<ParameterShards<B>, B>,
    {
        let device = module.devices().into_iter().next().unwrap_or_default();
        let reducer = self.reducer.clone().ok_or_else(|| self.unprepared())?;
        let layout = reducer.layout();
        let parameters = Parameters::of::<B, M>(&module);
        parameters.check_same(layout.parameters())?;
        parameters.check_tied()?;

        let own = parameters.ids().into_iter().map(|id| {
            let (gradient, _) = gradients.remove::<B::InnerBackend, 1>(id)?;
            Some(gradient.into_primitive().tensor())
        });
        let at = reducer.next_step(lr);
        let own = own.collect();
        let due = due(&parameters.nodes, reducer.take_reduced());
        let (reduced, overflowed) =
            reduce::<B::InnerBackend>(&reducer, at.clone(), own, &due, &device)?;
        // If a loss scaler records it, all ranks skip the step.
        if !overflowed.is_empty() && gradient::report_overflow(overflowed) {
            return Ok(module);
        }
        let changed: Vec<_> = reduced.iter().map(Option::is_some).collect();
        let held = held::<B::InnerBackend>(layout, reduced)?;
        if let Some(receive) = &self.norm {
            receive.call(self.norm_of_held::<B::InnerBackend>(layout, &held)?);
        }
        let mut gradients = GradientsParams::new();
        for (parameter, gradient) in held {
            // `GradientsParams` does not store the number of dimensions.
            let gradient = TensorPrimitive::Float(gradient);
            let gradient = Tensor::<B::InnerBackend, 1>::from_primitive(gradient);
            gradients.register(shard_id(parameter), gradient);
        }

        let own = self.gathers_units(&*self.group).then(|| {
            let known = self.prepared.lock().shards.clone();
            let units = known.as_ref().map(|shards| shards.units().clone());
            let own = own_shards::<B, M>(known.as_deref(), layout, &parameters, &module);
            (units, own)
        });
        let leaves = &self.leaves;
        let is_known = |(index, node): &(usize, &Option<u64>)| {
            node.is_some() && leaves.get(index) == node.as_ref()
        };
        let known = parameters.nodes.iter().enumerate().filter(is_known);
        let known: HashSet<_> = known.map(|(index, _)| shard_id(index)).collect();
        let values = parameters.values::<B, M>(&module).into_iter();
        let shards = values.filter(|(parameter, _)| layout.held(*parameter) > 0);
        let shards = shards.map(|(parameter, value)| {
            let shard = match &own {
                Some((_, own)) => {
                    let data =
                        TensorData::new(own[parameter].to_vec(), layout.shard_shape(parameter));
                    let data = data.convert_dtype(layout.parameters()[parameter].dtype);
                    NewValue::Host(data).into_tensor::<B>(&Residence::alone_on_host(), &device)
                }
                None => B::from_inner(cut_one::<B::InnerBackend>(layout, parameter, value)),
            };
            (shard_id(parameter), shard)
        });
        let shards = ParameterShards::with_ids(shards);
        let (shards, on_host) = step_on_shards(known, || self.inner.step(lr, shards, gradients));

        let mut shards = shards.into_updated(on_host);
        let is_on_host = |shard: &NewValue<_>| matches!(shard, NewValue::Host(_));
        let on_host = shards.iter().filter(|(_, shard)| is_on_host(shard));
        let on_host = on_host.map(|(parameter, _)| *parameter).collect();
        let module = match own {
            None if layout.holds_all() => {
                self.update::<B, M>(module, &parameters, on_host, |index| {
                    let shard = shards.remove(&index).filter(|_| changed[index])?;
                    let shape = layout.parameters()[index].shape.clone();
                    Some(shard.reshaped(Shape::from(shape)))
                })
            }
            None => {
                let shards = read_shards(layout, shards)?;
                let mut gather = Gather::new(&reducer, at, shards.collect(), changed);
                let mut failed = None;
                let module = self.update::<B, M>(module, &parameters, on_host, |index| {
                    let taken = failed.is_none().then(|| gather.take(index))?;
                    let taken = taken.map_err(|error| failed = Some(error));
                    taken.ok().flatten().map(NewValue::Host)
                });
                failed.map_or(Ok(module), Err)?
            }
            Some((units, mut own)) => {
                for (parameter, new) in read_shards(layout, shards)? {
                    own[parameter] = Arc::new(new);
                }
                self.shard::<B, M>(module, &reducer, units, own, on_host, &at)
            }
        };
        attach_to::<B, M>(&reducer, &module);
        end_uploads::<B::InnerBackend>(&device);
        // A budget would evict state, and shards of state have other sizes on each rank.
        burn_checkpoint::end_step();
        Ok(module)
    }

    /// [`ZeroOptimizer::global_norm`].
    pub(super) fn norm_of<B, M>(
        &self,
        module: &M,
        gradients: &GradientsParams,
    ) -> Result<f32, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let device = module.devices().into_iter().next().unwrap_or_default();
        let reducer = self.reducer.clone().ok_or_else(|| self.unprepared())?;
        let layout = reducer.layout();
        let parameters = Parameters::of::<B, M>(module);
        parameters.check_same(layout.parameters())?;
        let own = parameters.ids().into_iter().map(|id| {
            let gradient = gradients.get::<B::InnerBackend, 1>(id)?;
            Some(gradient.into_primitive().tensor())
        });
        let own = own.collect();
        let due = due(&parameters.nodes, reducer.reduced());
        let at = "norm of the gradients".into();
        let (reduced, _) = reduce::<B::InnerBackend>(&reducer, at, own, &due, &device)?;
        let held = held::<B::InnerBackend>(layout, reduced)?;
        self.norm_of_held::<B::InnerBackend>(layout, &held)
    }

    /// The norm over all ranks, each of which holds its part of the gradients.
    fn norm_of_held<I: Backend>(
        &self,
        layout: &Layout,
        held: &[(usize, FloatTensor<I>)],
    ) -> Result<f32, ZeroError> {
        let own = squared_norm::<I>(layout, held);
        let all = self.group.agree_sum("squared norm of the gradient", own)?;
        Ok(all.sqrt() as f32)
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
        units: Option<Arc<Units>>,
        own: Vec<Shard>,
        on_host: HashSet<usize>,
        at: &str,
    ) -> Box<M> {
        let new = || Arc::new(Units::new(reducer.layout(), |path| self.unit(path)));
        let units = units.unwrap_or_else(new);
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
        on_host: impl IntoIterator<Item = usize>,
    ) -> Box<M> {
        let module = Box::new(shards.put::<B, M>(*module));
        let on_host = on_host.into_iter();
        let on_host = on_host.filter_map(|parameter| Some((parameter, shards.node(parameter)?)));
        self.leaves = on_host.collect();
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
        let Prepared {
            reducer,
            shards,
            mut frozen,
        } = self.prepared.lock().clone();
        let (Some(reducer), Some(shards)) = (reducer, shards) else {
            return;
        };
        frozen.follow::<B, M>(module);
        self.prepared.lock().frozen = frozen;
        let parameters = Parameters::of::<B, M>(module);
        let is_own =
            |(parameter, node): (usize, &Option<u64>)| shards.own(parameter, *node).is_some();
        if parameters.nodes.iter().enumerate().all(is_own) {
            return;
        }
        let own = own_shards::<B, M>(Some(&*shards), reducer.layout(), &parameters, module);
        self.leaves
            .retain(|parameter, node| parameters.nodes[*parameter] == Some(*node));
        let at = "changes since the last step".to_owned();
        let shards = ParameterStore::new(reducer, shards.units().clone(), own, at);
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
        let Prepared { shards, frozen, .. } = self.prepared.lock().clone();
        match shards {
            None => Ok(module),
            Some(shards) => {
                let module = Box::new(frozen.put_whole_on_rank_0::<B, M>(*module)?);
                Ok(Box::new(shards.put_whole_on_rank_0::<B, M>(*module)?))
            }
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
        let module = Box::new(self.prepared.lock().frozen.put::<B, M>(*module));
        let on_host: Vec<_> = self.leaves.keys().copied().collect();
        let module = self.put::<B, M>(module, shards, on_host);
        attach_to::<B, M>(&reducer, &module);
        module
    }

    /// The module with the new values of parameters that `take` returns, as new leaves. `on_host`
    /// are the parameters whose shards this rank's optimizer has updated on the host.
    #[expect(clippy::boxed_local, reason = "a model is large by value")]
    fn update<B, M>(
        &mut self,
        module: Box<M>,
        parameters: &Parameters,
        on_host: HashSet<usize>,
        mut take: impl FnMut(usize) -> Option<NewValue<B::InnerBackend>>,
    ) -> Box<M>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let to_host = self.settings.parameters == Memory::Host;
        let module = parameters.map::<B, M>(*module, |index, old| {
            let Some(value) = take(index) else {
                return old;
            };
            let residence = match Residence::of::<B>(&old) {
                Residence::Device if to_host => Residence::alone_on_host(),
                residence => residence,
            };
            let leaf = value.into_tensor::<B>(&residence, &B::float_device(&old));
            let leaf = B::float_set_require_grad(leaf, true);
            self.leaves.remove(&index);
            if on_host.contains(&index)
                && let Some(node) = leaf_node::<B>(&leaf)
            {
                self.leaves.insert(index, node);
            }
            leaf
        });
        Box::new(module)
    }
}

/// Brings this rank's updated shards to the host, all that are on the device one after the other.
///
/// # Errors
///
/// [`ZeroError::Read`].
fn read_shards<I: Backend>(
    layout: &Layout,
    shards: HashMap<usize, NewValue<I>>,
) -> Result<impl Iterator<Item = (usize, Vec<f32>)>, ZeroError> {
    let start = |(parameter, shard): (usize, NewValue<I>)| (parameter, shard.start_read());
    // All are started before the first is waited for.
    let started: Vec<_> = shards.into_iter().map(start).collect();
    let read = started.into_iter().map(|(parameter, shard)| {
        let elements = shard.wait(&layout.parameters()[parameter].path)?;
        Ok((parameter, elements))
    });
    Ok(read.collect::<Result<Vec<_>, ZeroError>>()?.into_iter())
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

/// Reduces this rank's gradients of the parameters that are `due`, and returns this rank's shards,
/// and the paths of those that overflowed in the reduction, on any rank.
fn reduce<I: Backend>(
    reducer: &GradientReducer,
    at: StepTag,
    mut own: Gradients<I>,
    due: &[usize],
    device: &I::Device,
) -> Result<(Gradients<I>, Vec<String>), ZeroError> {
    let hold = |gradient: &FloatTensor<I>| {
        let bytes = gradient.shape().num_elements() * gradient.dtype().size();
        reducer.tracker().hold(bytes)
    };
    let mut tracked: Vec<_> = own.iter().map(|g| g.as_ref().map(hold)).collect();
    if reducer.group().world_size() == 1 || due.is_empty() {
        return Ok((own, Vec::new()));
    }
    let parameters = reducer.layout().parameters();
    for &parameter in due {
        let elements = parameters[parameter].elements();
        check::<I>(reducer.layout(), parameter, &own[parameter], elements)?;
    }
    reducer.begin_step(at, due);
    for bucket in in_buckets(reducer.layout(), due) {
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
    let reduced = reduced.into_iter().zip(own).map(|(reduced, own)| {
        let Some(reduced) = reduced else { return own };
        Some(gradient::load(|| reducer.placed::<I>(reduced.data, device)))
    });
    Ok((reduced.collect(), overflowed))
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

/// This rank's reduced gradients, in the shapes for the wrapped optimizer, and the positions of
/// their parameters.
///
/// # Errors
///
/// [`ZeroOptimizerError::OtherModel`].
fn held<I: Backend>(
    layout: &Layout,
    reduced: Gradients<I>,
) -> Result<Vec<(usize, FloatTensor<I>)>, ZeroOptimizerError> {
    let mut held = Vec::new();
    for (parameter, gradient) in reduced.into_iter().enumerate() {
        // A rank without elements of a parameter has a single zero.
        let elements = layout.held(parameter);
        check::<I>(layout, parameter, &gradient, elements.max(1))?;
        if let Some(gradient) = gradient.filter(|_| elements > 0) {
            let shape = Shape::from(layout.shard_shape(parameter));
            held.push((parameter, I::float_reshape(gradient, shape)));
        }
    }
    Ok(held)
}

/// # Errors
///
/// [`ZeroOptimizerError::OtherModel`] unless a gradient has as many elements as expected.
fn check<I: Backend>(
    layout: &Layout,
    parameter: usize,
    gradient: &Option<FloatTensor<I>>,
    expected: usize,
) -> Result<(), ZeroOptimizerError> {
    let known = &layout.parameters()[parameter];
    let elements = gradient.as_ref().map(|it| it.shape().num_elements());
    let elements = elements.unwrap_or(expected);
    if elements == expected || known.elements() == 0 {
        return Ok(());
    }
    Err(ZeroOptimizerError::OtherModel(format!(
        "the gradient of {} has {elements} elements where {expected} belong: all gradients of a step come from the model \
         that the ZeroOptimizer prepared or returned last; after loading weights prepare it again",
        known.path
    )))
}

/// This rank's shard of a parameter.
fn cut_one<I: Backend>(layout: &Layout, parameter: usize, value: FloatTensor<I>) -> FloatTensor<I> {
    let shard = match layout.holds_all() {
        true => value,
        false => pick::<I>(value, layout.shard(parameter)),
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
