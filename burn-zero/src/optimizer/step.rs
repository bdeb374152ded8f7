//! A step: reduces gradients, runs the wrapped optimizer on this rank's shards, and gathers the parameters.

use core::ops::Range;

use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::tensor::{Shape, Tensor, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend, FloatDType, Slice, TensorMetadata};
use burn_decorator::gradient;

use super::gather::Gather;
use super::parameter_shards::{ParameterShards, shard_id};
use super::parameters::Parameters;
use super::prepare::attach_to;
use super::zero_optimizer::ZeroOptimizer;
use crate::backend::on_host;
use crate::group::Agree;
use crate::host::HostRead;
use crate::module::for_each_float;
use crate::offload::step_on_shards;
use crate::reduce::{Arriving, GradientReducer, Layout, StepTag};
use crate::{Memory, ZeroError, ZeroOptimizerError};

/// By parameter.
type Gradients<I> = Vec<Option<FloatTensor<I>>>;

impl<O> ZeroOptimizer<O> {
    /// # Errors
    ///
    /// [`ZeroOptimizerError::NotPrepared`], [`ZeroOptimizerError::OtherModel`], [`ZeroOptimizerError::TiedApart`],
    /// [`ZeroOptimizerError::ForeignGradient`]; those of the group.
    pub(super) fn advance<B, M>(
        &mut self,
        lr: LearningRate,
        module: M,
        mut gradients: GradientsParams,
    ) -> Result<M, ZeroError>
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

        let own = parameters.ids().into_iter();
        let own = own.map(|id| take::<B::InnerBackend>(gradients.remove(id)?));
        let own = own.collect();
        let at = reducer.next_step(lr);
        let Some(reduced) = self.reduce::<B>(&reducer, at, own, &device)? else {
            return Ok(module);
        };
        let changed = reduced.iter().map(Option::is_some).collect();
        let held = held::<B::InnerBackend>(layout, reduced)?;
        self.provide_norm::<B::InnerBackend>(layout, &held)?;
        for (parameter, gradient) in held {
            // The container does not store the number of dimensions.
            let gradient = TensorPrimitive::Float(gradient);
            let gradient = Tensor::<B::InnerBackend, 1>::from_primitive(gradient);
            gradients.register(shard_id(parameter), gradient);
        }
        let shards = ParameterShards::new(cut::<B, M>(&module, &parameters, layout));
        let nodes = parameters.leaf_nodes::<B, M>(&module);
        let step = || self.inner.step(lr, shards, gradients);
        let (shards, mut on_host) = step_on_shards(nodes, step);

        let shards = shards
            .into_updated(&mut on_host)
            .map(|(parameter, shard)| (parameter, shard.inner()));
        let shards = shards.collect();
        let gather = Gather::new(layout, &*self.group, at, shards, changed, on_host);
        let module = gather.update::<B, M>(module, &parameters)?;
        attach_to::<B, M>(&reducer, &module);
        Ok(module)
    }

    /// Reduces local gradients; returns this rank's shards, by parameter. `None` if any overflowed and a loss scaler takes note of it: all
    /// ranks leave the step out.
    fn reduce<B: AutodiffBackend>(
        &self,
        reducer: &GradientReducer,
        at: StepTag,
        mut own: Gradients<B::InnerBackend>,
        device: &B::Device,
    ) -> Result<Option<Gradients<B::InnerBackend>>, ZeroError> {
        let hold = |gradient: &FloatTensor<B::InnerBackend>| {
            let bytes = gradient.shape().num_elements() * gradient.dtype().size();
            reducer.tracker().hold(bytes)
        };
        let mut tracked: Vec<_> = own.iter().map(|g| g.as_ref().map(hold)).collect();
        if self.group.world_size() == 1 || reducer.take_arriving() == Arriving::Reduced {
            return Ok(Some(own));
        }
        for (parameter, gradient) in own.iter().enumerate() {
            let elements = reducer.layout().parameters()[parameter].elements();
            check::<B::InnerBackend>(reducer.layout(), parameter, gradient, elements)?;
        }
        reducer.begin_step(at);
        for (parameter, gradient) in own.iter_mut().enumerate().rev() {
            // The reducer counts it now.
            drop(tracked[parameter].take());
            let read = gradient.take().map(HostRead::start::<B::InnerBackend>);
            reducer.submit(parameter, read);
        }
        let reduced = reducer.finish()?;
        let parameters = reducer.layout().parameters();
        let overflowed = reduced.iter().zip(parameters);
        let overflowed = overflowed.filter(|(reduced, _)| reduced.is_non_finite());
        let overflowed: Vec<_> = overflowed.map(|(_, known)| known.path.clone()).collect();
        if !overflowed.is_empty() && gradient::report_overflow(overflowed) {
            return Ok(None);
        }
        let reduced = reduced.into_iter().zip(parameters);
        let reduced = reduced.map(|(reduced, parameter)| {
            let data = reduced.into_piece(parameter)?;
            Some(gradient::load(|| match reducer.memory() {
                Memory::Device => B::InnerBackend::float_from_data(data, device),
                Memory::Host => on_host::<B::InnerBackend>(data, device),
            }))
        });
        Ok(Some(reduced.collect()))
    }

    /// Gives the norm over all ranks to its receiver.
    fn provide_norm<I: Backend>(
        &self,
        layout: &Layout,
        held: &[(usize, FloatTensor<I>)],
    ) -> Result<(), ZeroError> {
        let Some(receive) = &self.norm else {
            return Ok(());
        };
        let own = squared_norm::<I>(layout, held);
        let all = self.group.agree_sum("squared norm of the gradient", own)?;
        receive.call(all.sqrt() as f32);
        Ok(())
    }
}

