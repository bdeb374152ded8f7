//! N ranks are one rank with all the data under autocast too.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsParams, MuonConfig, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn::tensor::backend::AutodiffBackend;
use burn_accum::AccumConfig;
use burn_amp::{Autocast, Bf16};
use burn_update::Update;
use burn_zero::{ParameterShards, Partition, ProcessGroup, SingleRank, Stage, ZeroSettings};

use super::support::*;

type Mixed = Autocast<B, Bf16>;

const STEPS: usize = 5;
/// The largest relative error of rounding to bf16. A gradient of a weight is rounded once on each
/// rank before the ranks' gradients are averaged in f32, and on one rank once in all: SGD's steps
/// differ by this, relative to the largest of a parameter.
const ROUNDING: f32 = 1.0 / 256.0;

/// How far each element of each parameter has moved.
fn moved(parameters: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let initial = super::support::parameters(&Net::<Plain>::new(&Default::default()));
    let each = initial.iter().zip(parameters);
    each.map(|(initial, now)| {
        now.iter()
            .zip(initial)
            .map(|(now, initial)| now - initial)
            .collect()
    })
    .collect()
}

fn train<A, O>(group: Arc<dyn ProcessGroup>, stage: Stage, optimizer: O) -> Vec<Vec<f32>>
where
    A: AutodiffBackend,
    O: Optimizer<ParameterShards<A>, A> + 'static,
{
    let (rank, ranks) = (group.rank(), group.world_size());
    let mut update = over_ranks(optimizer, group, small_buckets(stage)).unwrap();
    let net = Net::<A>::new(&Default::default());
    let mut model = update.prepare(net).unwrap();
    for step in 0..STEPS {
        let gradients = update.backward(&model, model.loss(batch(step, rank, ranks)));
        model = update.step(0.05, model, gradients).unwrap();
    }
    moved(&parameters(&model))
}

fn alone<A, O>(optimizer: O) -> Vec<Vec<f32>>
where
    A: AutodiffBackend,
    O: Optimizer<ParameterShards<A>, A> + 'static,
{
    train::<A, O>(Arc::new(SingleRank::new()), Stage::Gradients, optimizer)
}

fn assert_parity<O: Optimizer<ParameterShards<Mixed>, Mixed> + 'static>(
    expected: &[Vec<f32>],
    optimizer: impl Fn() -> O + Sync,
) {
    for world_size in 1..=4 {
        let ranks = |stage| {
            on_ranks(world_size, |group| {
                Ok(train::<Mixed, O>(group, stage, optimizer()))
            })
        };
        let stages = STAGES.map(ranks);
        let distance = distance(expected, &stages[0]);
        assert!(distance < ROUNDING, "{world_size} ranks: {distance}");
        assert_eq!(stages[0], stages[1], "{world_size} ranks");
        assert_eq!(stages[0], stages[2], "{world_size} ranks");
    }
}

#[test]
fn ranks_are_one_rank_on_all_data_under_autocast() {
    let sgd = alone::<Mixed, _>(SgdConfig::new().init());
    let full = alone::<B, _>(SgdConfig::new().init());
    // Tight enough to tell one precision from the other.
    assert!(
        distance(&full, &sgd) > ROUNDING,
        "it did not compute in bf16"
    );
    assert_parity(&sgd, || SgdConfig::new().init());
}

/// Adam's step of an element whose gradient is all rounding is as long as any: against one batch of
/// all rows, which rounds otherwise, no tolerance would tell a fault from it. One rank that takes
/// each rank's rows as a micro-batch rounds as the ranks do, bit for bit.
#[test]
fn ranks_are_the_micro_batches_of_one_rank_under_autocast() {
    let adamw = || AdamWConfig::new().init();
    for world_size in 1..=4 {
        let one = micro_batches(world_size);
        for stage in STAGES {
            let ranks = on_ranks(world_size, |group| {
                Ok(train::<Mixed, _>(group, stage, adamw()))
            });
            assert_eq!(one, ranks, "{world_size} ranks, {stage}");
        }
    }
}

/// One rank, plain, that accumulates the rows of as many ranks.
fn micro_batches(ranks: usize) -> Vec<Vec<f32>> {
    type A = Autocast<Plain, Bf16>;
    let update = Update::new(AdamWConfig::new().init());
    let mut update = update.accumulate(AccumConfig::mean(ranks)).unwrap();
    let mut model = Net::<A>::new(&Default::default());
    for step in 0..STEPS {
        for rank in 0..ranks {
            let loss = model.loss(batch(step, rank, ranks));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = update.step(0.05, model, gradients).unwrap();
        }
    }
    moved(&parameters(&model))
}

#[derive(Module, Debug)]
struct Matrices<B: Backend> {
    layers: Vec<Param<Tensor<B, 2>>>,
}

impl Matrices<Mixed> {
    fn new() -> Self {
        let layers = (0..3).map(|seed| {
            let weight = TensorData::new(values(49, seed), [7, 7]);
            Param::from_data(weight, &Default::default())
        });
        Self {
            layers: layers.collect(),
        }
    }

    fn gradients(&self, step: usize) -> GradientsParams {
        let layers = self.layers.iter();
        let y = layers.fold(batch(step, 0, 1), |x, layer| x.matmul(layer.val()).tanh());
        let loss = y.cast(burn::tensor::DType::F32).square().mean();
        GradientsParams::from_grads(loss.backward(), self)
    }
}

/// Muon multiplies matrices in the optimizer, which autocast must leave in f32 whoever computed the
/// gradient. All ranks have the same data, whose mean is that of one, bit for bit.
#[test]
fn gradients_from_the_host_are_gradients() {
    let train = |ranks: usize, stage: Stage| {
        on_ranks(ranks, |group| {
            let settings = ZeroSettings {
                partition: Partition::Whole,
                ..small_buckets(stage)
            };
            let mut update = over_ranks(MuonConfig::new().init(), group, settings)?;
            let mut model = update.prepare(Matrices::new())?;
            for step in 0..STEPS {
                let gradients = model.gradients(step);
                model = update.step(0.05, model, gradients)?;
            }
            Ok(parameters(&model))
        })
    };
    let one = train(1, Stage::OptimizerState);
    for stage in STAGES {
        assert_eq!(train(2, stage), one, "{stage:?}");
    }
}

/// So are the sums of an open window in a record.
#[test]
fn sums_from_a_record_are_gradients() {
    let train = |resumes: bool| {
        let windows = || {
            let update = Update::<Matrices<Mixed>, Mixed>::new(MuonConfig::new().init());
            update.accumulate(AccumConfig::mean(2)).unwrap()
        };
        let (mut model, mut update) = (Matrices::new(), windows());
        for step in 0..4 {
            let gradients = model.gradients(step);
            model = update.step(0.05, model, gradients).unwrap();
            if resumes {
                let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
                let bytes = Recorder::<Mixed>::record(&recorder, update.record(), ()).unwrap();
                let record = Recorder::<Mixed>::load(&recorder, bytes, &Default::default());
                update = windows().load(record.unwrap()).unwrap();
            }
            model = update.flush(0.05, model).unwrap();
        }
        parameters(&model)
    };
    assert_eq!(train(true), train(false));
}
