//! Law: no operation's value or gradient is worse under autocast than PyTorch's autocast of the same operation.

mod cases;
mod reference;

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::Autodiff;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use burn_amp::{Autocast, Bf16, F16, Policy};
use burn_flex::Flex;
use tests::compare::values;
use tests::defaults::Defaults;

use cases::{Case, cases};
use reference::{Expected, Reference, references};

/// The value, and the gradient of each operand.
fn run<B: AutodiffBackend>(case: &Case<B>, reference: &Reference, low: DType) -> Vec<Vec<f32>> {
    let device = B::Device::default();
    let leaves: Vec<Tensor<B, 2>> = reference
        .operands
        .iter()
        .map(|grid| {
            let data = TensorData::new(grid.values.clone(), [grid.rows, grid.columns]);
            Tensor::from_data(data, &device).require_grad()
        })
        .collect();
    let low: Vec<_> = leaves.iter().map(|leaf| leaf.clone().cast(low)).collect();
    let result = (case.run)(&low);
    let gradients = result.clone().sum().backward();
    let mut found = vec![values(result)];
    for leaf in &leaves {
        let zero = || vec![0.0; leaf.shape().num_elements()];
        found.push(leaf.grad(&gradients).map_or_else(zero, values));
    }
    found
}

/// The first number that is worse than PyTorch's allow, as a message, and the worst error in units of what is allowed.
fn compare(found: &[f32], expected: &Expected, low: FloatDType) -> (f64, Option<String>) {
    assert_eq!(
        found.len(),
        expected.exact.len(),
        "numbers of elements differ"
    );
    let range = low.finfo();
    // The distance of the smallest numbers of the type.
    let smallest = range.min_positive * range.epsilon;
    let mut worst = (0.0, None);
    for (index, (&found, (&exact, &error))) in found
        .iter()
        .zip(expected.exact.iter().zip(&expected.error))
        .enumerate()
    {
        if !error.is_finite() || !exact.is_finite() {
            continue;
        }
        let rounding = range.epsilon * exact.abs() + smallest;
        let difference = (f64::from(found) - exact).abs();
        let ratio = difference / (2.0 * error + rounding);
        let ratio = if ratio.is_nan() { f64::INFINITY } else { ratio };
        if ratio > worst.0 {
            worst = (
                ratio,
                Some(format!(
                    "[{index}] {found:e} for {exact:e}, PyTorch's error {error:e}"
                )),
            );
        }
    }
    worst
}

fn check<X: Backend, P: Policy>(low: FloatDType)
where
    Autocast<Autodiff<X>, P>: AutodiffBackend,
{
    let references = references(low);
    let mut worse = Vec::new();
    for case in cases::<Autocast<Autodiff<X>, P>>() {
        let reference = references
            .get(case.name)
            .unwrap_or_else(|| panic!("no reference of {}", case.name));
        let computed = catch_unwind(AssertUnwindSafe(|| run(&case, reference, low.into())));
        let Ok(found) = computed else {
            worse.push(format!("{} panics", case.name));
            continue;
        };
        for (index, (found, expected)) in found.iter().zip(&reference.expected).enumerate() {
            let (ratio, message) = compare(found, expected, low);
            if ratio > 1.0 {
                let what = ["value", "gradient of a", "gradient of b", "gradient of c"][index];
                worse.push(format!(
                    "{} {what}: {ratio:.3} {}",
                    case.name,
                    message.unwrap_or_default()
                ));
            }
        }
    }
    assert!(
        worse.is_empty(),
        "worse than PyTorch under {}:\n{}",
        P::name(),
        worse.join("\n")
    );
}

#[test]
fn flex_f16() {
    check::<Flex, F16>(FloatDType::F16);
}

#[test]
fn flex_bf16() {
    check::<Flex, Bf16>(FloatDType::BF16);
}

#[test]
fn defaults_f16() {
    check::<Defaults<Flex>, F16>(FloatDType::F16);
}

#[test]
fn defaults_bf16() {
    check::<Defaults<Flex>, Bf16>(FloatDType::BF16);
}
