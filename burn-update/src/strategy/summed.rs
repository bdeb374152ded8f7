//! An output of a model whose size does not depend on the number of classes.

use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use burn::train::metric::{AccuracyInput, Adaptor, LossInput, PerplexityInput};
use burn::train::{ClassificationOutput, ItemLazy, SequenceOutput};

use super::items::RankItem;

/// What Burn's metrics of loss, accuracy and perplexity need of a batch, added up on the rank that
/// computed it: 16 bytes between processes, where logits are four bytes for each class of each
/// prediction.
///
/// As the `Output` of a `TrainStep` and an `InferenceStep`, in place of Burn's
/// `ClassificationOutput` or `SequenceOutput`, from which it is made. Loss and accuracy are the
/// same bits, perplexity is the same to f32 rounding:
///
/// ```
/// use burn::prelude::*;
/// use burn::train::{ClassificationOutput, InferenceStep};
/// use burn_update::SummedOutput;
///
/// # #[derive(Module, Debug)]
/// # struct Model<B: Backend> { linear: nn::Linear<B> }
/// # impl<B: Backend> Model<B> {
/// #     fn forward_classification(&self, _: Tensor<B, 2>) -> ClassificationOutput<B> { unreachable!() }
/// # }
/// impl<B: Backend> InferenceStep for Model<B> {
///     type Input = Tensor<B, 2>;
///     type Output = SummedOutput<B>; // was: ClassificationOutput<B>
///
///     fn step(&self, batch: Tensor<B, 2>) -> SummedOutput<B> {
///         self.forward_classification(batch).into()
///     }
/// }
/// ```
///
/// A metric that needs each prediction, such as top-k accuracy or AUROC, needs Burn's outputs, or a
/// [`RankItem`] of your own.
#[derive(Clone, Debug)]
pub struct SummedOutput<B: Backend> {
    /// `[1]`
    loss: Tensor<B, 1>,
    /// `[3]`: predictions that count, those of them that are right, and the sum of the logarithms
    /// of the probabilities of their targets.
    sums: Tensor<B, 1>,
}

impl<B: Backend> SummedOutput<B> {
    /// Of the loss of a batch, as it is shown, its logits (`[predictions, classes]`), and the
    /// classes that they should predict.
    ///
    /// Costs a log-softmax of the logits, as Burn's perplexity does on rank 0.
    pub fn new(loss: Tensor<B, 1>, logits: Tensor<B, 2>, targets: Tensor<B, 1, Int>) -> Self {
        let counted = Tensor::ones_like(&targets);
        Self::sum(loss, logits, targets, counted)
    }

    /// Without the predictions whose target is `pad_token`. The metrics then need no pad token.
    pub fn without_padding(
        loss: Tensor<B, 1>,
        logits: Tensor<B, 2>,
        targets: Tensor<B, 1, Int>,
        pad_token: usize,
    ) -> Self {
        let counted = targets.clone().not_equal_elem(pad_token as i64).int();
        Self::sum(loss, logits, targets, counted)
    }

    fn sum(
        loss: Tensor<B, 1>,
        logits: Tensor<B, 2>,
        targets: Tensor<B, 1, Int>,
        counted: Tensor<B, 1, Int>,
    ) -> Self {
        let logits = logits.detach();
        let predictions = logits.dims()[0];
        let predicted = logits.clone().argmax(1).reshape([predictions]);
        let right = predicted.equal(targets.clone()).int() * counted.clone();
        let of_classes = log_softmax(logits.cast(burn::tensor::DType::F32), 1);
        let of_targets = of_classes.gather(1, targets.unsqueeze_dim(1));
        let is_padding = counted.clone().equal_elem(0);
        let logarithms = of_targets.reshape([predictions]).mask_fill(is_padding, 0.0);
        let float = |counts: Tensor<B, 1, Int>| counts.sum().float().cast(logarithms.dtype());
        let sums = vec![float(counted), float(right), logarithms.clone().sum()];
        Self {
            loss: loss.detach(),
            sums: Tensor::cat(sums, 0),
        }
    }
}

