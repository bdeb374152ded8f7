//! The wrapper: the step of a shard.

use core::fmt;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::tensor::TensorMetadata;
use burn::tensor::backend::AutodiffBackend;
use burn_backend::Backend;
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;

use super::gather::{self, Updated};
use super::gradients::Gradients;
use super::parameters::Parameters;
use super::pieces::{Pieces, check_whole, cut, squared_norm};
use super::prepare::{attach_to, check_optimizer, prepare};
use super::seat::{Answer, Seat};
use super::shards::{Shards, piece_id};
use crate::group::{Agree, ProcessGroup, ReduceOp, SingleRank};
use crate::host::HostRead;
use crate::reduce::{Arriving, Exchange, Layout, Reduced};
use crate::{Recorder, Sharding, ShardingError, ZeroError, raise};

/// An optimizer that runs on this rank's shard of the parameters, with the gradients of all ranks.
///
/// ```text
/// step(gradients):                            # stage 2: pieces of reduced ones, already
///     stage 0:  gradients = all_reduce(gradients)
///     stage 1:  pieces = reduce_scatter(gradients)
///     inner.step(this rank's pieces)          # stage 0: all
///     parameters = all_gather(pieces)         # stage 0: nothing to do
/// ```
///
/// The wrapped optimizer is any of Burn's: it meets [`Shards`] instead of the module, and keeps the state of those only. With
/// one rank a step is the wrapped optimizer's, bit for bit. A parameter that has a gradient on some ranks takes part with
/// zeros on the others; one that has none on any rank is left alone, as Burn does.
///
/// # Order of layers
///
/// `scaler.wrap(MultiSteps::new(zero, accumulation)?)`, and in `zero` the clipping, and in that the optimizer: a loss scaler
/// and an accumulation decide alike on all ranks, for a gradient that is non-finite on one is so on all. What needs
/// the norm of the gradient over all parameters goes inside and is handed it: [`with_norm`](Self::with_norm).
///
/// ```
/// use std::sync::Arc;
/// use burn::{backend::Autodiff, nn, optim::{AdamWConfig, GradientsParams, Optimizer}, prelude::*};
/// use burn_zero::{GroupOptions, ProcessGroup, Sharded, Sharding, Stage, ThreadGroup, ZeroOptimizer};
///
/// type B = Sharded<Autodiff<burn_flex::Flex>>;
///
/// let weights = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
///     let device = Default::default();
///     let rank = group.rank();
///     let model: nn::Linear<B> = nn::LinearConfig::new(4, 3).init(&device);
///
///     let adam = AdamWConfig::new().init();
///     let mut optimizer = ZeroOptimizer::new(adam, Arc::new(group), Sharding::stage(Stage::Gradients))?;
///     let mut model = optimizer.prepare(model)?; // rank 0's weights
///     for _ in 0..3 {
///         let x = Tensor::<B, 2>::full([8, 4], 1.0 + rank as f32, &device); // each rank has its own data
///         let gradients = GradientsParams::from_grads(model.forward(x).mean().backward(), &model);
///         model = optimizer.step(1e-2, model, gradients);
///     }
///     Ok::<_, burn_zero::ZeroError>(model.weight.val().into_data())
/// })?;
/// assert_eq!(weights[0].as_ref().unwrap(), weights[1].as_ref().unwrap());
/// # Ok::<(), burn_zero::ZeroError>(())
/// ```
///
/// A clone has its own optimizer state and shares the group.
///
/// # Panics
///
/// A step panics with the message of a [`ZeroError`]: those of the group, [`ShardingError::NotPrepared`],
/// [`ShardingError::OtherModel`].
///
/// # Cost
///
/// With `P` parameters and `N` ranks a rank sends `2 P (N - 1) / N` elements a step in every stage; under stage 2 the
/// gradients' half of it once a backward pass. It holds `1 / N` of the optimizer's state in stages 1 and 2, and in stage
/// 2 of the gradients, plus at most three buckets in backward: one that backward fills, one that waits, one that is copied into the
/// buffer that is sent. Gradients and parameters of every backend go through the host's memory, those of a GPU over its bus.
/// [`estimate`](crate::estimate()) has all figures, [`peak_gradient_bytes`](Self::peak_gradient_bytes) what came of it.
///
/// Under MPI a panic ends the whole job, with its message: see [`OnPanic`](crate::group::OnPanic).
pub struct ZeroOptimizer<O> {
    pub(super) inner: O,
    pub(super) group: Arc<dyn ProcessGroup>,
    origin: Origin,
    sharding: Sharding,
    norm: Option<NormReceiver>,
    pub(super) exchange: Option<Arc<Exchange>>,
}

