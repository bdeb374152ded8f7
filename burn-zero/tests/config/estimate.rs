//! The estimate is the paper's, byte by byte.

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn_flex::Flex;
use proptest::prelude::*;

use burn_ranks::BufferDtype;
use burn_ranks::shard::Parameter;
use burn_zero::{BatchConfig, Memory, ModelStates, ShardMap, Stage, ZeroConfig, estimate};

const P: u64 = 840_000; // a multiple of 1 to 8

fn config(stage: Stage) -> ZeroConfig {
    ZeroConfig {
        stage,
        ..Default::default()
    }
}

#[test]
fn bytes_are_those_of_the_paper() {
    for ranks in 1..=8 {
        let bytes = |parameter_bytes, stage| {
            let model = ModelStates {
                parameter_bytes,
                ..ModelStates::adam(P)
            };
            estimate(&model, &config(stage), ranks as usize).device_bytes()
        };
        let mixed = |stage| bytes(2, stage);
        assert_eq!(mixed(Stage::DataParallel), 16 * P);
        assert_eq!(mixed(Stage::OptimizerState), 4 * P + 12 * P / ranks);
        assert_eq!(mixed(Stage::Gradients), 2 * P + 14 * P / ranks);
        let single = |stage| bytes(4, stage);
        assert_eq!(single(Stage::DataParallel), 16 * P);
        assert_eq!(single(Stage::OptimizerState), 8 * P + 8 * P / ranks);
        assert_eq!(single(Stage::Gradients), 4 * P + 12 * P / ranks);
    }
}

#[test]
fn two_p_elements_are_sent() {
    for ranks in 1..=8 {
        for stage in Stage::WITH_WHOLE_PARAMETERS {
            let sent =
                estimate(&ModelStates::adam(P), &config(stage), ranks as usize).sent_elements;
            assert_eq!(sent, 2 * P * (ranks - 1) / ranks);
        }
    }
    let batch = BatchConfig {
        gradient_accumulation_steps: Some(4),
        ..Default::default()
    };
    let sent = |stage| {
        let config = ZeroConfig {
            batch,
            ..config(stage)
        };
        estimate(&ModelStates::adam(P), &config, 2).sent_elements
    };
    assert_eq!(sent(Stage::OptimizerState), P);
    assert_eq!(sent(Stage::Gradients), 5 * P / 2);
    // Stage 3 gathers twice a micro-batch.
    assert_eq!(sent(Stage::Parameters), 4 * 3 * P / 2);
    for ranks in 2..=8 {
        let said = estimate(
            &ModelStates::adam(P),
            &config(Stage::Parameters),
            ranks as usize,
        );
        assert_eq!(said.sent_elements, 3 * P * (ranks - 1) / ranks);
        assert_eq!(said.host_parameter_bytes, 4 * P / ranks);
        assert_eq!(said.parameter_shard_bytes, 0);
        let shards_on_device = ZeroConfig {
            shards: Memory::Device,
            ..config(Stage::Parameters)
        };
        let on_device = estimate(&ModelStates::adam(P), &shards_on_device, ranks as usize);
        assert_eq!(on_device.parameter_shard_bytes, 4 * P / ranks);
        assert_eq!(on_device.host_parameter_bytes, 0);
        let more = on_device.peak_device_bytes() - said.peak_device_bytes();
        assert_eq!(more, 4 * P / ranks);
    }
}

#[test]
fn offload_moves_the_state_to_the_host() {
    let host = ZeroConfig {
        offload_optimizer: Memory::Host,
        ..config(Stage::Gradients)
    };
    let whole = estimate(&ModelStates::adam(P), &host, 4);
    assert_eq!((whole.optimizer_bytes, whole.host_bytes), (0, 12 * P / 4));
    assert_eq!((whole.gradient_bytes, whole.host_gradient_bytes), (0, P));
    // One rank alone: the device holds parameters, and gradients on their way.
    let alone = ZeroConfig {
        stage: Stage::DataParallel,
        ..host
    };
    let alone_f32 = estimate(&ModelStates::adam(P), &alone, 1);
    assert_eq!(
        (alone_f32.peak_device_bytes(), alone_f32.host_bytes),
        (8 * P, 12 * P)
    );
    assert_eq!((alone_f32.sent_elements, alone_f32.buffer_bytes), (0, 0));
    let small = ZeroConfig {
        reduce_bucket_size: 1000,
        ..alone.clone()
    };
    let small = estimate(&ModelStates::adam(P), &small, 1);
    assert_eq!(
        (small.peak_device_bytes(), small.kept_host_bytes()),
        (4 * P + 3 * 4000, 16 * P)
    );
    let bf16 = ModelStates {
        parameter_bytes: 2,
        ..ModelStates::adam(P)
    };
    let bf16 = estimate(&bf16, &alone, 1);
    assert_eq!((bf16.peak_device_bytes(), bf16.host_bytes), (4 * P, 12 * P));
}

