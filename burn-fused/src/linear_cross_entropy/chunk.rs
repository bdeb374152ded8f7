//! One chunk: its logits, its loss, and its part of the gradients.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, IndexingUpdateOp, Tensor};

use super::Wanted;
use super::config::LinearCrossEntropyLossConfig;
use super::items::Items;
use super::sum::Sum;

/// The logits of some rows, as the parts that their gradient is computed from.
pub(super) struct Logits<B: Backend> {
    /// `exp(logits - max)`: `[rows, classes]`
    exp: Tensor<B, 2>,
    /// Its sum over classes: `[rows, 1]`
    sum: Tensor<B, 2>,
    /// `log(sum(exp(logits)))`: `[rows, 1]`
    log_sum_exp: Tensor<B, 2>,
    /// What the rows add to the loss: `[1]`
    pub loss: Tensor<B, 1>,
}

impl<B: Backend> Logits<B> {
    /// Differentiable, if the operands are.
    pub fn new(
        hidden: Tensor<B, 2>,
        weight: Tensor<B, 2>,
        bias: Option<Tensor<B, 1>>,
        items: &Items<B>,
        config: &LinearCrossEntropyLossConfig,
    ) -> Self {
        let (smoothing, z_loss) = (config.smoothing, config.z_loss);
        let [_, classes] = weight.dims();
        let full = items.factors.dtype();
        let mut logits = hidden.matmul(weight).cast(full);
        if let Some(bias) = bias {
            logits = logits + bias.cast(full).unsqueeze();
        }
        let max = logits.clone().detach().max_dim(1);
        // Relative to the maximum, as the sum of the exponentials is: nothing large cancels.
        let logits = logits - max.clone();
        let mut expected = logits.clone().gather(1, items.classes.clone());
        if smoothing > 0.0 {
            let mean = logits.clone().sum_dim(1).div_scalar(classes as f64);
            expected = expected.mul_scalar(1.0 - smoothing) + mean.mul_scalar(smoothing);
        }
        let exp = logits.exp();
        let sum = exp.clone().sum_dim(1);
        let log_sum = sum.clone().log();
        let log_sum_exp = log_sum.clone() + max;
        let mut losses = log_sum - expected;
        if z_loss > 0.0 {
            losses = losses + log_sum_exp.clone().square().mul_scalar(z_loss);
        }
        let mut losses = losses * items.factors.clone();
        if let Some(ignored) = &items.ignored {
            losses = losses.mask_fill(ignored.clone(), 0);
        }
        Self {
            exp,
            sum,
            log_sum_exp,
            loss: losses.sum(),
        }
    }

    /// The gradient of the loss with respect to the logits.
    pub fn gradient(self, items: &Items<B>, config: &LinearCrossEntropyLossConfig) -> Tensor<B, 2> {
        let (smoothing, z_loss) = (config.smoothing, config.z_loss);
        let [_, classes] = self.exp.dims();
        let factors = items.factors.clone();
        let mut of_probability = factors.clone();
        if z_loss > 0.0 {
            let slope = self.log_sum_exp.mul_scalar(2.0 * z_loss).add_scalar(1.0);
            of_probability = of_probability * slope;
        }
        let mut gradient = self.exp * (of_probability / self.sum);
        if smoothing > 0.0 {
            gradient = gradient - factors.clone().mul_scalar(smoothing / classes as f64);
        }
        let of_target = factors.mul_scalar(smoothing - 1.0);
        gradient.scatter(1, items.classes.clone(), of_target, IndexingUpdateOp::Add)
    }
}

/// The sums of the chunks' gradients so far, for the operands that need one.
#[derive(Default)]
pub(super) struct Gradients<B: Backend> {
    pub wanted: Wanted,
    /// f16's largest absolute weight, `[1]`.
    pub largest_weight: Option<Tensor<B, 1>>,
    /// The rows of each chunk; in the end one tensor of all.
    pub hidden: Vec<Tensor<B, 2>>,
    pub weight: Option<Sum<B>>,
    pub bias: Option<Tensor<B, 1>>,
}

/// The gradient of the weight is added up in so many parts of the width: only one part of a chunk's
/// product is in memory at a time.
const PARTS: usize = 4;
/// A quarter of f16's largest number, for the rounding of sums.
const F16_RANGE: f32 = 16_384.0;

impl<B: Backend> Gradients<B> {
    /// Adds the gradients of a chunk, computed from the gradient of its logits.
    pub fn add(&mut self, logits: Tensor<B, 2>, hidden: Tensor<B, 2>, weight: &Tensor<B, 2>) {
        let [rows, width] = hidden.dims();
        let full = logits.dtype();
        if self.wanted.bias {
            add_to(&mut self.bias, logits.clone().sum_dim(0).squeeze_dim(0));
        }
        let scale = (weight.dtype() == DType::F16).then(|| {
            let known = &mut self.largest_weight;
            let largest_weight = known.get_or_insert_with(|| largest(weight.clone()));
            // An upper bound of all elements of `logits`, and of its products with the weight and
            // the hidden rows.
            let absolute = logits.clone().abs();
            let of_hidden = absolute.clone().sum_dim(1).max() * largest_weight.clone();
            let of_weight = absolute.clone().sum_dim(0).max() * largest(hidden.clone());
            let bound = of_hidden.max_pair(of_weight).max_pair(absolute.max());
            // If all elements are 0, any scale will do.
            let bound = bound.clamp_min(f32::MIN_POSITIVE.sqrt());
            bound.recip().mul_scalar(F16_RANGE).unsqueeze::<2>()
        });
        let logits = match &scale {
            Some(scale) => logits * scale.clone(),
            None => logits,
        };
        let logits = logits.cast(weight.dtype());
        let unscaled = |product: Tensor<B, 2>| match &scale {
            Some(scale) => product.cast(full) / scale.clone(),
            None => product.cast(full),
        };
        if self.wanted.hidden {
            let product = logits.clone().matmul(weight.clone().transpose());
            self.hidden.push(unscaled(product));
        }
        if self.wanted.weight {
            let zeros = || Sum::zeros(weight.dims(), full, &hidden.device());
            let sum = self.weight.take().unwrap_or_else(zeros);
            let parts = PARTS.min(width);
            self.weight = Some((0..parts).fold(sum, |sum, number| {
                let range = number * width / parts..(number + 1) * width / parts;
                let inputs = hidden.clone().slice([0..rows, range.clone()]).transpose();
                sum.add(range, unscaled(inputs.matmul(logits.clone())))
            }));
        }
    }
}

/// In place, where the backend can: nothing else holds the sum.
pub(super) fn add_to<B: Backend, const D: usize>(
    sum: &mut Option<Tensor<B, D>>,
    part: Tensor<B, D>,
) {
    *sum = Some(match sum.take() {
        Some(sum) => sum + part,
        None => part,
    });
}

/// The largest absolute element, f32 `[1]`.
fn largest<B: Backend>(tensor: Tensor<B, 2>) -> Tensor<B, 1> {
    let (max, min) = (tensor.clone().max(), tensor.min());
    max.cast(DType::F32).max_pair(min.cast(DType::F32).neg())
}
