//! The optimizer's state goes from any number of ranks to any other, bit for bit.

use std::collections::BTreeMap;

use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::TensorData;
use burn_flex::Flex;
use burn_zero::{
    OffloadConfig, ShardState, Shards, Stage, StateSlot, StateTensor, ZeroOptimizer, offload,
};

use super::support::*;

pub type Whole = BTreeMap<String, Vec<f32>>;

/// The tensors of all ranks, whole; each element must come from one rank.
pub fn put_together(states: &[ShardState]) -> Whole {
    let mut whole = Whole::new();
    for StateTensor { slot, data } in states.iter().flat_map(|state| &state.tensors) {
        let elements = slot.shape.iter().product();
        let tensor = whole
            .entry(slot.name.clone())
            .or_insert(vec![f32::NAN; elements]);
        let mut values = data.iter::<f32>();
        for element in slot.ranges.iter().cloned().flatten() {
            assert!(tensor[element].is_nan(), "{} {element} twice", slot.name);
            tensor[element] = values.next().unwrap();
        }
    }
    assert!(whole.values().flatten().all(|value| !value.is_nan()));
    whole
}

/// Trains a little and saves.
fn save<O: Optimizer<Shards<B>, B>>(
    world_size: usize,
    stage: Stage,
    inner: &(impl Fn() -> O + Sync),
) -> Vec<ShardState> {
    let states = on_each_rank(world_size, |group| {
        let rank = group.rank();
        let mut optimizer = ZeroOptimizer::new(inner(), group, small_buckets(stage)).unwrap();
        let mut model = optimizer
            .prepare::<B, _>(Net::new(&Default::default()))
            .unwrap();
        for step in 0..3 {
            let loss = model.loss(batch(step, rank, world_size));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.05, model, gradients);
        }
        optimizer.to_state::<B>().unwrap()
    });
    assert!(states.iter().all(|state| state.rest == states[0].rest));
    states
}

/// What a rank asks for.
pub fn part(slots: &[StateSlot], whole: &Whole, rest: &serde_json::Value) -> ShardState {
    let tensors = slots.iter().map(|slot| {
        let all = &whole[&slot.name];
        let elements: Vec<_> = slot
            .ranges
            .iter()
            .flat_map(|range| all[range.clone()].to_vec())
            .collect();
        let data = TensorData::new(elements.clone(), [elements.len()]);
        StateTensor {
            slot: slot.clone(),
            data,
        }
    });
    ShardState {
        tensors: tensors.collect(),
        rest: rest.clone(),
    }
}

/// Loads and saves again.
fn load<O: Optimizer<Shards<B>, B>>(
    world_size: usize,
    stage: Stage,
    inner: &(impl Fn() -> O + Sync),
    whole: &Whole,
    rest: &serde_json::Value,
) -> Vec<ShardState> {
    on_each_rank(world_size, |group| {
        let device = Default::default();
        let mut optimizer = ZeroOptimizer::new(inner(), group, small_buckets(stage)).unwrap();
        optimizer.prepare::<B, _>(Net::new(&device)).unwrap();
        let state = part(&optimizer.state_slots(rest).unwrap(), whole, rest);
        optimizer.load_state::<B>(state, &device).unwrap();
        optimizer.to_state::<B>().unwrap()
    })
}

fn assert_same_on_any_number_of_ranks<O: Optimizer<Shards<B>, B>>(inner: &(impl Fn() -> O + Sync)) {
    for (from, stage) in [
        (4, Stage::Gradients),
        (1, Stage::OptimizerState),
        (2, Stage::DataParallel),
    ] {
        let saved = save(from, stage, inner);
        let whole = put_together(&saved);
        assert!(
            whole
                .keys()
                .any(|name| name.starts_with("tied.") && name.ends_with(".moment_1"))
        );
        assert!(whole.keys().all(|name| !name.starts_with("never")));
        for world_size in 1..=4 {
            for stage in STAGES {
                let loaded = load(world_size, stage, inner, &whole, &saved[0].rest);
                assert_eq!(
                    whole,
                    put_together(&loaded),
                    "{from} to {world_size}, {stage:?}"
                );
                assert_eq!(saved[0].rest, loaded[0].rest);
            }
        }
    }
}

#[test]
fn it_is_the_same_on_any_number_of_ranks() {
    assert_same_on_any_number_of_ranks(&|| AdamWConfig::new().init());
}

#[test]
fn so_is_that_on_the_host() {
    for ratio in [0.5, 1.0] {
        let config = OffloadConfig {
            ratio,
            ..OffloadConfig::default()
        };
        assert_same_on_any_number_of_ranks(&|| config.clone().init::<B>().unwrap());
    }
    assert_same_on_any_number_of_ranks(&|| offload::<Flex, _>(AdamWConfig::new().init()));
}

#[test]
fn a_state_of_another_model_is_named() {
    let saved = save(1, Stage::OptimizerState, &|| AdamWConfig::new().init());
    let rest = saved[0].rest.to_string().replace("\"tied\"", "\"other\"");
    let rest = serde_json::from_str(&rest).unwrap();
    let error = on_ranks(1, |group| {
        let mut optimizer = ZeroOptimizer::new(
            AdamWConfig::new().init(),
            group,
            small_buckets(Stage::OptimizerState),
        )?;
        optimizer.prepare::<B, _>(Net::new(&Default::default()))?;
        Ok(optimizer.state_slots(&rest).unwrap_err().to_string())
    });
    assert!(error.contains("no parameter other"), "{error}");
}
