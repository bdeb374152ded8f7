//! Cross entropy of a linear layer's output whose logits never exist whole.
//!
//! The loss is that of `logits = hidden * weight + bias`, of rows times classes: in a language
//! model more than all other activations together. Here the rows are taken in chunks. The forward
//! pass computes a chunk's part of the loss and of the gradients from its logits, then drops these.
//! Backward multiplies the gradients by that of the loss: 1, a loss scale or the share of a
//! micro-batch.
//!
//! With [`Remat`](burn_checkpoint::Remat) below autodiff that is an operation of its own on the
//! tape, which multiplies in place and is reached through decorators ([`burn_decorator::tape`]). On
//! other backends it is a term of value 0 made from Burn's operations,
//!
//! ```text
//! loss = L + (s - detach(s)),   s = sum(hidden * dL/dhidden) + sum(weight * dL/dweight) + sum(bias * dL/dbias)
//! ```
//!
//! in which `L` and its gradients are constants; its backward needs a second tensor of each
//! gradient's size. Computing the chunks again in backward would cost a fourth product and save
//! nothing: autodiff runs operations of equal depth together, and so brings all logits back
//! (docs/linear-cross-entropy.md has both measured).
//!
//! Liger Kernel (arXiv 2410.10989) computes gradients in the forward pass as well; Cut
//! Cross-Entropy (arXiv 2411.09009) needs kernels of its own.

mod chunk;
mod config;
mod items;
mod module;
mod sum;
mod tracking;

pub use config::{Chunk, LinearCrossEntropyLossConfig, OutOfRange};
pub use items::{TargetOutOfRange, Targets};
pub use module::LinearCrossEntropyLoss;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};

use burn_checkpoint::{Recorder, keeping, recorder};
use chunk::{Gradients, Logits, add_to};
use items::Items;
use tracking::{Tracking, untracked};

/// What [`linear_cross_entropy`] returns.
#[derive(Clone, Debug)]
pub struct LinearCrossEntropy<B: Backend> {
    /// The loss, f32 of shape `[1]` (f64 for f64 operands).
    pub loss: Tensor<B, 1>,
    /// The sum of the weights of all items that count, without weights their number: what
    /// [`Reduction::Mean`](burn::nn::loss::Reduction) divides by. Of the type and shape of `loss`;
    /// exact up to 16.7 million items in f32.
    pub items: Tensor<B, 1>,
}

