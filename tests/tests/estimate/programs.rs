//! Eight training programs, each large enough that its tensors are most of the heap.

use burn::module::{AutodiffModule, Module};
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::transformer::{
    TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, Gelu, Linear,
    LinearConfig, Lstm, LstmConfig, Relu,
};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Distribution, Int, Tensor};
use examples::gpt::loader::TokenBatch;
use examples::gpt::model::{Gpt as GptModel, GptConfig};
use examples::training::recompute::Checkpoint;

/// A model and its loss.
pub trait Program {
    /// The model on a backend.
    type Model<B: AutodiffBackend>: AutodiffModule<B> + 'static;

    /// A fresh model.
    fn model<B: AutodiffBackend>(&self, device: &B::Device) -> Self::Model<B>;

    /// The loss of a batch that is made here.
    fn loss<B: AutodiffBackend>(&self, model: &Self::Model<B>, device: &B::Device) -> Tensor<B, 1>;
}

fn cross_entropy<B: Backend>(logits: Tensor<B, 2>) -> Tensor<B, 1> {
    let device = logits.device();
    let targets = Tensor::<B, 1, Int>::zeros([logits.dims()[0]], &device);
    CrossEntropyLossConfig::new()
        .init(&device)
        .forward(logits, targets)
}

/// The gpt example's model.
pub struct Gpt {
    layers: usize,
    checkpoint: Checkpoint,
    sequences: usize,
}

impl Gpt {
    /// Of so many layers, on eight sequences.
    pub fn new(layers: usize, checkpoint: Checkpoint) -> Self {
        Self {
            layers,
            checkpoint,
            sequences: 8,
        }
    }

    /// On as few sequences as software Vulkan computes in seconds.
    #[cfg(feature = "vulkan")]
    pub fn small(layers: usize, checkpoint: Checkpoint) -> Self {
        Self {
            sequences: 2,
            ..Self::new(layers, checkpoint)
        }
    }
}

impl Program for Gpt {
    type Model<B: AutodiffBackend> = GptModel<B>;

    fn model<B: AutodiffBackend>(&self, device: &B::Device) -> GptModel<B> {
        GptConfig::new(128, self.layers, 4, 128)
            .with_dropout(0.1)
            .with_checkpoint(self.checkpoint)
            .init(device)
    }

    fn loss<B: AutodiffBackend>(&self, model: &GptModel<B>, device: &B::Device) -> Tensor<B, 1> {
        let tokens = Tensor::<B, 2, Int>::zeros([self.sequences, 128], device);
        model.loss(TokenBatch {
            inputs: tokens.clone(),
            targets: tokens,
        })
    }
}

/// Convolutions, batch norm, pooling, on so many images.
pub struct Cnn(pub usize);

/// The model of [`Cnn`].
#[derive(Module, Debug)]
pub struct CnnModel<B: Backend> {
    convolutions: Vec<Conv2d<B>>,
    norms: Vec<BatchNorm<B>>,
    pool: MaxPool2d,
    output: Linear<B>,
}

impl Program for Cnn {
    type Model<B: AutodiffBackend> = CnnModel<B>;

    fn model<B: AutodiffBackend>(&self, device: &B::Device) -> CnnModel<B> {
        let channels = [3, 32, 48, 64];
        let convolution = |pair: &[usize]| {
            Conv2dConfig::new([pair[0], pair[1]], [3, 3])
                .with_padding(burn::nn::PaddingConfig2d::Same)
                .init(device)
        };
        let norm = |channels: &usize| BatchNormConfig::new(*channels).init(device);
        CnnModel {
            convolutions: channels.windows(2).map(convolution).collect(),
            norms: channels[1..].iter().map(norm).collect(),
            pool: MaxPool2dConfig::new([2, 2]).init(),
            output: LinearConfig::new(64, 10).init(device),
        }
    }

    fn loss<B: AutodiffBackend>(&self, model: &CnnModel<B>, device: &B::Device) -> Tensor<B, 1> {
        let mut x = Tensor::random([self.0, 3, 48, 48], Distribution::Default, device);
        for (convolution, norm) in model.convolutions.iter().zip(&model.norms) {
            x = Relu::new().forward(norm.forward(convolution.forward(x)));
            x = model.pool.forward(x);
        }
        let features = x.mean_dim(2).mean_dim(3).reshape([self.0, 64]);
        cross_entropy(model.output.forward(features))
    }
}

