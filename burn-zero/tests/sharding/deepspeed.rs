//! The update of a DeepSpeed file is the one that is built by hand.

use std::sync::Arc;

use burn::tensor::backend::AutodiffBackend;
use burn_accum::{AccumConfig, ClipByNorm};
use burn_amp::{Autocast, F16, GradScalerConfig};
use burn_update::{Update, UpdateError};
use burn_zero::{
    DeepSpeedConfig, FromDeepSpeed, HostAdamWConfig, Memory, PlacedAdamW, ProcessGroup,
    ReduceOverRanks, SingleRank, Stage, ZeroError, ZeroSettings,
};
use serde_json::{Value, json};

use super::support::*;

type Half = Autocast<B, F16>;

const STEPS: usize = 4;

const LR: f64 = 0.05;

fn read(json: &Value) -> DeepSpeedConfig {
    DeepSpeedConfig::from_json(&json.to_string()).unwrap()
}

/// The parameters after windows of two micro-batches on each rank.
fn train<A: AutodiffBackend>(
    group: Arc<dyn ProcessGroup>,
    update: impl Fn(Arc<dyn ProcessGroup>) -> Result<Update<Net<A>, A>, UpdateError>,
) -> Result<Vec<Vec<f32>>, UpdateError> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let mut update = update(group)?;
    let mut model = update.prepare(Net::new(&Default::default()))?;
    for step in 0..STEPS {
        let loss = model.loss(batch(step, rank, ranks));
        let gradients = update.backward(&model, loss);
        model = update.step(LR, model, gradients)?;
    }
    assert_eq!(update.updates(), STEPS as u64 / 2);
    Ok(parameters(&model))
}

#[test]
fn it_trains_bit_for_bit_as_the_one_built_by_hand() {
    for stage in WITH_PARAMETERS {
        for (device, state) in [("none", Memory::Device), ("cpu", Memory::Host)] {
            let config = read(&json!({
                "train_batch_size": 24, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
                "fp16": {"enabled": true, "initial_scale_power": 10},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "eps": 1e-6, "weight_decay": 0.1}},
                "zero_optimization": {"stage": stage.number(), "reduce_bucket_size": 40,
                    "offload_optimizer": {"device": device}},
            }));
            assert_eq!(config.learning_rate, Some(LR));
            let of_file = on_ranks(2, |group| {
                train::<Half>(group, |group| Update::from_deepspeed(&config, group))
            });
            let by_hand = on_ranks(2, |group| {
                train::<Half>(group, |group| {
                    let adamw = HostAdamWConfig {
                        epsilon: 1e-6,
                        weight_decay: 0.1,
                        ..HostAdamWConfig::default()
                    };
                    let settings = ZeroSettings {
                        gradients: state,
                        ..small_buckets(stage)
                    };
                    let scaler = GradScalerConfig {
                        init_scale: 1024.0,
                        growth_interval: 1000,
                        hysteresis: 2,
                        ..GradScalerConfig::default()
                    };
                    Update::new(PlacedAdamW::new(adamw, state)?)
                        .clip_norm(0.5)?
                        .reduce(settings, group)?
                        .accumulate(AccumConfig::mean(2))?
                        .scale(scaler)
                })
            });
            assert_eq!(of_file, by_hand, "{stage}, {device}");
        }
    }
}

#[test]
fn each_key_of_a_file_changes_the_update() {
    let file = json!({
        "train_batch_size": 24, "gradient_accumulation_steps": 2, "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"eps": 1e-2, "weight_decay": 0.1}},
    });
    let trained = |file: &Value| {
        let config = read(file);
        on_ranks(2, |group| {
            train::<B>(group, |group| Update::from_deepspeed(&config, group))
        })
    };
    let before = trained(&file);
    for (key, value) in [
        ("/gradient_clipping", json!(0)),
        ("/optimizer/params/eps", json!(1e-8)),
        ("/optimizer/params/weight_decay", json!(0)),
    ] {
        let mut changed = file.clone();
        *changed.pointer_mut(key).unwrap() = value;
        assert_ne!(trained(&changed), before, "{key}");
    }
}

#[test]
fn what_a_file_leaves_out_is_left_out_of_the_update() {
    let config = read(&json!({
        "train_micro_batch_size_per_gpu": 6, "gradient_clipping": 0, "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW"},
    }));
    let of_file = on_ranks(2, |group| {
        train::<B>(group, |group| Update::from_deepspeed(&config, group))
    });
    let by_hand = on_ranks(2, |group| {
        train::<B>(group, |group| {
            let adamw = HostAdamWConfig {
                weight_decay: 0.0,
                ..HostAdamWConfig::default()
            };
            Update::new(PlacedAdamW::new(adamw, Memory::Device)?)
                .reduce(ZeroSettings::stage(Stage::DataParallel), group)?
                .accumulate(AccumConfig::mean(2))
        })
    });
    assert_eq!(of_file, by_hand);
}

#[test]
fn what_is_no_update_is_refused_by_its_key() {
    let adamw = json!({"type": "AdamW"});
    for (json, text) in [
        (
            json!({"train_batch_size": 4}),
            "optimizer: the file names none, and an update needs one: add the section",
        ),
        (
            json!({"train_batch_size": 7, "gradient_accumulation_steps": 2, "optimizer": adamw}),
            "train_batch_size 7, but train_micro_batch_size_per_gpu 3 x gradient_accumulation_steps 2 x 1 ranks = 6",
        ),
        (
            json!({"optimizer": adamw}),
            "neither train_batch_size nor train_micro_batch_size_per_gpu has a number",
        ),
        (
            json!({"train_batch_size": 4, "gradient_clipping": 1e-60, "optimizer": adamw}),
            "gradient_clipping: ",
        ),
    ] {
        let alone = Arc::new(SingleRank::new());
        let update = Update::<Net<B>, B>::from_deepspeed(&read(&json), alone);
        let error = update.expect_err(text);
        assert!(error.to_string().starts_with(text), "{error}");
        assert!(
            matches!(error.cause::<ZeroError>(), Some(ZeroError::Config(_))),
            "{error:?}"
        );
    }
}
