//! Weights of `LinearLayout::Col`. Burn initialises them at first use from a trained leaf, of which
//! they are a transposition, and its stores write them transposed.

use std::sync::Arc;

use burn::module::Param;
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::{DType, backend::AutodiffBackend};
use burn_flex::Flex;
use burn_ranks::BufferDtype;
use burn_store::{ModuleSnapshot, SafetensorsStore};
use burn_update::Update;
use burn_zero::record::{Keep, TrainingState};
use burn_zero::{
    RankReduction, ReduceOverRanks, SingleRank, Training, ZeroError, consolidate, consolidate_as,
    offload_parameters, read_on_use,
};
use tempfile::tempdir;

use crate::support::{
    B, Plain, WITH_PARAMETERS, distance, on_each_rank, on_ranks, over_ranks, parameters,
    small_buckets,
};

const INPUTS: usize = 4;
const OUTPUTS: usize = 6;

fn columns<B: Backend>(outputs: usize) -> Linear<B> {
    let layer = LinearConfig::new(INPUTS, outputs).with_layout(LinearLayout::Col);
    layer.init(&Default::default())
}

/// Two steps on the same batch.
fn train<B, O>(mut model: Linear<B>, mut optimizer: O) -> Linear<B>
where
    B: AutodiffBackend,
    O: Optimizer<Linear<B>, B>,
{
    for _ in 0..2 {
        let x = Tensor::<B, 1, Int>::arange(0..12, &Default::default());
        let loss = model.forward(x.float().reshape([3, INPUTS])).square();
        let gradients = GradientsParams::from_grads(loss.mean().backward(), &model);
        model = optimizer.step(0.05, model, gradients);
    }
    model
}

/// The same layer with rows first.
fn rows(values: &[Vec<f32>], outputs: usize) -> Linear<Plain> {
    let mut layer = LinearConfig::new(INPUTS, outputs).init(&Default::default());
    let of = |index: usize| Tensor::<Plain, 1>::from_data(&*values[index], &Default::default());
    layer.weight = Param::from_tensor(of(0).reshape([INPUTS, outputs]));
    layer.bias = Some(Param::from_tensor(of(1)));
    layer
}

#[test]
fn they_are_trained_as_weights_of_rows_are() {
    type Made = fn() -> Result<Linear<B>, ZeroError>;
    let lazy: Made = || Ok(columns(OUTPUTS));
    let used: Made = || {
        let layer = columns(OUTPUTS);
        drop(layer.weight.val());
        Ok(layer)
    };
    let offloaded: Made = || offload_parameters::<B, _>(columns(OUTPUTS));
    for stage in WITH_PARAMETERS {
        for ranks in [1, 2] {
            for made in [lazy, used, offloaded] {
                let (start, end) = on_ranks(ranks, |group| {
                    let adam = AdamWConfig::new().init();
                    let mut update = over_ranks(adam, group, small_buckets(stage))?;
                    let model = update.prepare(made()?)?;
                    let start = parameters(&model);
                    Ok((start, parameters(&train(model, update))))
                });
                let expected = train(rows(&start, OUTPUTS), AdamWConfig::new().init());
                let apart = distance(&end, &parameters(&expected));
                assert!(apart < 1e-5, "{stage} on {ranks}: {apart}");
            }
        }
    }
}

#[test]
fn frozen_they_stay_frozen() {
    for stage in WITH_PARAMETERS {
        let (adam, one) = (AdamWConfig::new().init(), Arc::new(SingleRank::new()));
        let mut update = over_ranks(adam, one, small_buckets(stage)).unwrap();
        let model = update.prepare(columns::<B>(OUTPUTS).no_grad());
        assert!(!model.unwrap().weight.is_require_grad(), "{stage}");
    }
}

#[test]
fn consolidated_they_are_as_burns_stores_write_them() {
    // Square, of another shape, and of one row.
    for outputs in [INPUTS, OUTPUTS, 1] {
        for stage in WITH_PARAMETERS {
            let dir = tempdir().unwrap();
            let saved = on_each_rank(2, |group| {
                let reduction = RankReduction::new(small_buckets(stage), group).unwrap();
                let update = Update::new(AdamWConfig::new().init()).reduce_by(&reduction);
                let mut update = update.unwrap();
                let model = update.prepare(columns::<B>(outputs)).unwrap();
                let recorder = reduction.recorder().unwrap();
                let run = Training {
                    model,
                    optimizer: update,
                    scheduler: 0.05,
                };
                let (dir, state) = (dir.path(), TrainingState::at_step(0));
                let saved = recorder.save::<B, _, _, _>(dir, run.by_ref(), state, Keep::All);
                saved.unwrap();
                run.model.weight.val().into_data()
            });
            let file = dir.path().join("model.safetensors");
            consolidate(dir.path(), &file).unwrap();

            let mut loaded = columns::<Flex>(outputs);
            let mut store = SafetensorsStore::from_file(&file);
            loaded.load_from(&mut store).unwrap();
            loaded.weight.val().into_data().assert_eq(&saved[0], true);

            let read = read_on_use::<B, _>(columns(outputs), &file).unwrap();
            let (adam, one) = (AdamWConfig::new().init(), Arc::new(SingleRank::new()));
            let mut update = over_ranks(adam, one, small_buckets(stage)).unwrap();
            let read = update.prepare(read).unwrap();
            assert!(read.weight.is_require_grad(), "{stage}");
            read.weight.val().into_data().assert_eq(&saved[0], true);

            consolidate_as(dir.path(), &file, BufferDtype::Bf16).unwrap();
            let read = read_on_use::<Flex, _>(columns(outputs), &file).unwrap();
            let rounded = saved[0].clone().convert_dtype(DType::BF16);
            let rounded = rounded.convert_dtype(DType::F32);
            read.weight.val().into_data().assert_eq(&rounded, true);
        }
    }
}