impl<B: Backend> From<ClassificationOutput<B>> for SummedOutput<B> {
    fn from(output: ClassificationOutput<B>) -> Self {
        Self::new(output.loss, output.output, output.targets)
    }
}

/// By the logits, whatever the `predictions`.
impl<B: Backend> From<SequenceOutput<B>> for SummedOutput<B> {
    fn from(output: SequenceOutput<B>) -> Self {
        let [batch, time, classes] = output.logits.dims();
        let logits = output.logits.reshape([batch * time, classes]);
        Self::new(output.loss, logits, output.targets.reshape([batch * time]))
    }
}

/// The numbers of a [`SummedOutput`], on the host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchSums {
    /// The loss, as it is shown.
    pub loss: f32,
    /// Predictions that count.
    pub predictions: usize,
    /// Those of them that are right.
    pub right: usize,
    /// The sum of the logarithms of the probabilities of their targets.
    pub log_probability: f32,
}

impl<B: Backend> ItemLazy for SummedOutput<B> {
    type ItemSync = BatchSums;

    fn sync(self) -> BatchSums {
        let all = Tensor::cat(vec![self.loss.cast(self.sums.dtype()), self.sums], 0);
        let numbers: Vec<f32> = all.into_data().iter().collect();
        BatchSums {
            loss: numbers[0],
            predictions: numbers[1] as usize,
            right: numbers[2] as usize,
            log_probability: numbers[3],
        }
    }
}

/// Bytes of the four numbers.
const BYTES: usize = 16;

impl<B: Backend> RankItem for SummedOutput<B> {
    fn into_bytes(self) -> Vec<u8> {
        let sums = self.sync();
        let numbers = [
            sums.loss,
            sums.predictions as f32,
            sums.right as f32,
            sums.log_probability,
        ];
        numbers.into_iter().flat_map(f32::to_le_bytes).collect()
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() != BYTES {
            return Err(format!("{} bytes, but sums have {BYTES}", bytes.len()));
        }
        let number = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let numbers: Vec<_> = bytes.chunks(size_of::<f32>()).map(number).collect();
        let tensor = |numbers: &[f32]| {
            let data = TensorData::new(numbers.to_vec(), [numbers.len()]);
            Tensor::from_data(data, &Default::default())
        };
        Ok(Self {
            loss: tensor(&numbers[..1]),
            sums: tensor(&numbers[1..]),
        })
    }
}

// As many predictions of two classes, which have the same accuracy and the same perplexity: Burn's
// metrics take no sums.

impl<B: Backend> Adaptor<LossInput<B>> for BatchSums {
    fn adapt(&self) -> LossInput<B> {
        LossInput::new(Tensor::from_floats([self.loss], &Default::default()))
    }
}

impl<B: Backend> Adaptor<AccuracyInput<B>> for BatchSums {
    fn adapt(&self) -> AccuracyInput<B> {
        let logits = |prediction| {
            if prediction < self.right {
                [1.0, 0.0]
            } else {
                [0.0, 1.0]
            }
        };
        let (logits, targets) = two_classes(self.predictions, logits);
        AccuracyInput::new(logits, targets)
    }
}

impl<B: Backend> Adaptor<PerplexityInput<B>> for BatchSums {
    fn adapt(&self) -> PerplexityInput<B> {
        let each = self.log_probability / self.predictions as f32;
        let logits = [each, (-each.exp()).ln_1p()];
        let (logits, targets) = two_classes(self.predictions, |_| logits);
        PerplexityInput::new(logits, targets)
    }
}

/// Logits, and targets of the first class.
fn two_classes<B: Backend>(
    predictions: usize,
    logits: impl Fn(usize) -> [f32; 2],
) -> (Tensor<B, 2>, Tensor<B, 1, Int>) {
    let device = Default::default();
    let numbers: Vec<_> = (0..predictions).flat_map(logits).collect();
    let data = TensorData::new(numbers, [predictions, 2]);
    (
        Tensor::from_data(data, &device),
        Tensor::zeros([predictions], &device),
    )
}
