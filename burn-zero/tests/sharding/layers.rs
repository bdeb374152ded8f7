//! Layers around the sharded optimizer and inside of it.

use burn::nn::{Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor};
use burn_accum::{AccumConfig, ClipGlobalNorm, MultiSteps, flush};
use burn_amp::{GradScaler, GradScalerConfig};
use burn_ranks::{BufferDtype, ReduceOp};
use burn_zero::{ParameterShards, Stage, ZeroOptimizer, ZeroOptimizerError, ZeroSettings};

use super::support::*;

fn in_f16(stage: Stage) -> ZeroSettings {
    ZeroSettings {
        communication_dtype: BufferDtype::F16,
        ..small_buckets(stage)
    }
}

/// Trains with a loss scaler and f16 communication; the gradients of the step `large` are finite in
/// f32 and overflow in f16. Returns the skipped steps, the scale and the parameters.
fn train_in_f16(stage: Stage, steps: &[usize], large: usize) -> (u64, f32, Vec<Vec<f32>>) {
    on_ranks(2, |group| {
        let rank = group.rank();
        let mut zero = ZeroOptimizer::new(AdamWConfig::new().init(), group, in_f16(stage))?;
        let mut model = zero.prepare::<B, _>(Net::new(&Default::default()))?;
        let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
        let mut optimizer = scaler.wrap(zero);
        for &step in steps {
            let mut loss = model.loss(batch(step, rank, 2));
            if step == large {
                loss = loss * 1e9;
            }
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.05, model, gradients);
        }
        Ok((scaler.skipped_steps(), scaler.scale(), parameters(&model)))
    })
}

#[test]
fn a_gradient_that_overflows_when_it_is_sent_skips_the_step_in_every_stage() {
    let initial_scale = GradScalerConfig::default().init_scale;
    for stage in STAGES {
        let skipped = train_in_f16(stage, &[0, 1, 2, 3], 2);
        let left_out = train_in_f16(stage, &[0, 1, 3], usize::MAX);
        assert_eq!((skipped.0, left_out.0), (1, 0), "{stage}");
        assert_eq!(skipped.1, initial_scale / 2.0, "{stage}");
        assert_eq!(
            skipped.2, left_out.2,
            "{stage}: state or parameters changed"
        );
    }
}

/// As [`train_in_f16`] with one step and a large gradient, which `of_rank` gives to a rank or not:
/// all ranks skip it.
fn assert_skipped<O: Optimizer<Net<B>, B>>(
    stage: Stage,
    layer: impl Fn(ZeroOptimizer<OptimizerAdaptor<AdamW, ParameterShards<B>, B>>) -> O + Sync,
    of_rank: impl Fn(usize, GradientsParams) -> GradientsParams + Sync,
) {
    let skipped = on_ranks(2, |group| {
        let rank = group.rank();
        let mut zero = ZeroOptimizer::new(AdamWConfig::new().init(), group, in_f16(stage))?;
        let mut model = zero.prepare::<B, _>(Net::new(&Default::default()))?;
        let before = parameters(&model);
        let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
        let mut optimizer = scaler.wrap(layer(zero));
        let loss = model.loss(batch(0, rank, 2)) * 1e9;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.05, model, of_rank(rank, gradients));
        model = flush(|nothing| optimizer.step(0.05, model, nothing));
        assert_eq!(parameters(&model), before, "{stage}");
        Ok(scaler.skipped_steps())
    });
    assert_eq!(skipped, 1, "{stage}");
}

#[test]
fn a_rank_without_gradients_skips_what_overflows_on_others() {
    for stage in [Stage::DataParallel, Stage::OptimizerState] {
        assert_skipped(
            stage,
            |zero| zero,
            |rank, gradients| match rank {
                0 => gradients,
                _ => GradientsParams::new(),
            },
        );
    }
}

#[test]
fn a_window_that_overflows_when_it_is_flushed_is_skipped() {
    for stage in [Stage::DataParallel, Stage::OptimizerState] {
        assert_skipped(
            stage,
            |zero| MultiSteps::new(zero, AccumConfig::mean(4)).unwrap(),
            |_, gradients| gradients,
        );
    }
}

/// A schedule that is stepped once an update must not go on either.
#[test]
fn a_window_that_is_left_out_counts_as_skipped() {
    for stage in [Stage::DataParallel, Stage::OptimizerState] {
        let counts = on_ranks(2, |group| {
            let rank = group.rank();
            let mut zero = ZeroOptimizer::new(AdamWConfig::new().init(), group, in_f16(stage))?;
            let mut model = zero.prepare::<B, _>(Net::new(&Default::default()))?;
            let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
            let windows = MultiSteps::new(zero, AccumConfig::mean(2)).unwrap();
            let counter = windows.updates();
            let mut optimizer = scaler.wrap(windows);
            let mut counts = Vec::new();
            for (step, weight) in [1e9, 1e9, 1.0, 1.0].into_iter().enumerate() {
                let loss = model.loss(batch(step, rank, 2)) * weight;
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = optimizer.step(0.05, model, gradients);
                counts.push((counter.updates(), counter.skipped_updates()));
            }
            Ok(counts)
        });
        assert_eq!(counts, [(0, 0), (0, 1), (0, 1), (1, 1)], "{stage}");
    }
}

