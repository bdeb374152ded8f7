//! Small models that between them use most kinds of layers.

use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::transformer::{
    TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, Gelu,
    GroupNorm, GroupNormConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, Relu,
};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Distribution, Int, Tensor};
use examples::gpt::model::{Gpt, GptConfig};

/// A classifier that makes its own inputs.
pub trait Classifier<B: Backend>: Module<B> {
    /// The number of classes of each model here.
    const CLASSES: usize = 8;

    /// A freshly initialised model.
    fn init(device: &B::Device) -> Self;

    /// Random inputs for a batch, and the logits `[batch, classes]` that the model gives them.
    fn logits(&self, batch: usize, device: &B::Device) -> Tensor<B, 2>;

    /// Cross entropy against fixed targets.
    fn loss(&self, batch: usize, device: &B::Device) -> Tensor<B, 1> {
        let targets = Tensor::<B, 1, Int>::arange(0..batch as i64, device)
            .remainder_scalar(Self::CLASSES as i64);
        CrossEntropyLossConfig::new()
            .init(device)
            .forward(self.logits(batch, device), targets)
    }
}

/// Linear, layer norm, GELU, dropout, linear.
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    input: Linear<B>,
    norm: LayerNorm<B>,
    dropout: Dropout,
    output: Linear<B>,
}

impl<B: Backend> Classifier<B> for Mlp<B> {
    fn init(device: &B::Device) -> Self {
        Self {
            input: LinearConfig::new(16, 32).init(device),
            norm: LayerNormConfig::new(32).init(device),
            dropout: DropoutConfig::new(0.1).init(),
            output: LinearConfig::new(32, Self::CLASSES).init(device),
        }
    }

    fn logits(&self, batch: usize, device: &B::Device) -> Tensor<B, 2> {
        let x = Tensor::random([batch, 16], Distribution::Normal(0.0, 1.0), device);
        let x = Gelu::new().forward(self.norm.forward(self.input.forward(x)));
        self.output.forward(self.dropout.forward(x))
    }
}

/// Convolutions, batch and group norm, pooling.
#[derive(Module, Debug)]
pub struct Cnn<B: Backend> {
    conv1: Conv2d<B>,
    norm1: BatchNorm<B>,
    pool: MaxPool2d,
    conv2: Conv2d<B>,
    norm2: GroupNorm<B>,
    mean: AdaptiveAvgPool2d,
    output: Linear<B>,
}

impl<B: Backend> Classifier<B> for Cnn<B> {
    fn init(device: &B::Device) -> Self {
        Self {
            conv1: Conv2dConfig::new([3, 8], [3, 3]).init(device),
            norm1: BatchNormConfig::new(8).init(device),
            pool: MaxPool2dConfig::new([2, 2]).init(),
            conv2: Conv2dConfig::new([8, 16], [3, 3]).init(device),
            norm2: GroupNormConfig::new(4, 16).init(device),
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            output: LinearConfig::new(16, Self::CLASSES).init(device),
        }
    }

    fn logits(&self, batch: usize, device: &B::Device) -> Tensor<B, 2> {
        let x = Tensor::random([batch, 3, 12, 12], Distribution::Normal(0.0, 1.0), device);
        let relu = Relu::new();
        let x = self
            .pool
            .forward(relu.forward(self.norm1.forward(self.conv1.forward(x))));
        let x = relu.forward(self.norm2.forward(self.conv2.forward(x)));
        self.output.forward(self.mean.forward(x).flatten(1, 3))
    }
}

/// Embeddings and Burn's own transformer encoder.
#[derive(Module, Debug)]
pub struct Transformer<B: Backend> {
    tokens: Embedding<B>,
    encoder: TransformerEncoder<B>,
    output: Linear<B>,
}

