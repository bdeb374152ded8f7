//! The reduction as a part of an update: the same bits in every stage.

use std::sync::Arc;

use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::FloatDType;
use burn_accum::{AccumConfig, ClipByNorm};
use burn_amp::{Autocast, F16, GradScaler, GradScalerConfig};
use burn_ranks::BufferDtype;
use burn_update::{Group, Groups, Paths, Update, UpdateError};
use burn_zero::record::Keep;
use burn_zero::{
    GroupOptions, HostAdamWConfig, Memory, OffloadConfig, ParameterShards, RankReduction,
    ReduceOverRanks, Stage, ThreadGroup, Training, ZeroSettings,
};

use super::bytes::low;
use super::support::*;

const STEPS: usize = 4;
const LR: f64 = 0.05;

type Shards = Update<ParameterShards<B>, B>;

fn adamw() -> Shards {
    Update::new(AdamWConfig::new().init())
}

/// Trains by what `inside` makes.
fn train(
    world_size: usize,
    settings: &ZeroSettings,
    inside: impl Fn() -> Shards + Sync,
) -> Vec<Vec<f32>> {
    on_ranks(world_size, |group| {
        let rank = group.rank();
        let train = || {
            let mut update = inside().reduce(settings.clone(), group.clone())?;
            let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
            for step in 0..STEPS {
                let gradients = update.backward(&model, model.loss(batch(step, rank, world_size)));
                model = update.step(LR, model, gradients)?;
            }
            assert_eq!(update.updates(), STEPS as u64);
            Ok(parameters(&model))
        };
        train()
    })
}

#[test]
fn an_update_over_ranks_is_one_in_every_stage_and_on_one_rank_burns_optimizer() {
    let plain = train_plain(AdamWConfig::new().init(), STEPS);
    for stage in WITH_PARAMETERS {
        assert_eq!(train(1, &small_buckets(stage), adamw), plain, "{stage:?}");
    }
    for world_size in 2..=3 {
        let whole = train(world_size, &small_buckets(Stage::DataParallel), adamw);
        assert!(distance(&whole, &plain) < 2e-5);
        for stage in WITH_PARAMETERS {
            let updated = train(world_size, &small_buckets(stage), adamw);
            assert_eq!(updated, whole, "{world_size} ranks, {stage:?}");
        }
    }
}

#[test]
fn clipping_is_by_the_norm_of_all_ranks() {
    const MAX_NORM: f32 = 0.05;
    let clipped = || {
        Update::new(SgdConfig::new().init())
            .clip_norm(MAX_NORM)
            .unwrap()
    };
    let alone = Update::new(SgdConfig::new().init()).clip_norm(MAX_NORM);
    let plain = train_plain(alone.unwrap(), STEPS);
    let whole = train(2, &small_buckets(Stage::DataParallel), clipped);
    assert!(distance(&whole, &plain) < 2e-5);
    for stage in WITH_PARAMETERS {
        let settings = small_buckets(stage);
        assert_eq!(train(2, &settings, clipped), whole, "{stage:?}");
        let free = train(2, &settings, || Update::new(SgdConfig::new().init()));
        assert_ne!(free, whole, "nothing was clipped");
    }
}

/// Infinite on rank 1 only, with and without windows; then finite again.
#[test]
fn an_overflow_on_one_rank_leaves_the_step_out_on_all() {
    type Half = Autocast<B, F16>;
    for (stage, windows) in WITH_PARAMETERS
        .into_iter()
        .flat_map(|s| [(s, false), (s, true)])
    {
        on_ranks(2, |group| {
            let rank = group.rank();
            let train = || {
                let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
                let mut update = Update::new(AdamWConfig::new().init())
                    .reduce(small_buckets(stage), group.clone())?
                    .scale(scaler.clone())?;
                if windows {
                    update = update.accumulate(AccumConfig::mean(1))?;
                }
                let mut model = update.prepare(Net::<Half>::new(&Default::default()))?;
                let before = parameters(&model);
                let factor = if rank == 1 { f32::INFINITY } else { 1.0 };
                let loss = model.loss(batch(0, rank, 2)) * factor;
                let gradients = update.backward(&model, loss);
                model = update.step(LR, model, gradients)?;
                assert_eq!(parameters(&model), before, "{stage:?}");
                assert_eq!((scaler.skipped_steps(), update.updates()), (1, 0));

                let gradients = update.backward(&model, model.loss(batch(1, rank, 2)));
                model = update.step(LR, model, gradients)?;
                assert_ne!(parameters(&model), before, "{stage:?}");
                assert_eq!((scaler.skipped_steps(), update.updates()), (1, 1));
                Ok(parameters(&model))
            };
            train()
        });
    }
}