#[test]
fn parameters_in_host_memory_come_and_go() {
    let model = ModelStates {
        largest_parameter: 1000,
        ..ModelStates::adam(P)
    };
    let config = ZeroConfig {
        offload_param: Memory::Host,
        reduce_bucket_size: 1000,
        ..config(Stage::Parameters)
    };
    // An optimizer on the device returns all of them there.
    let on_device = estimate(&model, &config, 1);
    assert_eq!(on_device.parameter_bytes, 2 * 4000);
    assert_eq!(
        (on_device.shard_bytes, on_device.kept_host_bytes()),
        (4 * P, 4 * P)
    );
    let offloaded = ZeroConfig {
        offload_optimizer: Memory::Host,
        ..config
    };
    // With the optimizer on the host nothing stays on the device: two parameters are in use, three
    // gradients on their way.
    let offloaded = estimate(&model, &offloaded, 1);
    assert_eq!(offloaded.peak_device_bytes(), (2 + 3) * 4000);
    assert_eq!(offloaded.kept_host_bytes(), (4 + 12 + 4) * P);
    // Parameters of unknown sizes are no larger than a bucket.
    let unknown = estimate(
        &ModelStates::adam(P),
        &ZeroConfig {
            reduce_bucket_size: 500,
            offload_param: Memory::Host,
            ..ZeroConfig::default()
        },
        1,
    );
    assert_eq!(unknown.parameter_bytes, 2 * 2000);
}

#[test]
fn gradients_under_way_are_three_buckets_and_no_more_than_there_are() {
    let with_buckets = |stage, elements| ZeroConfig {
        reduce_bucket_size: elements,
        ..config(stage)
    };
    let peak = |stage, elements, ranks| {
        let config = with_buckets(stage, elements);
        estimate(&ModelStates::adam(P), &config, ranks).peak_gradient_bytes()
    };
    assert_eq!(peak(Stage::Gradients, 1000, 4), P + 3 * 4000);
    assert_eq!(peak(Stage::Gradients, P, 4), 4 * P, "one bucket is all");
    assert_eq!(peak(Stage::Gradients, 1000, 1), 4 * P);
    assert_eq!(peak(Stage::OptimizerState, 1000, 4), 4 * P);
    let small = estimate(
        &ModelStates::adam(P),
        &with_buckets(Stage::Gradients, 1000),
        4,
    );
    // In the step a copy of the shard is more than three buckets in backward.
    assert_eq!(small.peak_device_bytes(), 7 * P + P);
    assert_eq!(small.buffer_bytes, 4000);
}

#[test]
fn what_accumulates_is_there_twice() {
    let accumulating = ZeroConfig {
        batch: BatchConfig {
            gradient_accumulation_steps: Some(2),
            ..Default::default()
        },
        ..config(Stage::OptimizerState)
    };
    let model = ModelStates::adam(P);
    let peak = estimate(&model, &accumulating, 2).peak_gradient_bytes();
    assert_eq!(peak, 8 * P);
    let on_host = ZeroConfig {
        offload_optimizer: Memory::Host,
        reduce_bucket_size: 1000,
        ..accumulating
    };
    let on_host = estimate(&model, &on_host, 2);
    assert_eq!(on_host.peak_gradient_bytes(), 3 * 4000);
    assert_eq!(on_host.kept_host_bytes(), 12 * P / 2 + 8 * P);
}

/// A frozen layer with an adapter; running statistics are no parameters.
#[derive(Module, Debug)]
struct Adapted<B: Backend> {
    base: Vec<Linear<B>>,
    adapter: Linear<B>,
    norm: BatchNorm<B>,
}