/// The cross entropy of `hidden * weight + bias` against `targets`, with the logits of one chunk of
/// rows in memory at a time.
///
/// Loss and gradients are those of [`CrossEntropyLoss`](burn::nn::loss::CrossEntropyLoss) over full
/// logits, to rounding. Where targets are ignored the mean is over the others, as PyTorch's; Burn's
/// divides by all of them.
///
/// # Shapes
///
/// - `hidden`: `[rows, width]`
/// - `weight`: `[width, classes]`, as [`Linear`](burn::nn::Linear) has it; of an embedding that is
///   tied, `weight.val().transpose()`
/// - `bias`: `[classes]`
/// - `targets`: `[rows]`, with a weight for each row if they are [`Targets::weighted`]
///
/// # Precision
///
/// The products run in the type that the backend gives a matmul of `hidden` and `weight`: under
/// `burn_amp::Autocast` the low one. All between them, and the sums over chunks, are f32 (f64 for
/// f64). What goes through an f16 product is scaled on the device to f16's range, whatever the loss
/// scale.
///
/// # Cost
///
/// On a backend with autodiff the gradients are computed here: 3 products for each chunk, and in
/// backward one pass over each gradient. With [`Remat`](burn_checkpoint::Remat) below autodiff
/// operands that need no gradient, such as a frozen weight, cost no product; without it only leaves
/// of autodiff are known, so all count as tracked. Few rows ([`Chunk::Auto`]) are one chunk that
/// autodiff differentiates as usual. Without autodiff (`valid()`) only the loss is computed.
///
/// Peak bytes beyond the operands, with [`Remat`](burn_checkpoint::Remat) below autodiff: 1.9 times
/// the gradient of `weight`, with the chunks of [`Chunk::Auto`], the gradient of `hidden`, and
/// small parts. Without it twice the gradient of `weight`. In a
/// [`checkpoint`](burn_checkpoint::checkpoint()) scope and under a
/// [`MemoryBudget`](burn_checkpoint::MemoryBudget) the gradients stay resident: they cost more to
/// compute than anything else of their size.
///
/// One number is read from the device, unless [`OutOfRange::Nan`] is chosen.
///
/// # Errors
///
/// [`TargetOutOfRange`] for a target that is no class, and not ignored.
///
/// # Panics
///
/// If shapes do not fit, or the configuration is [invalid](LinearCrossEntropyLossConfig::init).
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::{Int, Tensor};
/// use burn_fused::{LinearCrossEntropyLossConfig, linear_cross_entropy};
///
/// type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let hidden = Tensor::<B, 2>::ones([3, 4], &device).require_grad();
/// let weight = Tensor::<B, 2>::ones([4, 5], &device).require_grad();
/// let targets = Tensor::<B, 1, Int>::from_data([0, 4, -100], &device);
///
/// let config = LinearCrossEntropyLossConfig::new().with_ignore_index(Some(-100));
/// let output = linear_cross_entropy(hidden.clone(), weight.clone(), None, targets, &config)?;
/// let gradients = output.loss.clone().backward();
/// assert_eq!(weight.grad(&gradients).unwrap().dims(), [4, 5]);
/// assert!((output.loss.into_scalar() - 5f32.ln()).abs() < 1e-6);
/// assert_eq!(output.items.into_scalar(), 2.0);
/// # Ok::<(), burn_fused::TargetOutOfRange>(())
/// ```
pub fn linear_cross_entropy<B: Backend>(
    hidden: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
    targets: impl Into<Targets<B>>,
    config: &LinearCrossEntropyLossConfig,
) -> Result<LinearCrossEntropy<B>, TargetOutOfRange> {
    config.assert_valid();
    let [rows, width] = hidden.dims();
    let [inputs, classes] = weight.dims();
    assert_eq!(
        width, inputs,
        "hidden is [{rows}, {width}], weight [{inputs}, {classes}]"
    );
    let biases = bias.as_ref().map_or(classes, |bias| bias.dims()[0]);
    assert_eq!(biases, classes, "a bias of {biases} for {classes} classes");
    let full = match hidden.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let (items, total) = Items::new(targets.into(), rows, classes, full, config)?;
    let output = |loss| LinearCrossEntropy { loss, items: total };

    let tracking = Tracking::of(&hidden);
    let wanted = Wanted {
        hidden: tracking.is_tracked(&hidden),
        weight: tracking.is_tracked(&weight),
        bias: bias.as_ref().is_some_and(|bias| tracking.is_tracked(bias)),
    };
    if wanted.any() && config.chunk.leaves_to_autodiff(rows, width) {
        let logits = Logits::new(hidden, weight, bias, &items, config);
        return Ok(output(logits.loss));
    }

    let compute = || {
        let (hidden, weight) = (untracked(hidden.clone()), untracked(weight.clone()));
        let bias = bias.clone().map(untracked);
        // Cast once, not by each product, to the type that the backend gives a product of one
        // element.
        let element = hidden.clone().slice([0..1, 0..width]);
        let element = element.matmul(weight.clone().slice([0..width, 0..1]));
        let (hidden, weight) = (hidden.cast(element.dtype()), weight.cast(element.dtype()));

        let mut loss = None;
        let mut gradients = Gradients {
            wanted,
            ..Gradients::default()
        };
        let chunk_rows = config.chunk.rows(rows, width, classes);
        for start in (0..rows).step_by(chunk_rows) {
            let range = start..rows.min(start + chunk_rows);
            let hidden = hidden.clone().slice([range.clone(), 0..width]);
            let items = items.of_rows(range);
            let logits = Logits::new(hidden.clone(), weight.clone(), bias.clone(), &items, config);
            add_to(&mut loss, logits.loss.clone());
            if wanted.any() {
                gradients.add(logits.gradient(&items, config), hidden, &weight);
            }
        }
        if wanted.hidden {
            gradients.hidden = vec![Tensor::cat(gradients.hidden, 0)];
        }
        (loss.expect("at least one row"), gradients)
    };
    let (mut loss, mut gradients) = match recorder() {
        Recorder::None => compute(),
        // Otherwise the tensors would belong to the outer scope, which evicts them.
        Recorder::Scope | Recorder::Budget => keeping(compute),
    };
    if let Some(gradient) = gradients.hidden.pop() {
        loss = tracking.attach(loss, hidden, gradient);
    }
    if let Some(gradient) = gradients.weight {
        loss = tracking.attach(loss, weight, gradient.finish());
    }
    if let (Some(bias), Some(gradient)) = (bias, gradients.bias) {
        loss = tracking.attach(loss, bias, gradient);
    }
    Ok(output(loss))
}

/// The operands that a gradient is computed for.
#[derive(Clone, Copy, Default)]
struct Wanted {
    hidden: bool,
    weight: bool,
    bias: bool,
}

impl Wanted {
    fn any(self) -> bool {
        self.hidden || self.weight || self.bias
    }
}
