//! The loss in chunks is the loss over full logits: PyTorch's numbers, Burn's, and itself under
//! everything that moves tensors.

mod golden;
mod laws;
mod precision;

use burn::backend::Autodiff;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor};
use burn_checkpoint::Remat;
use burn_flex::Flex;
use burn_fused::{
    Chunk, LinearCrossEntropy, LinearCrossEntropyLossConfig, Targets, linear_cross_entropy,
};

type Plain = Autodiff<Flex>;
type Managed = Autodiff<Remat<Flex>>;

/// Between -0.5 and 0.5.
fn numbers<B: Backend, const D: usize>(shape: [usize; D], seed: usize) -> Tensor<B, D> {
    let number = |index: usize| ((index * 7919 + seed * 104_729) % 1009) as f64 / 1009.0 - 0.5;
    let numbers: Vec<_> = (0..shape.iter().product())
        .map(|index| number(index) as f32)
        .collect();
    Tensor::<B, 1>::from_floats(numbers.as_slice(), &Default::default()).reshape(shape)
}

fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f64> {
    tensor
        .into_data()
        .convert::<f64>()
        .to_vec()
        .expect("converted")
}

/// The largest difference, relative to the largest magnitude of `expected`.
fn distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected
        .iter()
        .fold(f64::MIN_POSITIVE, |max, x| max.max(x.abs()));
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    // A NaN is as far as can be.
    let difference = differences.fold(0.0, |max, x| if x <= max { max } else { x });
    match difference.is_nan() {
        true => f64::INFINITY,
        false => difference / largest,
    }
}

/// Operands that are leaves.
#[derive(Clone)]
struct Leaves<B: Backend> {
    hidden: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
}

/// A loss, and the gradients of the leaves that have one: hidden, weight, bias.
#[derive(Debug, PartialEq)]
struct Found {
    loss: f64,
    gradients: Vec<Option<Vec<f64>>>,
}

impl<B: AutodiffBackend> Leaves<B> {
    fn new([rows, width, classes]: [usize; 3], bias: bool) -> Self {
        Self {
            hidden: numbers([rows, width], 1).mul_scalar(4.0).require_grad(),
            weight: numbers([width, classes], 2).require_grad(),
            bias: bias.then(|| numbers([classes], 3).require_grad()),
        }
    }

    fn chunked(
        &self,
        targets: impl Into<Targets<B>>,
        config: &LinearCrossEntropyLossConfig,
    ) -> LinearCrossEntropy<B> {
        let Self {
            hidden,
            weight,
            bias,
        } = self.clone();
        linear_cross_entropy(hidden, weight, bias, targets, config).expect("targets are classes")
    }

    /// The result of differentiating `loss`, with respect to these.
    fn differentiate(&self, loss: Tensor<B, 1>) -> Found {
        let gradients = loss.backward();
        let bias = self.bias.as_ref();
        Found {
            loss: values(loss)[0],
            gradients: vec![
                self.hidden.grad(&gradients).map(values),
                self.weight.grad(&gradients).map(values),
                bias.and_then(|bias| bias.grad(&gradients)).map(values),
            ],
        }
    }
}

impl Found {
    fn distance(&self, expected: &Self) -> f64 {
        let pairs = self.gradients.iter().zip(&expected.gradients);
        pairs.fold(
            distance(&[self.loss], &[expected.loss]),
            |most, pair| match pair {
                (Some(found), Some(expected)) => most.max(distance(found, expected)),
                (None, None) => most,
                _ => f64::INFINITY,
            },
        )
    }
}

/// Targets all over the classes.
fn classes_of<B: Backend>(rows: usize, classes: usize) -> Tensor<B, 1, Int> {
    let targets: Vec<_> = (0..rows)
        .map(|row| (row * 31 + row / 3) as i64 % classes as i64)
        .collect();
    Tensor::from_data(targets.as_slice(), &Default::default())
}

fn in_chunks_of(rows: usize) -> LinearCrossEntropyLossConfig {
    LinearCrossEntropyLossConfig::new().with_chunk(Chunk::Rows(rows))
}
