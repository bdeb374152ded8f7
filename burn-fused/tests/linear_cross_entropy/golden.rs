//! PyTorch's numbers (golden.py), for every option, in chunks of every size, f32 and f64, and with
//! decorators.

use burn::nn::loss::Reduction;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{FloatDType, Tensor};
use burn_amp::{Autocast, Off};
use burn_fused::{Chunk, LinearCrossEntropyLossConfig, Targets};
use serde_json::Value;

use super::*;

const ROWS: usize = 7;
const WIDTH: usize = 24;
const CLASSES: usize = 9;
const TARGETS: [i64; ROWS] = [3, 0, 8, 5, 3, 1, 7];

const CHUNKS: [Chunk; 6] = [
    // So few rows are left to autodiff.
    Chunk::Auto,
    Chunk::Rows(1),
    Chunk::Rows(3),
    Chunk::Rows(ROWS),
    Chunk::Rows(100),
    // Two rows.
    Chunk::Bytes(2 * CLASSES * 4),
];

fn floats(value: &Value) -> Vec<f64> {
    let numbers = value.as_array().expect("a list").iter();
    numbers.map(|x| x.as_f64().expect("a number")).collect()
}

fn check<B: AutodiffBackend>(dtype: FloatDType, rounding: f64) {
    let golden: Value = serde_json::from_str(include_str!("golden.json")).expect("JSON");
    for case in golden["cases"].as_array().expect("a list") {
        let flag = |key: &str| case[key].as_bool().expect("a flag");
        let number = |key: &str| case[key].as_f64().expect("a number");
        let mut classes = TARGETS;
        for row in floats(&case["ignored"]) {
            classes[row as usize] = -100;
        }
        let config = LinearCrossEntropyLossConfig::new()
            .with_ignore_index(Some(-100))
            .with_smoothing(number("smoothing"))
            .with_z_loss(number("z_loss"))
            .with_reduction(match case["reduction"].as_str() {
                Some("mean") => Reduction::Mean,
                Some("sum") => Reduction::Sum,
                _ => Reduction::BatchMean,
            });
        let expected = |key: &str| {
            let gradient = &case["gradients"][key];
            gradient.is_array().then(|| floats(gradient))
        };
        let expected = Found {
            loss: number("loss"),
            gradients: ["hidden", "weight", "bias"].map(expected).into(),
        };
        for chunk in CHUNKS {
            let leaves = Leaves::<B>::new([ROWS, WIDTH, CLASSES], flag("bias"));
            let leaf = |tensor: Tensor<B, 2>| {
                tensor
                    .detach()
                    .set_require_grad(false)
                    .cast(dtype)
                    .require_grad()
            };
            let leaves = Leaves {
                hidden: leaf(leaves.hidden),
                weight: leaf(leaves.weight),
                bias: leaves
                    .bias
                    .map(|bias| bias.set_require_grad(false).cast(dtype).require_grad()),
            };
            let classes = Tensor::from_data(classes, &Default::default());
            let targets = match flag("weighted") {
                true => Targets::weighted(classes, numbers([ROWS], 4).add_scalar(1.0)),
                false => classes.into(),
            };
            let output = leaves.chunked(targets, &config.clone().with_chunk(chunk));
            let items = distance(&values(output.items), &[number("items")]);
            let distance = leaves
                .differentiate(output.loss)
                .distance(&expected)
                .max(items);
            println!("{} {chunk:?}: {distance:.1e}", case["name"]);
            assert!(
                distance < rounding,
                "{} {chunk:?}: {distance}",
                case["name"]
            );
        }
    }
}

#[test]
fn in_f32() {
    check::<Plain>(FloatDType::F32, 2e-6);
}

/// The inputs and golden gradients have 9 digits.
#[test]
fn in_f64() {
    check::<Plain>(FloatDType::F64, 5e-8);
}

#[test]
fn below_decorators() {
    check::<Autocast<Managed, Off>>(FloatDType::F32, 2e-6);
}
