//! Ranks, stages and offload on backends that compute asynchronously: several reads from the device
//! are in progress at a time.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module, Param};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::activation::gelu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_update::{Update, UpdateError};
use burn_zero::{
    GroupOptions, HostAdamWConfig, Memory, OffloadConfig, ParameterShards, ProcessGroup,
    ReduceOverRanks, Sharded, Stage, ThreadGroup, ZeroSettings,
};
use tests::compare::{relative_error, values};

tests::on_every_backend!(ranks_are_one_rank, the_host_updates_as_the_device);

const STEPS: usize = 4;
/// The tolerance for gradient sums in another order, after four steps of AdamW, relative to a
/// parameter's largest element.
const ROUNDING: f32 = 2e-5;
/// Rows of a batch, divided over 1 or 2 ranks.
const ROWS: usize = 8;

type Ranked<I> = Sharded<Autodiff<I>>;

/// A model whose sizes are not divisible by the number of ranks.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Param<Tensor<B, 2>>,
    bias: Param<Tensor<B, 1>>,
    last: Param<Tensor<B, 2>>,
}

/// Numbers between -0.5 and 0.5.
fn numbers<B: Backend, const D: usize>(shape: [usize; D], seed: usize) -> Tensor<B, D> {
    let number = |index: usize| ((index * 7919 + seed * 104_729) % 1009) as f32 / 1009.0 - 0.5;
    let numbers: Vec<_> = (0..shape.iter().product()).map(number).collect();
    Tensor::<B, 1>::from_floats(numbers.as_slice(), &Default::default()).reshape(shape)
}

impl<B: Backend> Net<B> {
    fn new() -> Self {
        Self {
            first: Param::from_tensor(numbers([7, 11], 1)),
            bias: Param::from_tensor(numbers([11], 2)),
            last: Param::from_tensor(numbers([11, 3], 3)),
        }
    }

    /// The loss of this rank's rows.
    fn loss(&self, step: usize, rank: usize, ranks: usize) -> Tensor<B, 1> {
        let rows = ROWS / ranks;
        let x = numbers::<B, 2>([ROWS, 7], 10 + step).narrow(0, rank * rows, rows);
        let y = gelu(x.matmul(self.first.val()) + self.bias.val().unsqueeze());
        y.matmul(self.last.val()).square().mean()
    }
}

fn weights<B: Backend>(model: &Net<B>) -> [Vec<f32>; 3] {
    [
        values(model.first.val()),
        values(model.bias.val()),
        values(model.last.val()),
    ]
}

fn distance(found: &[Vec<f32>; 3], expected: &[Vec<f32>; 3]) -> f32 {
    let pairs = found.iter().zip(expected);
    pairs.fold(0.0, |most, (found, expected)| {
        relative_error(found, expected).max(most)
    })
}

fn train<B: AutodiffBackend, O>(
    mut optimizer: O,
    mut model: Net<B>,
    rank: usize,
    ranks: usize,
) -> [Vec<f32>; 3]
where
    Net<B>: AutodiffModule<B>,
    O: Optimizer<Net<B>, B>,
{
    for step in 0..STEPS {
        let loss = model.loss(step, rank, ranks);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.01, model, gradients);
    }
    weights(&model)
}

/// Trains on two ranks, which must end with the same weights.
fn train_on_two<I: Backend, O>(
    sharding: &ZeroSettings,
    optimizer: impl Fn() -> O + Sync,
) -> [Vec<f32>; 3]
where
    O: Optimizer<ParameterShards<Ranked<I>>, Ranked<I>> + 'static,
{
    let trained = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
        let rank = group.rank();
        let group: Arc<dyn ProcessGroup> = Arc::new(group);
        let mut update = Update::new(optimizer()).reduce(sharding.clone(), group)?;
        let model = update.prepare(Net::<Ranked<I>>::new())?;
        Ok::<_, UpdateError>(train(update, model, rank, 2))
    });
    let trained = trained.expect("both ranks end").into_iter();
    let trained: Vec<_> = trained.map(|rank| rank.expect("it trains")).collect();
    assert_eq!(trained[0], trained[1]);
    trained[0].clone()
}

/// Settings with buckets so small that even this model has several.
fn sharding(stage: Stage, gradients: Memory) -> ZeroSettings {
    ZeroSettings {
        bucket_elements: 30,
        gradients,
        ..ZeroSettings::stage(stage)
    }
}

fn ranks_are_one_rank<I: Backend>() {
    let alone = train(AdamWConfig::new().init(), Net::<Autodiff<I>>::new(), 0, 1);
    for stage in Stage::WITH_WHOLE_PARAMETERS {
        let two = train_on_two::<I, _>(&sharding(stage, Memory::Device), || {
            AdamWConfig::new().init()
        });
        let distance = distance(&two, &alone);
        println!("{stage}: {distance}");
        assert!(distance < ROUNDING, "{stage}: {distance}");
    }
}

fn the_host_updates_as_the_device<I: Backend>() {
    // With the defaults of Burn's AdamW.
    let config = HostAdamWConfig {
        epsilon: 1e-5,
        weight_decay: 1e-4,
        ..HostAdamWConfig::default()
    };
    let config = OffloadConfig {
        bucket_elements: 30,
        ..OffloadConfig::new(config)
    };
    let on_host = || config.clone().init().expect("its numbers are valid");
    let device = train(AdamWConfig::new().init(), Net::<Autodiff<I>>::new(), 0, 1);
    let alone = train(on_host(), Net::<Ranked<I>>::new(), 0, 1);
    let off = distance(&alone, &device);
    println!("alone: {off}");
    assert!(off < ROUNDING, "alone: {off}");
    for stage in Stage::WITH_WHOLE_PARAMETERS {
        let device = train_on_two::<I, _>(&sharding(stage, Memory::Device), || {
            AdamWConfig::new().init()
        });
        for memory in [Memory::Device, Memory::Host] {
            let host = train_on_two::<I, _>(&sharding(stage, memory), on_host);
            let off = distance(&host, &device);
            println!("{stage}, gradients in {memory:?}: {off}");
            assert!(off < ROUNDING, "{stage}, gradients in {memory:?}: {off}");
        }
    }
}