/// A recurrent network over sequences of this length.
pub struct Recurrent(pub usize);

/// The model of [`Recurrent`].
#[derive(Module, Debug)]
pub struct RecurrentModel<B: Backend> {
    lstm: Lstm<B>,
    output: Linear<B>,
}

impl Program for Recurrent {
    type Model<B: AutodiffBackend> = RecurrentModel<B>;

    fn model<B: AutodiffBackend>(&self, device: &B::Device) -> RecurrentModel<B> {
        RecurrentModel {
            lstm: LstmConfig::new(128, 256, true).init(device),
            output: LinearConfig::new(256, 10).init(device),
        }
    }

    fn loss<B: AutodiffBackend>(
        &self,
        model: &RecurrentModel<B>,
        device: &B::Device,
    ) -> Tensor<B, 1> {
        let x = Tensor::random([128, self.0, 128], Distribution::Default, device);
        let (_, state) = model.lstm.forward(x, None);
        cross_entropy(model.output.forward(state.hidden))
    }
}

/// Encoder and decoder with padding and causal masks.
pub struct EncoderDecoder {
    layers: usize,
    sequences: usize,
}

impl EncoderDecoder {
    /// Of so many layers each, on eight sequences.
    pub fn new(layers: usize) -> Self {
        Self {
            layers,
            sequences: 8,
        }
    }

    /// On as few sequences as software Vulkan computes in seconds.
    #[cfg(feature = "vulkan")]
    pub fn small(layers: usize) -> Self {
        Self {
            layers,
            sequences: 2,
        }
    }
}

/// The model of [`EncoderDecoder`].
#[derive(Module, Debug)]
pub struct EncoderDecoderModel<B: Backend> {
    tokens: Embedding<B>,
    encoder: TransformerEncoder<B>,
    decoder: TransformerDecoder<B>,
}

impl Program for EncoderDecoder {
    type Model<B: AutodiffBackend> = EncoderDecoderModel<B>;

    fn model<B: AutodiffBackend>(&self, device: &B::Device) -> EncoderDecoderModel<B> {
        EncoderDecoderModel {
            tokens: EmbeddingConfig::new(512, 128).init(device),
            encoder: TransformerEncoderConfig::new(128, 256, 4, self.layers).init(device),
            decoder: TransformerDecoderConfig::new(128, 256, 4, self.layers).init(device),
        }
    }

    fn loss<B: AutodiffBackend>(
        &self,
        model: &EncoderDecoderModel<B>,
        device: &B::Device,
    ) -> Tensor<B, 1> {
        let (batch, length) = (self.sequences, 64);
        let tokens = Tensor::<B, 2, Int>::zeros([batch, length], device);
        let padding = tokens.clone().lower_elem(0);
        let causal = generate_autoregressive_mask(batch, length, device);
        let source = TransformerEncoderInput::new(model.tokens.forward(tokens.clone()));
        let memory = model.encoder.forward(source.mask_pad(padding.clone()));
        let target = TransformerDecoderInput::new(model.tokens.forward(tokens), memory)
            .memory_mask_pad(padding.clone())
            .target_mask_pad(padding)
            .target_mask_attn(causal);
        let features = model.decoder.forward(target).reshape([batch * length, 128]);
        cross_entropy(features.matmul(model.tokens.weight.val().transpose()))
    }
}

/// Layers of a width with dropout.
pub struct Mlp(pub usize);

/// The model of [`Mlp`].
#[derive(Module, Debug)]
pub struct MlpModel<B: Backend> {
    layers: Vec<Linear<B>>,
    dropout: Dropout,
    output: Linear<B>,
}

impl Program for Mlp {
    type Model<B: AutodiffBackend> = MlpModel<B>;

    fn model<B: AutodiffBackend>(&self, device: &B::Device) -> MlpModel<B> {
        MlpModel {
            layers: (0..4)
                .map(|_| LinearConfig::new(self.0, self.0).init(device))
                .collect(),
            dropout: DropoutConfig::new(0.2).init(),
            output: LinearConfig::new(self.0, 10).init(device),
        }
    }

    fn loss<B: AutodiffBackend>(&self, model: &MlpModel<B>, device: &B::Device) -> Tensor<B, 1> {
        let mut x = Tensor::random([512, self.0], Distribution::Default, device);
        for layer in &model.layers {
            x = model.dropout.forward(Gelu::new().forward(layer.forward(x)));
        }
        cross_entropy(model.output.forward(x))
    }
}
