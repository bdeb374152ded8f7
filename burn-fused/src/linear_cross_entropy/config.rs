//! The options.

use burn::config::Config;
use burn::nn::loss::Reduction;

/// Options of [`linear_cross_entropy`](fn@crate::linear_cross_entropy); creates
/// [`LinearCrossEntropyLoss`](crate::LinearCrossEntropyLoss).
#[derive(Config, Debug)]
pub struct LinearCrossEntropyLossConfig {
    /// A target that does not count, such as padding: its loss and its gradient are 0. It need not
    /// be a class. Default: none (PyTorch's is -100).
    pub ignore_index: Option<i64>,
    /// Label smoothing, 0 to 1: so much of a target's probability is spread evenly over all
    /// classes. Default 0.
    #[config(default = 0.0)]
    pub smoothing: f64,
    /// Adds `z_loss * log(sum(exp(logits)))^2` to each row's loss, which keeps logits from drifting
    /// (PaLM, arXiv 2204.02311, uses 1e-4). Default 0.
    #[config(default = 0.0)]
    pub z_loss: f64,
    /// `Mean` (and `Auto`) divides by
    /// [`LinearCrossEntropy::items`](crate::LinearCrossEntropy::items), `Sum` by nothing,
    /// `BatchMean` by all rows. Default `Mean`.
    #[config(default = "Reduction::Mean")]
    pub reduction: Reduction,
    /// How many rows have logits at a time. Default [`Chunk::Auto`].
    #[config(default = "Chunk::Auto")]
    pub chunk: Chunk,
    /// What happens at a target that is no class. Default [`OutOfRange::Error`].
    #[config(default = "OutOfRange::Error")]
    pub out_of_range: OutOfRange,
}

/// How many rows have logits at a time.
#[derive(Config, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// As many rows as five sixteenths of the width, whose logits take that part of the weight's
    /// bytes: fewer are slower to multiply. At least 16 MiB of logits. Up to a third of the width,
    /// all rows are one chunk that autodiff differentiates as usual, which is faster (1.7 times at
    /// 32 rows of 512) and takes about the same bytes.
    Auto,
    /// So many; gradients are always computed in the forward pass.
    Rows(usize),
    /// As many as have logits of so many bytes in f32, at least one row; gradients are always
    /// computed in the forward pass.
    Bytes(usize),
}

/// What happens at a target that is neither a class nor ignored.
#[derive(Config, Copy, Debug, PartialEq, Eq)]
pub enum OutOfRange {
    /// Returns an error with its row and value. Costs one read from the device, which waits for the
    /// device's pending work.
    Error,
    /// The loss, the gradients of weight and bias, and the gradient of the row's hidden states are
    /// NaN. Nothing is read.
    Nan,
}

/// The least that [`Chunk::Auto`] takes: below, calls of operations cost more than their work.
const LEAST_BYTES: usize = 16 << 20;

impl Chunk {
    /// Rows in a chunk.
    pub(super) fn rows(self, rows: usize, width: usize, classes: usize) -> usize {
        let with_bytes = |bytes: usize| bytes / (4 * classes);
        let chunk = match self {
            Self::Auto => with_bytes(LEAST_BYTES).max(width * 5 / 16),
            Self::Rows(rows) => rows,
            Self::Bytes(bytes) => with_bytes(bytes),
        };
        chunk.clamp(1, rows)
    }

    /// Whether the logits of all rows, three times, take no more than the gradient of the weight.
    pub(super) fn leaves_to_autodiff(self, rows: usize, width: usize) -> bool {
        self == Self::Auto && 3 * rows <= width
    }
}

impl LinearCrossEntropyLossConfig {
    pub(super) fn assert_valid(&self) {
        let (smoothing, z_loss) = (self.smoothing, self.z_loss);
        assert!(
            (0.0..=1.0).contains(&smoothing),
            "label smoothing is between 0 and 1, not {smoothing}"
        );
        assert!(z_loss >= 0.0, "z-loss is at least 0, not {z_loss}");
    }
}