/// Each rank's gradients are finite in f32, and overflow when they are sent in f16: known only after
/// the reduction, with a window, with one that is flushed, and without.
#[test]
fn a_sum_that_overflows_in_the_reduction_leaves_the_step_out() {
    let train = |stage, window: usize, steps: &[usize], large: Option<usize>| {
        on_ranks(2, |group| {
            let rank = group.rank();
            let settings = ZeroSettings {
                communication_dtype: BufferDtype::F16,
                ..small_buckets(stage)
            };
            let train = || {
                let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
                let mut update = adamw()
                    .reduce(settings.clone(), group.clone())?
                    .scale(scaler.clone())?;
                if window > 0 {
                    update = update.accumulate(AccumConfig::mean(window))?;
                }
                let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
                for &step in steps {
                    let weight = if large == Some(step) { 1e9 } else { 1.0 };
                    for _ in 0..window.clamp(1, 2) {
                        let loss = model.loss(batch(step, rank, 2)) * weight;
                        let gradients = update.backward(&model, loss);
                        model = update.step(LR, model, gradients)?;
                    }
                    model = update.flush(LR, model)?;
                }
                let scale = scaler.scale() / GradScalerConfig::default().init_scale;
                let counts = (scaler.skipped_steps(), update.updates(), scale);
                Ok((counts, parameters(&model)))
            };
            train()
        })
    };
    for stage in STAGES {
        // Stage 2 reduces each micro-batch by itself. A window of three is closed by the flush, with
        // two micro-batches.
        let windows: &[usize] = if stage == Stage::Gradients {
            &[0]
        } else {
            &[0, 2, 3]
        };
        for &window in windows {
            let (skipped, parameters) = train(stage, window, &[0, 1, 2, 3], Some(2));
            let (left_out, expected) = train(stage, window, &[0, 1, 3], None);
            assert_eq!(skipped, (1, 3, 0.5), "{stage}, {window}");
            assert_eq!(left_out, (0, 3, 1.0), "{stage}, {window}");
            assert_eq!(parameters, expected, "{stage}, {window}: state changed");
        }
    }
}

/// AdamW on the host, of this rank's shards.
fn on_host() -> Shards {
    let adamw = OffloadConfig::new(HostAdamWConfig::default());
    Update::new(adamw.init().unwrap())
}

#[test]
fn an_optimizer_on_the_host_is_one_with_gradients_there_or_on_the_device_in_every_stage() {
    let plain = train(1, &small_buckets(Stage::DataParallel), on_host);
    let whole = train(2, &small_buckets(Stage::DataParallel), on_host);
    assert!(distance(&whole, &plain) < 2e-5);
    for stage in WITH_PARAMETERS {
        for gradients in [Memory::Device, Memory::Host] {
            let settings = ZeroSettings {
                gradients,
                ..small_buckets(stage)
            };
            let updated = train(2, &settings, on_host);
            assert_eq!(updated, whole, "{stage}, {gradients:?}");
        }
    }
}

/// Those of the first would leave in backward, and the second would get none.
#[test]
fn a_second_update_over_the_same_leaves_is_refused_by_name() {
    for stage in [Stage::Gradients, Stage::Parameters] {
        on_ranks(2, |group| {
            let reduce = || adamw().reduce::<Net<B>>(small_buckets(stage), group.clone());
            let train = || {
                let (mut first, mut second) = (reduce()?, reduce()?);
                let model = first.prepare(Net::new(&Default::default()))?;
                let error = second.prepare(model.clone()).unwrap_err();
                let error = error.to_string();
                assert!(error.contains("first.weight"), "{error}");

                // Again by the same one, and by another when the first is gone.
                let model = first.prepare(model)?;
                drop(first);
                second.prepare(model)?;
                Ok(())
            };
            train()
        });
    }
}

fn grouped() -> Shards {
    let decaying = AdamWConfig::new().with_weight_decay(0.3);
    let no_decay = decaying.clone().with_weight_decay(0.0);
    let biases = Group::new(Paths::glob("*bias"), no_decay.init()).with_lr_factor(0.5);
    let groups = Groups::new(decaying.init())
        .with("biases", biases)
        .with("frozen", Group::frozen(Paths::glob("tied")));
    Update::of_groups(groups)
}

#[test]
fn groups_are_by_the_paths_of_the_model_in_every_stage() {
    let whole = train(2, &small_buckets(WITH_PARAMETERS[0]), grouped);
    for stage in WITH_PARAMETERS {
        assert_eq!(train(2, &small_buckets(stage), grouped), whole, "{stage:?}");
    }
    let start = parameters(&Net::<B>::new(&Default::default()));
    let all_decay = train(2, &small_buckets(WITH_PARAMETERS[0]), adamw);
    let frozen = start
        .iter()
        .position(|values| values.len() == 11 * 13)
        .unwrap();
    assert_eq!(whole[frozen], start[frozen]);
    assert_ne!(all_decay[frozen], start[frozen]);
    assert!(
        distance(
            &whole,
            &train(1, &small_buckets(WITH_PARAMETERS[0]), grouped)
        ) < 2e-5
    );
}

