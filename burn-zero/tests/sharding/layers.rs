//! Parts of an update around the reduction and inside of it.

use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor};
use burn_accum::{AccumConfig, Accumulation, ClipNorm};
use burn_amp::{GradScaler, GradScalerConfig};
use burn_ranks::{BufferDtype, ReduceOp};
use burn_update::{Update, UpdateError};
use burn_zero::{ParameterShards, ReduceOverRanks, Stage, ZeroSettings};

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
        let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
        let update = over_ranks(AdamWConfig::new().init(), group, in_f16(stage))?;
        let mut update = update.scale(scaler.clone())?;
        let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
        for &step in steps {
            let mut loss = model.loss(batch(step, rank, 2));
            if step == large {
                loss = loss * 1e9;
            }
            let gradients = update.backward(&model, loss);
            model = update.step(0.05, model, gradients)?;
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
fn assert_skipped(
    stage: Stage,
    window: Option<usize>,
    of_rank: impl Fn(usize, GradientsParams) -> GradientsParams + Sync,
) {
    let skipped = on_ranks(2, |group| {
        let rank = group.rank();
        let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
        let update = over_ranks(AdamWConfig::new().init(), group, in_f16(stage))?;
        let mut update = update.scale(scaler.clone())?;
        if let Some(window) = window {
            update = update.accumulate(AccumConfig::mean(window))?;
        }
        let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
        let before = parameters(&model);
        let loss = model.loss(batch(0, rank, 2)) * 1e9;
        let gradients = update.backward(&model, loss);
        model = update.step(0.05, model, of_rank(rank, gradients))?;
        model = update.flush(0.05, model)?;
        assert_eq!(parameters(&model), before, "{stage}");
        Ok(scaler.skipped_steps())
    });
    assert_eq!(skipped, 1, "{stage}");
}

#[test]
fn a_rank_without_gradients_skips_what_overflows_on_others() {
    for stage in [Stage::DataParallel, Stage::OptimizerState] {
        assert_skipped(stage, None, |rank, gradients| match rank {
            0 => gradients,
            _ => GradientsParams::new(),
        });
    }
}

#[test]
fn a_window_that_overflows_when_it_is_flushed_is_skipped() {
    for stage in [Stage::DataParallel, Stage::OptimizerState] {
        assert_skipped(stage, Some(4), |_, gradients| gradients);
    }
}

/// A schedule that is stepped once an update must not go on either.
#[test]
fn a_window_that_is_left_out_counts_as_skipped() {
    for stage in [Stage::DataParallel, Stage::OptimizerState] {
        let counts = on_ranks(2, |group| {
            let rank = group.rank();
            let windows = Accumulation::new(AccumConfig::mean(2)).unwrap();
            let counter = windows.updates();
            let mut update = over_ranks(AdamWConfig::new().init(), group, in_f16(stage))?
                .accumulate(windows)?
                .scale(GradScalerConfig::default())?;
            let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
            let mut counts = Vec::new();
            for (step, weight) in [1e9, 1e9, 1.0, 1.0].into_iter().enumerate() {
                let loss = model.loss(batch(step, rank, 2)) * weight;
                let gradients = update.backward(&model, loss);
                model = update.step(0.05, model, gradients)?;
                counts.push((counter.updates(), counter.skipped_updates()));
            }
            Ok(counts)
        });
        assert_eq!(counts, [(0, 0), (0, 1), (0, 1), (1, 1)], "{stage}");
    }
}

fn refused(optimizer: impl Optimizer<ParameterShards<B>, B> + 'static) -> Option<UpdateError> {
    let group = std::sync::Arc::new(burn_zero::SingleRank::new());
    let mut update = over_ranks(optimizer, group, ZeroSettings::default()).unwrap();
    update.prepare(Net::<B>::new(&Default::default())).err()
}

#[test]
fn layers_that_belong_outside_are_refused_inside_and_take_no_step() {
    let adam = || Update::<ParameterShards<B>, B>::new(AdamWConfig::new().init());
    let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
    let windows = Accumulation::new(AccumConfig::mean(2)).unwrap();
    let counter = windows.updates();
    let both = adam().accumulate(AccumConfig::mean(2)).unwrap();
    for (error, expected) in [
        (
            refused(adam().accumulate(windows).unwrap()),
            "accumulates gradients",
        ),
        (
            refused(adam().scale(scaler.clone()).unwrap()),
            "scales losses",
        ),
        (
            refused(both.scale(scaler.clone()).unwrap()),
            "scales losses",
        ),
    ] {
        let error = error.expect("it is refused");
        let is_expected =
            matches!(&error, UpdateError::WrapperInside { what, .. } if *what == expected);
        assert!(is_expected, "{error}");
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
            let clip = ClipNorm::new(1.0).unwrap();
            let norm = clip.norm();
            let mut update = Update::new(AdamWConfig::new().init())
                .clip(clip)?
                .reduce(ZeroSettings::default(), group)?;
            let model = update.prepare(Net::<B>::new(&Default::default()))?;
            assert_eq!(norm.last(), None, "before the first update");
            let loss = model.loss(batch(0, 0, 1));
            let gradients = update.backward(&model, loss);
            update.step(0.05, model, gradients)?;
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
            let mut update = over_ranks(adam, group, small_buckets(stage))?;
            let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
            let other = LinearConfig::new(7, 2).init::<B>(&Default::default());
            for step in 0..3 {
                let loss = model.loss(batch(step, rank, 2));
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                if another {
                    other.forward(batch(step, rank, 2)).mean().backward();
                }
                model = update.step(0.05, model, gradients)?;
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
        let mut update = over_ranks(AdamWConfig::new().init(), group, settings)?;
        let linear = LinearConfig::new(2, 8).with_bias(false);
        let mut model: Linear<B> = linear.init(&Default::default());
        let low = |weight: Tensor<B, 2>| weight.cast(DType::F16).detach();
        model.weight = model.weight.map(|weight| low(weight).require_grad());
        let model = update.prepare(model)?;
        let loss = model.weight.val().slice([0..1, 0..1]).sum() * 4e4;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let own = gradients.get::<_, 2>(model.weight.id);
        let own: Tensor<<B as AutodiffBackend>::InnerBackend, 2> = own.unwrap();
        assert!(own.into_data().iter::<f32>().all(f32::is_nan));
        Ok(())
    });
}