/// Who brings the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// Whoever made the optimizer.
    Own,
    /// The strategy of the Learner that the optimizer is in; until then there is one rank.
    Learner,
}

type NormReceiver = Arc<dyn Fn(f32) + Send + Sync>;

impl<O: Clone> Clone for ZeroOptimizer<O> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            group: self.group.clone(),
            origin: self.origin,
            sharding: self.sharding.clone(),
            norm: self.norm.clone(),
            exchange: self.exchange.clone(),
        }
    }
}

impl<O> ZeroOptimizer<O> {
    /// Wraps `inner`, which is the same on all ranks.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Disagreement`] if the ranks' settings differ; those of the group.
    pub fn new(
        inner: O,
        group: Arc<dyn ProcessGroup>,
        sharding: Sharding,
    ) -> Result<Self, ZeroError> {
        let optimizer = core::any::type_name::<O>();
        group.agree_equal("sharding", &format!("{sharding:?} of {optimizer}"))?;
        Ok(Self {
            inner,
            group,
            origin: Origin::Own,
            sharding,
            norm: None,
            exchange: None,
        })
    }

    /// Wraps `inner` for a `Learner` that trains with [`ZeroStrategy`](crate::ZeroStrategy), which brings the ranks and
    /// prepares the model. What cannot be sharded is refused there, before the first step.
    ///
    /// Its record is that of the whole model, as the wrapped optimizer would write it without ranks: it is loaded by
    /// any number of ranks, and by the wrapped optimizer alone.
    pub fn in_learner(inner: O, sharding: Sharding) -> Self {
        Self {
            inner,
            group: Arc::new(SingleRank::new()),
            origin: Origin::Learner,
            sharding,
            norm: None,
            exchange: None,
        }
    }

    /// Hands the norm of the gradient over all parameters and ranks to `receive` before each step of the wrapped optimizer.
    ///
    /// For clipping by the global norm: burn-accum's `ClipGlobalNorm` takes it through `clip.norm().provide(value)`.
    /// Costs one pass over this rank's pieces, a host read and a collective of one element.
    #[must_use]
    pub fn with_norm(mut self, receive: impl Fn(f32) + Send + Sync + 'static) -> Self {
        self.norm = Some(Arc::new(receive));
        self
    }