impl<B: Backend> Classifier<B> for Transformer<B> {
    fn init(device: &B::Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(32, 16).init(device),
            encoder: TransformerEncoderConfig::new(16, 32, 2, 2)
                .with_norm_first(true)
                .init(device),
            output: LinearConfig::new(16, Self::CLASSES).init(device),
        }
    }

    fn logits(&self, batch: usize, device: &B::Device) -> Tensor<B, 2> {
        let tokens = Tensor::<B, 1, Int>::arange(0..(batch * 6) as i64, device)
            .remainder_scalar(32)
            .reshape([batch, 6]);
        let x = self.tokens.forward(tokens);
        let x = self.encoder.forward(TransformerEncoderInput::new(x));
        self.output.forward(x.mean_dim(1).flatten(1, 2))
    }
}

/// The decoder-only transformer of the `gpt` example, with dropout.
#[derive(Module, Debug)]
pub struct Decoder<B: Backend> {
    gpt: Gpt<B>,
}

impl<B: Backend> Classifier<B> for Decoder<B> {
    fn init(device: &B::Device) -> Self {
        let config = GptConfig::new(12, 2, 2, 16)
            .with_vocabulary(32)
            .with_dropout(0.1);
        Self {
            gpt: config.init(device),
        }
    }

    fn logits(&self, batch: usize, device: &B::Device) -> Tensor<B, 2> {
        let tokens = Tensor::<B, 1, Int>::arange(0..(batch * 12) as i64, device)
            .mul_scalar(7)
            .remainder_scalar(32)
            .reshape([batch, 12]);
        let logits = self.gpt.forward(tokens);
        let classes = Self::CLASSES as i64;
        logits
            .slice([0..batch as i64, 11..12, 0..classes])
            .reshape([batch, Self::CLASSES])
    }
}

/// Burn's encoder and decoder with padding and causal masks; one embedding reads both texts and is
/// the output layer too.
#[derive(Module, Debug)]
pub struct EncoderDecoder<B: Backend> {
    tokens: Embedding<B>,
    encoder: TransformerEncoder<B>,
    decoder: TransformerDecoder<B>,
}

impl<B: Backend> EncoderDecoder<B> {
    const LENGTH: usize = 5;

    /// `[batch, LENGTH]` tokens that differ by sequence, and the mask of a padding at every second
    /// sequence's end.
    fn text(
        batch: usize,
        step: i64,
        device: &B::Device,
    ) -> (Tensor<B, 2, Int>, Tensor<B, 2, Bool>) {
        let shape = [batch, Self::LENGTH];
        let index = Tensor::<B, 1, Int>::arange(0..(batch * Self::LENGTH) as i64, device);
        let padding = index.clone().remainder_scalar(2 * Self::LENGTH as i64);
        let tokens = index
            .mul_scalar(step)
            .remainder_scalar(Self::CLASSES as i64);
        (
            tokens.reshape(shape),
            padding.equal_elem(Self::LENGTH as i64 - 1).reshape(shape),
        )
    }
}

impl<B: Backend> Classifier<B> for EncoderDecoder<B> {
    fn init(device: &B::Device) -> Self {
        let encoder = TransformerEncoderConfig::new(16, 32, 2, 1).init(device);
        let decoder = TransformerDecoderConfig::new(16, 32, 2, 1)
            .with_norm_first(true)
            .init(device);
        Self {
            tokens: EmbeddingConfig::new(Self::CLASSES, 16).init(device),
            encoder,
            decoder,
        }
    }

    fn logits(&self, batch: usize, device: &B::Device) -> Tensor<B, 2> {
        let (source, source_padding) = Self::text(batch, 7, device);
        let (target, target_padding) = Self::text(batch, 3, device);
        let causal = generate_autoregressive_mask(batch, Self::LENGTH, device);

        let source = TransformerEncoderInput::new(self.tokens.forward(source));
        let memory = self
            .encoder
            .forward(source.mask_pad(source_padding.clone()));
        let target = TransformerDecoderInput::new(self.tokens.forward(target), memory)
            .memory_mask_pad(source_padding)
            .target_mask_pad(target_padding)
            .target_mask_attn(causal);
        let features = self.decoder.forward(target).mean_dim(1).flatten(1, 2);
        features.matmul(self.tokens.weight.val().transpose())
    }
}
