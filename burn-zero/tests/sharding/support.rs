//! Models, data and training loops that the laws share.

#[path = "../support/parameters.rs"]
mod parameters_of;
#[path = "../support/values.rs"]
mod values_of;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn::tensor::backend::AutodiffBackend;
use burn_checkpoint::Remat;
use burn_flex::Flex;
use burn_update::{Update, UpdateError};
use burn_zero::record::{ShardedRecord, TensorSlice, TrainingState};
use burn_zero::{
    GroupOptions, ParameterShards, ProcessGroup, RankReduction, ReduceOverRanks, Sharded,
    ShardingFault, Stage, ThreadGroup, ZeroError, ZeroSettings,
};

pub use parameters_of::parameters;
pub use values_of::values;

pub type Plain = Autodiff<Flex>;
pub type B = Sharded<Autodiff<Remat<Flex>>>;

/// Those in which a rank may leave parameters out that others use.
pub const STAGES: [Stage; 3] = Stage::WITH_WHOLE_PARAMETERS;

pub const WITH_PARAMETERS: [Stage; 4] = [
    Stage::DataParallel,
    Stage::OptimizerState,
    Stage::Gradients,
    Stage::Parameters,
];

/// Several buckets even of a small model.
pub fn small_buckets(stage: Stage) -> ZeroSettings {
    ZeroSettings {
        bucket_elements: 40,
        ..ZeroSettings::stage(stage)
    }
}

/// Sizes that divide by nothing, a weight that is used twice, one that is used on some ranks only,
/// and one that is never.
#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    pub first: Linear<B>,
    tied: Param<Tensor<B, 2>>,
    last: Linear<B>,
    pub sometimes: Param<Tensor<B, 1>>,
    never: Param<Tensor<B, 1>>,
}

impl<B: Backend> Net<B> {
    /// The same in every process and thread.
    pub fn new(device: &B::Device) -> Self {
        let weight = |elements: usize, seed: usize| {
            let values = values(elements, seed);
            Tensor::<B, 1>::from_data(values.as_slice(), device)
        };
        let mut first = LinearConfig::new(7, 11).init(device);
        first.weight = Param::from_tensor(weight(77, 1).reshape([7, 11]));
        first.bias = Some(Param::from_tensor(weight(11, 2)));
        let mut last = LinearConfig::new(11, 3).init(device);
        last.weight = Param::from_tensor(weight(33, 3).reshape([11, 3]));
        last.bias = Some(Param::from_tensor(weight(3, 4)));
        Self {
            first,
            tied: Param::from_tensor(weight(11 * 13, 5).reshape([11, 13])),
            last,
            sometimes: Param::from_tensor(weight(5, 6)),
            never: Param::from_tensor(weight(2, 7)),
        }
    }

    pub fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let y = gelu(self.first.forward(x));
        let z = gelu(y.clone().matmul(self.tied.val()));
        let z = z.matmul(self.tied.val().transpose()) + y;
        self.last.forward(z).square().mean()
    }
}

/// Examples of one rank; 12 rows are cut for 1, 2, 3 or 4 ranks.
pub const ROWS: usize = 12;

/// The rows of `rank`, as a batch.
pub fn batch<B: Backend>(step: usize, rank: usize, world_size: usize) -> Tensor<B, 2> {
    let device = Default::default();
    let all = values(ROWS * 7, 100 + step);
    let all = Tensor::<B, 1>::from_data(all.as_slice(), &device).reshape([ROWS, 7]);
    let rows = ROWS / world_size;
    all.narrow(0, rank * rows, rows)
}

/// Trains for `steps` steps with an optimizer of Burn.
pub fn train_plain<O: Optimizer<Net<Plain>, Plain>>(
    mut optimizer: O,
    steps: usize,
) -> Vec<Vec<f32>> {
    let device = Default::default();
    let mut model = Net::<Plain>::new(&device);
    for step in 0..steps {
        let loss = model.loss(batch(step, 0, 1));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.05, model, gradients);
    }
    parameters(&model)
}

