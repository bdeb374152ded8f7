//! bf16 and f16 products: no further from f64 than Burn's loss over full logits is.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::FloatDType;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{Autocast, Bf16, F16};

use super::*;

/// As many classes as make probabilities that f16 cannot hold unscaled.
const SHAPE: [usize; 3] = [160, 48, 3000];
/// Of a loss scaler, which f16's gradients over full logits need.
const SCALE: f64 = 65_536.0;

fn full<B: AutodiffBackend>(leaves: &Leaves<B>) -> Tensor<B, 1> {
    let logits = leaves.hidden.clone().matmul(leaves.weight.clone());
    let [rows, width] = logits.dims();
    let loss = CrossEntropyLossConfig::new().init(&logits.device());
    loss.forward(logits, classes_of(rows, width))
}

fn scaled<B: AutodiffBackend>(leaves: &Leaves<B>, loss: Tensor<B, 1>, scale: f64) -> Found {
    let Found { loss, gradients } = leaves.differentiate(loss.mul_scalar(scale));
    let unscaled = |x: f64| x / scale;
    let gradient =
        |gradient: Option<Vec<f64>>| gradient.map(|x| x.into_iter().map(unscaled).collect());
    Found {
        loss: unscaled(loss),
        gradients: gradients.into_iter().map(gradient).collect(),
    }
}

fn exact() -> Found {
    let leaves = Leaves::<Plain>::new(SHAPE, false);
    let f64 = |tensor: Tensor<Plain, 2>| {
        tensor
            .set_require_grad(false)
            .cast(FloatDType::F64)
            .require_grad()
    };
    let leaves = Leaves {
        hidden: f64(leaves.hidden),
        weight: f64(leaves.weight),
        bias: None,
    };
    leaves.differentiate(full(&leaves))
}

/// The root of the mean square of what two are apart, loss and each gradient, relative to the
/// expected.
fn errors(found: &Found, expected: &Found) -> Vec<f64> {
    let rms = |values: &mut dyn Iterator<Item = f64>| {
        let (sum, count) = values.fold((0.0, 0), |(sum, count), x| (sum + x * x, count + 1));
        (sum / f64::from(count)).sqrt()
    };
    let gradients = found.gradients.iter().zip(&expected.gradients).take(2);
    let gradients = gradients.map(|(found, expected)| {
        let (found, expected) = (
            found.as_ref().expect("there"),
            expected.as_ref().expect("there"),
        );
        let apart = rms(&mut found.iter().zip(expected).map(|(a, b)| a - b));
        apart / rms(&mut expected.iter().copied())
    });
    let loss = (found.loss - expected.loss).abs() / expected.loss;
    [loss].into_iter().chain(gradients).collect()
}

fn no_worse_than_burns<B: AutodiffBackend>(name: &str, rounding: f64) {
    let exact = exact();
    let leaves = Leaves::<B>::new(SHAPE, false);
    let burns = errors(&scaled(&leaves, full(&leaves), SCALE), &exact);
    for chunk in [16, 64, 160] {
        for scale in [1.0, SCALE] {
            let loss = leaves
                .chunked(classes_of(SHAPE[0], SHAPE[2]), &in_chunks_of(chunk))
                .loss;
            let ours = errors(&scaled(&leaves, loss, scale), &exact);
            println!("{name}, chunks of {chunk}, scale {scale}: {ours:?}, Burn's {burns:?}");
            for (ours, burns) in ours.iter().zip(&burns) {
                // Other numbers are rounded, which makes some percent; the loss is one number, of
                // f32 logits good to some last digits.
                assert!(*ours <= burns * 1.1 + 2e-7, "{ours} {burns}");
                assert!(*ours < rounding, "{ours}");
            }
        }
    }
}

#[test]
fn of_f32() {
    no_worse_than_burns::<Plain>("f32", 1e-6);
}

#[test]
fn of_bf16() {
    no_worse_than_burns::<Autocast<Managed, Bf16>>("bf16", 1e-2);
}

#[test]
fn of_f16() {
    no_worse_than_burns::<Autocast<Managed, F16>>("f16", 1e-3);
}

/// Operands that are low themselves, without autocast.
#[test]
fn of_low_operands() {
    let exact = exact();
    for (dtype, rounding) in [(FloatDType::BF16, 1e-2), (FloatDType::F16, 2e-3)] {
        let leaves = Leaves::<Plain>::new(SHAPE, false);
        let low =
            |tensor: Tensor<Plain, 2>| tensor.set_require_grad(false).cast(dtype).require_grad();
        let leaves = Leaves {
            hidden: low(leaves.hidden),
            weight: low(leaves.weight),
            bias: None,
        };
        let loss = leaves
            .chunked(classes_of(SHAPE[0], SHAPE[2]), &in_chunks_of(64))
            .loss;
        let ours = errors(&scaled(&leaves, loss, SCALE), &exact);
        println!("{dtype:?}: {ours:?}");
        assert!(ours.iter().all(|ours| *ours < rounding), "{ours:?}");
    }
}

/// All rows have the same target, so that a column of the weight's gradient is the sum of all of
/// them; hidden states are large.
#[test]
fn f16_does_not_overflow() {
    type B = Autocast<Managed, F16>;
    let leaves = Leaves::<B>::new([256, 24, 64], false);
    let large = leaves
        .hidden
        .clone()
        .set_require_grad(false)
        .mul_scalar(500.0)
        .require_grad();
    let leaves = Leaves {
        hidden: large,
        weight: leaves
            .weight
            .set_require_grad(false)
            .mul_scalar(0.01)
            .require_grad(),
        bias: None,
    };
    let targets = Tensor::<B, 1, Int>::zeros([256], &Default::default());
    let config = LinearCrossEntropyLossConfig::new().with_reduction(burn::nn::loss::Reduction::Sum);
    let found = leaves.differentiate(leaves.chunked(targets, &config).loss);
    let finite = |gradient: &Vec<f64>| gradient.iter().all(|x| x.is_finite());
    assert!(found.gradients.iter().flatten().all(finite));
    let weight = found.gradients[1].as_ref().expect("there");
    let largest = weight.iter().fold(0.0f64, |max, x| max.max(x.abs()));
    assert!(largest > 10_000.0, "{largest}");
}