#[test]
fn a_record_of_two_ranks_is_continued_by_three_and_by_one() {
    let root = tempfile::tempdir().unwrap();
    let trained = |world_size: usize, steps: std::ops::Range<usize>, inside: fn() -> Shards| {
        on_ranks(world_size, |group| {
            let settings = small_buckets(WITH_PARAMETERS[2]);
            let train = || {
                let reduction = RankReduction::new(settings, group.clone())?;
                let mut update = inside().reduce_by(&reduction)?;
                let model = update.prepare(Net::<B>::new(&Default::default()))?;
                let recorder = reduction.recorder()?;
                let training = Training {
                    model,
                    optimizer: update,
                    scheduler: LR,
                };
                let (mut training, found) = recorder.load(root.path(), None, training).unwrap();
                let mut state = found.unwrap_or_default();
                for step in steps.clone() {
                    // The same gradients on all ranks, so that their number changes no bit.
                    let loss = training.model.loss(batch(step, 0, 1));
                    let gradients = training.optimizer.backward(&training.model, loss);
                    training.model = training.optimizer.step(LR, training.model, gradients)?;
                    state.step += 1;
                }
                if state.step == 2 {
                    let by_ref = training.by_ref();
                    recorder
                        .save(root.path(), by_ref, state, Keep::default())
                        .unwrap();
                }
                Ok((parameters(&training.model), training.optimizer.updates()))
            };
            train()
        })
    };
    type Make = fn() -> Shards;
    let cases: [(Make, &str); 3] = [
        (adamw, "optimizer/first.bias."),
        (grouped, "optimizer/biases/first.bias."),
        (on_host, "optimizer/first.bias."),
    ];
    for (inside, state_of_bias) in cases {
        let saved = trained(2, 0..2, inside);
        assert_eq!(saved.1, 2);
        let [one, two, three] = [1, 2, 3].map(|ranks| trained(ranks, 2..4, inside));
        assert_eq!(two, trained(2, 2..4, inside));
        assert_eq!((one.1, two.1, three.1), (4, 4, 4));
        assert!(distance(&one.0, &two.0) < 1e-5 && distance(&three.0, &two.0) < 1e-5);
        let mut names = contents(root.path()).0.into_keys();
        assert!(names.any(|name| name.starts_with(state_of_bias)));
        assert!(
            distance(&saved.0, &two.0) > 1e-3,
            "nothing was trained after the record"
        );
        std::fs::remove_dir_all(root.path()).unwrap();
        std::fs::create_dir(root.path()).unwrap();
    }
}

#[test]
fn another_order_is_refused_when_it_is_built() {
    ThreadGroup::spawn(1, GroupOptions::default(), |group| {
        let group: Arc<dyn burn_zero::ProcessGroup> = Arc::new(group);
        let reduce =
            |inside: Shards| inside.reduce::<Net<B>>(ZeroSettings::default(), group.clone());
        let built = [
            reduce(adamw().scale(GradScalerConfig::default()).unwrap()).err(),
            reduce(adamw().accumulate(AccumConfig::mean(2)).unwrap()).err(),
            reduce(adamw()).unwrap().clip_norm(1.0).err(),
        ];
        for (error, part) in built.into_iter().zip(["scale", "accumulate", "clip"]) {
            let found =
                matches!(&error, Some(UpdateError::Order { part: found, .. }) if found == part);
            assert!(found, "{part}: {error:?}");
        }
        let model = Net::<B>::new(&Default::default());
        let unprepared = reduce(adamw())
            .unwrap()
            .step(LR, model, GradientsParams::new());
        assert!(matches!(unprepared.err(), Some(UpdateError::NotPrepared)));
    })
    .unwrap();
}

#[test]
fn a_reduction_is_of_one_update_and_one_of_a_learner_needs_its_strategy() {
    let reduction = RankReduction::in_learner(ZeroSettings::default());
    let mut update: Update<Net<B>, B> = adamw().reduce_by(&reduction).unwrap();
    let second = adamw().reduce_by::<Net<B>>(&reduction.clone()).err();
    assert!(
        matches!(second, Some(UpdateError::Order { .. })),
        "{second:?}"
    );
    let prepared = update.prepare(Net::<B>::new(&Default::default())).err();
    let text = prepared.expect("there are no ranks").to_string();
    assert!(text.contains("update.strategy()"), "{text}");
}

#[test]
fn a_record_keeps_the_masters_of_a_model_in_bf16() {
    let root = tempfile::tempdir().unwrap();
    on_ranks(2, |group| {
        let train = || {
            let reduction = RankReduction::new(small_buckets(WITH_PARAMETERS[2]), group.clone())?;
            let mut update = on_host().reduce_by(&reduction)?;
            let model: Linear<B> = update.prepare(low(LinearConfig::new(7, 3)))?;
            let x = batch::<B>(0, 0, 1).cast(FloatDType::BF16);
            let gradients = update.backward(&model, model.forward(x).sum());
            let training = Training {
                model: update.step(LR, model, gradients)?,
                optimizer: update,
                scheduler: LR,
            };
            let recorder = reduction.recorder()?;
            let weights = |model: &Linear<B>| model.weight.val().into_data();
            let saved = weights(&training.model);
            let by_ref = training.by_ref();
            recorder
                .save(root.path(), by_ref, Default::default(), Keep::default())
                .unwrap();
            let (loaded, _) = recorder.load(root.path(), None, training).unwrap();
            assert_eq!(weights(&loaded.model), saved);
            Ok(())
        };
        train()
    });
}