fn refused(optimizer: impl Optimizer<ParameterShards<B>, B>) -> Option<burn_zero::ZeroError> {
    let group = std::sync::Arc::new(burn_zero::SingleRank::new());
    let mut zero = ZeroOptimizer::new(optimizer, group, ZeroSettings::default()).unwrap();
    zero.prepare::<B, _>(Net::new(&Default::default())).err()
}

#[test]
fn layers_that_belong_outside_are_refused_inside_and_take_no_step() {
    let adam = || AdamWConfig::new().init();
    let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
    let multi = || MultiSteps::new(adam(), AccumConfig::mean(2)).unwrap();
    let window = multi();
    let counter = window.updates();
    for (error, layer) in [
        (refused(window), "accumulation"),
        (refused(scaler.wrap(adam())), "loss scaler"),
        (refused(scaler.wrap(multi())), "loss scaler"),
    ] {
        let error = error.expect("it is refused");
        let order = burn_zero::ZeroError::Optimizer(ZeroOptimizerError::LayerInside { layer });
        assert_eq!(error, order);
    }
    assert_eq!(
        (
            counter.updates() + counter.micro_batches(),
            scaler.skipped_steps()
        ),
        (0, 0)
    );
    assert_eq!(scaler.scale(), GradScalerConfig::default().init_scale);
}

#[test]
fn a_norm_is_provided_in_steps_only() {
    for world_size in [1, 2] {
        on_ranks(world_size, |group| {
            let clip = ClipGlobalNorm::new(AdamWConfig::new().init(), 1.0).unwrap();
            let (norm, provided) = (clip.norm(), clip.norm());
            let zero = ZeroOptimizer::new(clip, group, ZeroSettings::default())?;
            let mut zero = zero.with_norm(move |value| provided.provide(value));
            let model = zero.prepare::<B, _>(Net::new(&Default::default()))?;
            assert_eq!(norm.last(), None, "before the first update");
            let loss = model.loss(batch(0, 0, 1));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            zero.step(0.05, model, gradients);
            assert!(norm.last().is_some_and(|norm| norm > 0.0));
            Ok(())
        });
    }
}

#[test]
fn a_backward_pass_of_another_model_may_come_before_the_step() {
    let train = |stage, another: bool| {
        on_ranks(2, |group| {
            let rank = group.rank();
            let adam = AdamWConfig::new().init();
            let mut optimizer = ZeroOptimizer::new(adam, group, small_buckets(stage))?;
            let mut model = optimizer.prepare::<B, _>(Net::new(&Default::default()))?;
            let other = LinearConfig::new(7, 2).init::<B>(&Default::default());
            for step in 0..3 {
                let loss = model.loss(batch(step, rank, 2));
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                if another {
                    other.forward(batch(step, rank, 2)).mean().backward();
                }
                model = optimizer.step(0.05, model, gradients);
            }
            Ok(parameters(&model))
        })
    };
    for stage in STAGES {
        assert_eq!(train(stage, false), train(stage, true), "{stage}");
    }
}

/// The sum is finite in f32, in which it is sent. No rank takes its part of it for finite.
#[test]
fn so_is_a_sum_that_overflows_in_the_type_of_the_parameter() {
    on_ranks(2, |group| {
        let settings = ZeroSettings {
            reduction: ReduceOp::Sum,
            ..small_buckets(Stage::Gradients)
        };
        let mut zero = ZeroOptimizer::new(AdamWConfig::new().init(), group, settings)?;
        let linear = LinearConfig::new(2, 8).with_bias(false);
        let mut model: Linear<B> = linear.init(&Default::default());
        let low = |weight: Tensor<B, 2>| weight.cast(DType::F16).detach();
        model.weight = model.weight.map(|weight| low(weight).require_grad());
        let model = zero.prepare::<B, _>(model)?;
        let loss = model.weight.val().slice([0..1, 0..1]).sum() * 4e4;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let own = gradients.get::<_, 2>(model.weight.id);
        let own: Tensor<<B as AutodiffBackend>::InnerBackend, 2> = own.unwrap();
        assert!(own.into_data().iter::<f32>().all(f32::is_nan));
        Ok(())
    });
}
