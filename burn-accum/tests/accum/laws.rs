//! k micro-batches are one batch of their union.

use burn::{
    module::AutodiffModule,
    optim::{
        AdamWConfig, GradientsAccumulator, MuonConfig, Optimizer, SgdConfig,
        decay::WeightDecayConfig, momentum::MomentumConfig,
    },
};
use burn_accum::{AccumConfig, Accumulation, ClipByNorm, Counted, Normalization};
use burn_update::Update;

use crate::support::{B, Batch, Net, Windows, assert_close, net, state, step, values};

const UPDATES: usize = 6;

fn sgd() -> impl Optimizer<Net<B>, B> {
    SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new().with_momentum(0.9)))
        .with_weight_decay(Some(WeightDecayConfig::new(0.01)))
        .init()
}

fn adamw() -> impl Optimizer<Net<B>, B> {
    AdamWConfig::new().init()
}

/// Windows of micro-batches of several numbers of rows, with Tokens; and with Mean where all are
/// equal.
fn windows_are_batches(plain: &Update<Net<B>, B>) {
    for rows in [&[4, 4, 4, 4][..], &[1, 7, 2, 5], &[3], &[6, 1]] {
        window_is_batch(plain, rows, Normalization::Tokens);
        if rows.iter().all(|count| *count == rows[0]) {
            window_is_batch(plain, rows, Normalization::Mean);
        }
    }
}

/// Trains on whole batches, and on their parts.
fn window_is_batch(plain: &Update<Net<B>, B>, rows: &[usize], normalization: Normalization) {
    let config = AccumConfig {
        steps: rows.len(),
        normalization,
    };
    let mut whole = plain.clone();
    let mut windows = Windows::of(plain.clone(), Accumulation::new(config).unwrap());
    let mut one = net();
    let mut many = one.clone();
    let mut at = 0;
    for _ in 0..UPDATES {
        let start = at;
        for count in rows {
            let batch = Batch::rows(at, at + count);
            at += count;
            let gradients = match normalization {
                Normalization::Tokens => Counted::mean(many.loss(&batch), *count).backward(&many),
                _ => many.mean_gradients(&batch),
            };
            many = windows.step(0.02, many, gradients);
        }
        let gradients = one.mean_gradients(&Batch::rows(start, at));
        one = step(&mut whole, 0.02, one, gradients);
    }
    assert_eq!(windows.updates().updates(), UPDATES as u64);
    assert_close(&one, &many, 2e-5);
}

#[test]
fn for_sgd_with_momentum_and_decay() {
    windows_are_batches(&Update::new(sgd()));
}

#[test]
fn for_adamw() {
    windows_are_batches(&Update::new(adamw()));
}

/// Clipping sees the update's gradient.
#[test]
fn for_adamw_with_clipping() {
    windows_are_batches(&Update::new(adamw()).clip_norm(0.1).unwrap());
}

#[test]
fn nothing_changes_within_a_window() {
    let mut optimizer = Windows::new(adamw(), AccumConfig::mean(4));
    let mut net = net();
    for update in 0..3 {
        let before = (values(&net), state(&optimizer.update));
        for micro_step in 0..3 {
            let gradients = net.mean_gradients(&Batch::rows(update * 8 + micro_step, 50));
            net = optimizer.step(0.1, net, gradients);
            assert_eq!((values(&net), state(&optimizer.update)), before);
        }
        let gradients = net.mean_gradients(&Batch::rows(update, 50));
        net = optimizer.step(0.1, net, gradients);
        assert_ne!(values(&net), before.0);
    }
}

#[test]
fn a_window_of_one_is_the_inner_optimizer_bit_for_bit() {
    let mut plain = Update::new(adamw());
    let mut windows = Windows::new(adamw(), AccumConfig::default());
    let mut one = net();
    let mut other = one.clone();
    for at in 0..5 {
        let batch = Batch::rows(at * 4, at * 4 + 4);
        let gradients = one.mean_gradients(&batch);
        one = step(&mut plain, 0.1, one, gradients);
        let gradients = other.mean_gradients(&batch);
        other = windows.step(0.1, other, gradients);
        assert_eq!(values(&one), values(&other));
    }
    assert_eq!(state(&plain), state(&windows.update));
}

/// Bit for bit, as the sums are made in the same order.
#[test]
fn the_sum_is_that_of_burns_accumulator() {
    let config = AccumConfig {
        normalization: Normalization::Sum,
        ..AccumConfig::mean(3)
    };
    let mut windows = Windows::new(adamw(), config);
    let mut plain = adamw();
    let mut accumulator = GradientsAccumulator::new();
    let mut one = net();
    let mut other = one.clone();
    for step in 0..9 {
        let batch = Batch::rows(step * 4, step * 4 + 4);
        let gradients = one.mean_gradients(&batch);
        one = windows.step(0.1, one, gradients);

        let gradients = other.mean_gradients(&batch);
        accumulator.accumulate(&other, gradients);
        if step % 3 == 2 {
            other = plain.step(0.1, other, accumulator.grads());
        }
        assert_eq!(values(&one), values(&other));
    }
}

/// Muon orthogonalises whole matrices: a mean of updates is not the update of a mean.
#[test]
fn for_muon_on_a_matrix() {
    use burn::{
        nn::{Linear, LinearConfig},
        optim::GradientsParams,
        tensor::{Tensor, Tolerance},
    };

    let device = Default::default();
    let start: Linear<B> = LinearConfig::new(5, 3).with_bias(false).init(&device);
    let _ = start.weight.val();
    let gradients = |linear: &Linear<B>, from, to| {
        let batch = Batch::rows(from, to);
        let error = linear.forward(batch.x.clone()) - batch.y.clone();
        let loss: Tensor<B, 1> = error.square().sum() / batch.len() as f32;
        GradientsParams::from_grads(loss.backward(), linear)
    };
    let muon = || MuonConfig::new().init::<B, Linear<B>>();
    let mut whole = muon();
    let mut windows = Windows::new(muon(), AccumConfig::mean(3));
    let (mut one, mut many) = (start.clone(), start);
    for at in (0..60).step_by(12) {
        for part in 0..3 {
            let from = at + part * 4;
            let gradients = gradients(&many, from, from + 4);
            many = windows.step(0.02, many, gradients);
        }
        let gradients = gradients(&one, at, at + 12);
        one = whole.step(0.02, one, gradients);
    }
    let (one, many) = (one.valid(), many.valid());
    let tolerance = Tolerance::<f32>::absolute(1e-4);
    one.weight
        .val()
        .into_data()
        .assert_approx_eq(&many.weight.val().into_data(), tolerance);
}