#[test]
fn frozen_parameters_are_held_without_gradients_and_optimizer_state() {
    type B = Autodiff<Flex>;
    const FROZEN: u64 = 100 * 100 + 100 * 60;
    const TRAINED: u64 = 100 * 10 + 20;
    let linear = |inputs, outputs| {
        let config = LinearConfig::new(inputs, outputs).with_bias(false);
        config.init::<B>(&Default::default())
    };
    let model = ModelStates::of::<B, _>(&Adapted {
        base: vec![linear(100, 100).no_grad(), linear(100, 60).no_grad()],
        adapter: linear(100, 10),
        norm: BatchNormConfig::new(10).init(&Default::default()),
    });
    let said = |stage, ranks| estimate(&model, &config(stage), ranks);

    let alone = said(Stage::DataParallel, 1);
    assert_eq!(alone.parameter_bytes, 4 * (TRAINED + FROZEN));
    assert_eq!(alone.peak_gradient_bytes(), 4 * TRAINED);
    assert_eq!(alone.optimizer_bytes, 8 * TRAINED);
    let offloaded = ZeroConfig {
        offload_param: Memory::Host,
        ..config(Stage::Parameters)
    };
    let offloaded = estimate(&model, &offloaded, 1);
    assert_eq!(offloaded.host_parameter_bytes, 4 * (TRAINED + FROZEN));
    // Two of the largest are more than there are.
    assert_eq!(offloaded.parameter_bytes, 4 * (TRAINED + FROZEN));

    for ranks in [2, 4] {
        let replicated = said(Stage::Gradients, ranks as usize);
        assert_eq!(replicated.parameter_bytes, 4 * (TRAINED + FROZEN));
        assert_eq!(replicated.host_parameter_bytes, 0);
        assert_eq!(replicated.sent_elements, 2 * TRAINED * (ranks - 1) / ranks);
        let sharded = said(Stage::Parameters, ranks as usize);
        assert_eq!(sharded.host_parameter_bytes, 4 * (TRAINED + FROZEN) / ranks);
        let sent = (3 * TRAINED + 2 * FROZEN) * (ranks - 1) / ranks;
        assert_eq!(
            (sharded.sent_elements, sharded.sent_bytes),
            (sent, 4 * sent)
        );
        // Two of the largest unit are more than there are.
        assert_eq!(sharded.unit_bytes, 4 * (TRAINED + FROZEN));
    }
}

#[test]
fn halves_are_sent_in_half_the_bytes() {
    let bf16 = |stage| ZeroConfig {
        communication_dtype: BufferDtype::Bf16,
        ..config(stage)
    };
    let bytes = |stage| estimate(&ModelStates::adam(P), &bf16(stage), 2).sent_bytes;
    // The reduce-scatter and the all-gather of an all-reduce.
    assert_eq!(bytes(Stage::DataParallel), 2 * (P / 2 + P / 2));
    // Parameters are gathered as they are.
    assert_eq!(bytes(Stage::OptimizerState), 2 * P / 2 + 4 * P / 2);
    assert_eq!(bytes(Stage::Gradients), 2 * P / 2 + 4 * P / 2);
}

fn padded(elements: u64, bucket: u64, ranks: u64) -> u64 {
    let config = ZeroConfig {
        reduce_bucket_size: bucket,
        allgather_bucket_size: bucket,
        ..config(Stage::OptimizerState)
    };
    estimate(&ModelStates::adam(elements), &config, ranks as usize).padded_elements
}

#[test]
fn padding_is_by_bucket() {
    assert_eq!(padded(10, 4, 3), 3 + 3 + 3 + 3);
    assert_eq!(padded(10, 100, 4), 12);
    assert_eq!(padded(0, 100, 4), 0);
    assert_eq!(padded(10, 0, 1), 10);
}

proptest! {
    #[test]
    fn shards_and_padding_are_those_of_the_map(elements in 0usize..10_000, bucket in 1usize..16_000, ranks in 1usize..9) {
        let map = ShardMap::flat(vec![Parameter::new("all", elements)], ranks, bucket).unwrap();
        prop_assert_eq!(padded(elements as u64, bucket as u64, ranks as u64), (ranks * map.shard_elements(0)) as u64);
    }

    #[test]
    fn padding_is_less_than_the_ranks(elements in 0u64..1 << 40, bucket in 1u64..1 << 32, ranks in 1u64..2048) {
        let padded = padded(elements, bucket, ranks);
        prop_assert_eq!(padded % ranks, 0);
        prop_assert!(padded >= elements);
        prop_assert!(padded - elements < ranks);
    }
}