/// The gradients of several devices, added up by parameter.
pub(super) fn merge<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    mut gradients: MultiGradientsParams,
) -> GradientsParams {
    let mut all = Vec::new();
    for_each_float(module, |_, id, _: FloatTensor<B>| {
        let gradient = gradients.remove::<B::InnerBackend, 1>(id);
        all.extend(gradient.map(|(gradient, _)| (id, gradient)));
    });
    // Entries that belong to no parameter are kept for the wrapped optimizer.
    let first = gradients.grads.into_iter().next();
    let mut merged = first.map_or_else(GradientsParams::new, |(gradients, _)| gradients);
    for (id, gradient) in all {
        merged.register(id, gradient);
    }
    merged
}

fn take<I: Backend>(gradient: Tensor<I, 1>) -> Option<FloatTensor<I>> {
    Some(gradient.into_primitive().tensor())
}

/// This rank's reduced gradients, in the shapes for the wrapped optimizer, and the positions of their parameters.
///
/// # Errors
///
/// [`ZeroOptimizerError::ForeignGradient`].
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
            let shape = Shape::from(layout.piece_shape(parameter));
            held.push((parameter, I::float_reshape(gradient, shape)));
        }
    }
    Ok(held)
}

/// # Errors
///
/// [`ZeroOptimizerError::ForeignGradient`] unless a gradient has as many elements as expected.
fn check<I: Backend>(
    layout: &Layout,
    parameter: usize,
    gradient: &Option<FloatTensor<I>>,
    expected: usize,
) -> Result<(), ZeroOptimizerError> {
    let known = &layout.parameters()[parameter];
    let elements = gradient
        .as_ref()
        .map(|gradient| gradient.shape().num_elements());
    match elements {
        Some(elements) if elements != expected && known.elements() != 0 => {
            Err(ZeroOptimizerError::ForeignGradient {
                path: known.path.clone(),
                elements,
                expected,
            })
        }
        _ => Ok(()),
    }
}

/// This rank's shards of the parameters, with their positions.
fn cut<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    parameters: &Parameters,
    layout: &Layout,
) -> Vec<(usize, FloatTensor<B>)> {
    let values = parameters.values::<B, M>(module).into_iter();
    let held = values.filter(|(parameter, _)| layout.held(*parameter) > 0);
    let shards = held.map(|(parameter, value)| {
        let shard = cut_one::<B::InnerBackend>(layout, parameter, value);
        (parameter, B::from_inner(shard))
    });
    shards.collect()
}

/// This rank's shard of a parameter.
pub(super) fn cut_one<I: Backend>(
    layout: &Layout,
    parameter: usize,
    value: FloatTensor<I>,
) -> FloatTensor<I> {
    let shard = match layout.holds_all() {
        true => value,
        false => pick::<I>(value, layout.shard(parameter)),
    };
    I::float_reshape(shard, Shape::from(layout.piece_shape(parameter)))
}

/// The sum of the squares of this rank's shard of the gradient. In stage 0 too, though it holds all, so that every stage has the
/// same bits.
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
    let squares = HostRead::start::<I>(I::float_cat(squares, 0)).wait();
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