    /// Makes of this rank's number of items (tokens) in a micro-batch the number that its reduced gradients count: the sum over
    /// all ranks, or their mean where [`Sharding::reduction`] is the mean.
    ///
    /// For burn-accum's `Normalization::Tokens` where ranks hold different numbers of items:
    /// `MultiSteps::new(zero, config)?.with_items_of_all_ranks(items)`. The update is then the gradient of the sum of all losses of all
    /// ranks and micro-batches, divided by the number of all items. One small collective a call.
    ///
    /// # Panics
    ///
    /// The closure panics with the message of a [`ZeroError`] of the group.
    pub fn items_of_all_ranks(&self) -> impl Fn(f64) -> f64 + Send + Sync + use<O> + 'static {
        let (own_group, origin, reduction) =
            (self.group.clone(), self.origin, self.sharding.reduction);
        move |own| {
            // In a Learner the ranks are those of the thread that trains.
            let seat = Seat::here().filter(|_| origin == Origin::Learner);
            let group = seat.as_ref().map_or(&own_group, |seat| &seat.group);
            let all = raise(group.agree_sum("items of a micro-batch", own));
            match reduction {
                ReduceOp::Sum => all,
                ReduceOp::Mean => all / group.world_size() as f64,
            }
        }
    }

    /// The wrapped optimizer.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// Gives the wrapped optimizer back, with the state of this rank's shard.
    pub fn into_inner(self) -> O {
        self.inner
    }

    /// The ranks.
    pub fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.group
    }

    /// The settings.
    pub fn sharding(&self) -> &Sharding {
        &self.sharding
    }

    /// The most bytes of gradients that this rank ever held at once since it got to know the model, as counted where they come and go:
    /// under stage 2 during backward (its shard and the buckets under way), in the other stages whole when they arrive at the step.
    /// Sums of an accumulation around this optimizer are not among them. 0 before the first step.
    ///
    /// [`Estimate::peak_gradient_bytes`](crate::Estimate::peak_gradient_bytes) is what to expect.
    pub fn peak_gradient_bytes(&self) -> u64 {
        let exchange = self.exchange.as_ref();
        exchange.map_or(0, |exchange| exchange.gauge().peak_bytes())
    }

    /// Gets to know a model and gives every rank the weights of rank 0: before the first forward, on the thread that
    /// trains, and after its weights were loaded or its parameters frozen. All ranks call it.
    ///
    /// Costs a broadcast of all weights, in which rank 0 sends them about twice, a comparison of all paths and shapes, and some steps of
    /// the wrapped optimizer on a few elements, to see that it can be sharded.
    ///
    /// # Errors
    ///
    /// [`ShardingError::NotElementwise`], [`ShardingError::LocalNorm`], [`ShardingError::NotSharded`],
    /// [`ShardingError::UnsupportedDtype`]; [`ZeroError::Disagreement`] if the ranks' models differ; those of the group.
    pub fn prepare<B, M>(&mut self, module: M) -> Result<M, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<Shards<B>, B>,
    {
        let device = module.devices().into_iter().next().unwrap_or_default();
        check_optimizer::<B, O>(&self.inner, &self.sharding, &device)?;
        let optimizer = core::any::type_name::<O>();
        let receives_norm = self.norm.is_some();
        let (module, exchange) = prepare::<B, M>(
            module,
            &self.group,
            &self.sharding,
            optimizer,
            receives_norm,
        )?;
        attach_to::<B, M>(&exchange, self.group.world_size(), &module);
        self.exchange = Some(exchange);
        Ok(module)
    }

    /// Saves and loads whole trainings with this optimizer in them, however it is wrapped: see [`Recorder`].
    ///
    /// # Errors
    ///
    /// [`ShardingError::NotPrepared`]: in a `Learner` its own records are what is saved.
    pub fn recorder(&self) -> Result<Recorder, ZeroError> {
        let exchange = self.exchange.clone().ok_or(ShardingError::NotPrepared)?;
        Ok(Recorder::new(exchange, self.sharding.clone()))
    }

    /// Takes the ranks that a strategy has left on this thread.
    fn take_seat<B: AutodiffBackend>(&mut self, device: &B::Device) -> Result<(), ZeroError>
    where
        O: Optimizer<Shards<B>, B>,
    {
        if self.exchange.is_some() || self.origin == Origin::Own {
            return Ok(());
        }
        let seat = Seat::here().ok_or(ShardingError::NoStrategy)?;
        let setting = seat.setting().ok_or(ShardingError::NoStrategy)?;
        self.group = seat.group.clone();
        self.exchange = Some(setting.exchange.clone());
        self.cut_state::<B>(&setting.ids, device)
    }

    fn advance<B, M>(
        &mut self,
        lr: LearningRate,
        module: M,
        mut gradients: Gradients,
    ) -> Result<M, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<Shards<B>, B>,
    {
        let device = module.devices().into_iter().next().unwrap_or_default();
        self.take_seat::<B>(&device)?;
        let exchange = self.exchange.clone().ok_or(ShardingError::NotPrepared)?;
        let layout = exchange.layout();
        let parameters = Parameters::of::<B, M>(&module);
        parameters.check_same(layout.parameters())?;

        let arrived = gradients.take::<B, M>(&module, &parameters);
        let reduced = self.reduce::<B>(&exchange, arrived, &device)?;
        self.provide_norm::<B::InnerBackend>(layout, &reduced.held)?;
        for (parameter, gradient) in reduced.held {
            gradients.put::<B>(piece_id(parameter), gradient);
        }
        let shards = Shards::new(cut::<B, M>(&module, &parameters, layout));
        let shards = gradients.step(&mut self.inner, lr, shards);

        let pieces = shards
            .into_pieces()
            .map(|(index, piece)| (index, B::inner(piece)));
        let updated = Updated::new(layout, &*self.group, pieces.collect(), reduced.present);
        let module = gather::update::<B, M>(module, &parameters, updated)?;
        attach_to::<B, M>(&exchange, self.group.world_size(), &module);
        Ok(module)
    }

    /// Gradients of this rank alone become those of all ranks, as far as this rank holds the parameters.
    fn reduce<B: AutodiffBackend>(
        &self,
        exchange: &Exchange,
        arrived: Vec<Option<FloatTensor<B::InnerBackend>>>,
        device: &B::Device,
    ) -> Result<Pieces<B::InnerBackend>, ZeroError> {
        let layout = exchange.layout();
        if self.group.world_size() == 1 || exchange.take_arriving() == Arriving::Reduced {
            let bytes = arrived.iter().flatten().map(bytes_of::<B::InnerBackend>);
            drop(exchange.gauge().hold(bytes.sum()));
            return Ok(Pieces::new(layout, arrived)?);
        }
        let reduced = self.exchange_all::<B::InnerBackend>(exchange, arrived)?;
        let parameters = layout.parameters().iter().zip(reduced);
        let gradients = parameters.map(|(parameter, reduced)| {
            let data = reduced.into_piece(parameter)?;
            Some(B::InnerBackend::float_from_data(data, device))
        });
        Ok(Pieces::new(layout, gradients.collect())?)
    }

    fn exchange_all<I: Backend>(
        &self,
        exchange: &Exchange,
        mut arrived: Vec<Option<FloatTensor<I>>>,
    ) -> Result<Vec<Reduced>, ZeroError> {
        check_whole::<I>(exchange.layout(), &arrived)?;
        let hold = |gradient: &FloatTensor<I>| exchange.gauge().hold(bytes_of::<I>(gradient));
        let mut held: Vec<_> = arrived.iter().map(|g| g.as_ref().map(hold)).collect();
        exchange.begin();
        for (parameter, gradient) in arrived.iter_mut().enumerate().rev() {
            // From here on the exchange counts it.
            drop(held[parameter].take());
            exchange.submit(parameter, gradient.take().map(HostRead::start::<I>));
        }
        exchange.finish()
    }

    /// Says who sits here, if the strategy asks; makes a record of all ranks' states, if they trained.
    fn to_seated_record<B: AutodiffBackend>(&self, seat: &Seat) -> Result<O::Record, ZeroError>
    where
        O: Optimizer<Shards<B>, B>,
    {
        match (seat.setting(), &self.exchange) {
            (Some(setting), Some(_)) => {
                seat.call()?;
                return self.to_whole_record::<B>(&setting.ids);
            }
            (Some(_), None) => {} // no step was taken: what was loaded is whole
            (None, _) => seat.answer(Answer {
                optimizer: core::any::type_name::<O>(),
                sharding: self.sharding.clone(),
                receives_norm: self.norm.is_some(),
                refused: check_optimizer::<B, O>(&self.inner, &self.sharding, &Default::default())
                    .err(),
            }),
        }
        Ok(self.inner.to_record())
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

impl<O, M, B> Optimizer<M, B> for ZeroOptimizer<O>
where
    O: Optimizer<Shards<B>, B>,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    /// That of the wrapped optimizer, of this rank's shard; in a `Learner` that of the whole model, as without ranks.
    type Record = O::Record;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        raise(self.advance(lr, module, Gradients::One(grads)))
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        raise(self.advance(lr, module, Gradients::Multi(grads)))
    }

    fn to_record(&self) -> Self::Record {
        match (self.origin, Seat::here()) {
            (Origin::Learner, Some(seat)) => raise(self.to_seated_record::<B>(&seat)),
            _ => self.inner.to_record(),
        }
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        self.inner = self.inner.load_record(record);
        self
    }
}

impl<O: fmt::Debug> fmt::Debug for ZeroOptimizer<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZeroOptimizer")
            .field("inner", &self.inner)
            .field("rank", &self.group.rank())
            .field("world_size", &self.group.world_size())
            .field("sharding", &self.sharding)
            .finish_non_exhaustive()
    }
}