/// Runs `rank` on as many threads, which must all give the same.
pub fn on_ranks<R: PartialEq + Send + core::fmt::Debug>(
    world_size: usize,
    rank: impl Fn(Arc<dyn ProcessGroup>) -> Result<R, UpdateError> + Sync,
) -> R {
    let mut results = on_each_rank(world_size, rank)
        .into_iter()
        .map(Result::unwrap);
    let first = results.next().unwrap();
    for (rank, other) in results.enumerate() {
        assert_eq!(first, other, "rank {} differs from rank 0", rank + 1);
    }
    first
}

/// Runs `rank` on as many threads.
pub fn on_each_rank<R: Send>(
    world_size: usize,
    rank: impl Fn(Arc<dyn ProcessGroup>) -> R + Sync,
) -> Vec<R> {
    ThreadGroup::spawn(world_size, GroupOptions::default(), |group| {
        rank(Arc::new(group))
    })
    .unwrap()
}

/// An update by `optimizer`, over the ranks of `group`.
pub fn over_ranks<M, A>(
    optimizer: impl Optimizer<ParameterShards<A>, A> + 'static,
    group: Arc<dyn ProcessGroup>,
    settings: ZeroSettings,
) -> Result<Update<M, A>, UpdateError>
where
    M: AutodiffModule<A> + 'static,
    A: AutodiffBackend,
{
    Update::new(optimizer).reduce(settings, group)
}

/// As [`over_ranks`], with a handle to what the update has prepared.
pub fn reduced<M, A>(
    optimizer: impl Optimizer<ParameterShards<A>, A> + 'static,
    group: Arc<dyn ProcessGroup>,
    settings: ZeroSettings,
) -> Result<(Update<M, A>, RankReduction), UpdateError>
where
    M: AutodiffModule<A> + 'static,
    A: AutodiffBackend,
{
    let reduction = RankReduction::new(settings, group)?;
    let update = Update::new(optimizer).reduce_by(&reduction)?;
    Ok((update, reduction))
}

/// What the reduction of an update refused.
pub fn refused_by_reduction(error: &UpdateError) -> Option<&ShardingFault> {
    match error.cause() {
        Some(ZeroError::Sharding(refused)) => Some(refused),
        _ => None,
    }
}

/// Trains for `steps` steps on as many ranks.
pub fn train_sharded<O>(
    world_size: usize,
    sharding: &ZeroSettings,
    optimizer: impl Fn() -> O + Sync,
    steps: usize,
) -> Vec<Vec<f32>>
where
    O: Optimizer<ParameterShards<B>, B> + 'static,
{
    on_ranks(world_size, |group| {
        let rank = group.rank();
        let mut update = over_ranks(optimizer(), group, sharding.clone())?;
        let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
        for step in 0..steps {
            let loss = model.loss(batch(step, rank, world_size));
            let gradients = update.backward(&model, loss);
            model = update.step(0.05, model, gradients)?;
        }
        Ok(parameters(&model))
    })
}

/// The largest difference, relative to the largest element of each parameter.
pub fn distance(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len());
    let each = a.iter().zip(b).map(|(a, b)| {
        assert_eq!(a.len(), b.len());
        let largest = a.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        let difference = a
            .iter()
            .zip(b)
            .fold(0.0_f32, |d, (a, b)| d.max((a - b).abs()));
        difference / largest
    });
    each.fold(0.0, f32::max)
}

/// All that is in the last record, however it is cut.
pub fn contents(dir: &Path) -> (BTreeMap<String, Vec<u8>>, TrainingState) {
    let mut record = ShardedRecord::open(dir, None).unwrap();
    let tensors: Vec<_> = record.tensors().collect();
    let tensors = tensors.into_iter().map(|tensor| {
        let bytes = record.read(&TensorSlice::whole(tensor.clone())).unwrap();
        (tensor.name, bytes)
    });
    let tensors = tensors.collect();
    (tensors, record.state().clone())
}
