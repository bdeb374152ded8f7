//! A step: gradients of all ranks, the wrapped optimizer on this rank's pieces, parameters for all ranks.

use burn::module::AutodiffModule;
use burn::optim::{LearningRate, Optimizer};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend, TensorMetadata};

use super::gather::{self, Gather};
use super::gradients::Gradients;
use super::parameter_shards::{ParameterShards, shard_id};
use super::parameters::Parameters;
use super::pieces::{Pieces, check_whole, cut, squared_norm};
use super::prepare::attach_to;
use super::zero_optimizer::ZeroOptimizer;
use crate::backend::on_host;
use crate::group::Agree;
use crate::host::HostRead;
use crate::offload::step_on_shards;
use crate::reduce::{Arriving, GradientReducer, Layout, Reduced, StepTag};
use crate::{Memory, ZeroError, ZeroOptimizerError};

impl<O> ZeroOptimizer<O> {
    /// # Errors
    ///
    /// [`ZeroOptimizerError::NotPrepared`], [`ZeroOptimizerError::OtherModel`], [`ZeroOptimizerError::TiedApart`],
    /// [`ZeroOptimizerError::ForeignGradient`]; those of the group.
    pub(super) fn advance<B, M>(
        &mut self,
        lr: LearningRate,
        module: M,
        mut gradients: Gradients,
    ) -> Result<M, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<ParameterShards<B>, B>,
    {
        let device = module.devices().into_iter().next().unwrap_or_default();
        self.take_rank_context::<B>(&device)?;
        let reducer = self
            .reducer
            .clone()
            .ok_or(ZeroOptimizerError::NotPrepared)?;
        let layout = reducer.layout();
        let parameters = Parameters::of::<B, M>(&module);
        parameters.check_same(layout.parameters())?;
        parameters.check_tied()?;

        let arrived = gradients.take::<B, M>(&module, &parameters);
        let at = reducer.next_step(lr);
        let reduced = self.reduce::<B>(&reducer, at, arrived, &device)?;
        self.provide_norm::<B::InnerBackend>(layout, &reduced.held)?;
        for (parameter, gradient) in reduced.held {
            gradients.put::<B>(shard_id(parameter), gradient);
        }
        let shards = ParameterShards::new(cut::<B, M>(&module, &parameters, layout));
        let nodes = parameters.leaf_nodes::<B, M>(&module);
        let (shards, mut on_host) =
            step_on_shards(nodes, || gradients.step(&mut self.inner, lr, shards));

        let pieces = shards
            .into_updated(&mut on_host)
            .map(|(index, piece)| (index, piece.inner()));
        let pieces = pieces.collect();
        let gather = Gather::new(layout, &*self.group, at, pieces, reduced.present, on_host);
        let module = gather::update::<B, M>(module, &parameters, gather)?;
        attach_to::<B, M>(&reducer, &module);
        Ok(module)
    }

    /// Gradients of this rank alone become those of all ranks, as far as this rank holds the parameters.
    fn reduce<B: AutodiffBackend>(
        &self,
        reducer: &GradientReducer,
        at: StepTag,
        arrived: Vec<Option<FloatTensor<B::InnerBackend>>>,
        device: &B::Device,
    ) -> Result<Pieces<B::InnerBackend>, ZeroError> {
        let layout = reducer.layout();
        if self.group.world_size() == 1 || reducer.take_arriving() == Arriving::Reduced {
            let bytes = arrived.iter().flatten().map(bytes_of::<B::InnerBackend>);
            drop(reducer.tracker().hold(bytes.sum()));
            return Ok(Pieces::new(layout, arrived)?);
        }
        let reduced = self.exchange_all::<B::InnerBackend>(reducer, at, arrived)?;
        let parameters = layout.parameters().iter().zip(reduced);
        let gradients = parameters.map(|(parameter, reduced)| {
            let data = reduced.into_piece(parameter)?;
            Some(match reducer.memory() {
                Memory::Device => B::InnerBackend::float_from_data(data, device),
                Memory::Host => on_host::<B::InnerBackend>(data, device),
            })
        });
        Ok(Pieces::new(layout, gradients.collect())?)
    }

    fn exchange_all<I: Backend>(
        &self,
        reducer: &GradientReducer,
        at: StepTag,
        mut arrived: Vec<Option<FloatTensor<I>>>,
    ) -> Result<Vec<Reduced>, ZeroError> {
        check_whole::<I>(reducer.layout(), &arrived)?;
        let hold = |gradient: &FloatTensor<I>| reducer.tracker().hold(bytes_of::<I>(gradient));
        let mut held: Vec<_> = arrived.iter().map(|g| g.as_ref().map(hold)).collect();
        reducer.begin_step(at);
        for (parameter, gradient) in arrived.iter_mut().enumerate().rev() {
            // From here on the exchange counts it.
            drop(held[parameter].take());
            reducer.submit(parameter, gradient.take().map(HostRead::start::<I>));
        }
        reducer.finish()
    }

    /// Hands the norm over all ranks on.
    fn provide_norm<I: Backend>(
        &self,
        layout: &Layout,
        pieces: &[(usize, FloatTensor<I>)],
    ) -> Result<(), ZeroError> {
        let Some(receive) = &self.norm else {
            return Ok(());
        };
        let own = squared_norm::<I>(layout, pieces);
        let all = self.group.agree_sum("squared norm of the gradient", own)?;
        receive(all.sqrt() as f32);
        Ok(())
    }
}

fn bytes_of<I: Backend>(tensor: &FloatTensor<I>) -> usize {
    tensor.shape().num_elements() * tensor.dtype().size()
}
