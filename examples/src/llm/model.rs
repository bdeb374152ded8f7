//! The model.

use std::path::Path;

use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig,
};
use burn::prelude::*;
use burn::tensor::DType;
use burn_fused::{LinearCrossEntropy, LinearCrossEntropyLossConfig};

use super::{
    DecoderBlock, Layout, LlmConfig, LlmError, LoraConfig, Projection, Sequences, normalised,
    weights, write,
};
use crate::training::recompute::Checkpoint;

/// The target of a token whose successor is of another document.
const IGNORED: i64 = -100;

/// A decoder with its head. Its parameters have the paths of the files' tensors, but for a norm's
/// `gamma`, which is `weight` there.
#[derive(Module, Debug)]
pub struct Llm<B: Backend> {
    model: Decoder<B>,
    /// `None` where its weight is that of the embedding.
    lm_head: Option<Linear<B>>,
    #[module(skip)]
    config: LlmConfig,
    #[module(skip)]
    checkpoint: Checkpoint,
    /// How its layers are adapted, if any is.
    #[module(skip)]
    lora: Option<LoraConfig>,
    /// Numbers of the parameters that are trained.
    #[module(skip)]
    trained_parameters: usize,
}

/// Embedding, [blocks](DecoderBlock), and a final norm.
#[derive(Module, Debug)]
pub struct Decoder<B: Backend> {
    embed_tokens: Embedding<B>,
    layers: Vec<DecoderBlock<B>>,
    norm: RmsNorm<B>,
}

impl LlmConfig {
    /// A model whose parameters have no values yet: [`read_weights`](Llm::read_weights) says where
    /// they come from.
    pub fn init<B: Backend>(&self, device: &B::Device) -> Llm<B> {
        let embedding =
            EmbeddingConfig::new(self.vocabulary, self.width).with_initializer(Initializer::Zeros);
        let head = LinearConfig::new(self.width, self.vocabulary)
            .with_bias(false)
            .with_initializer(Initializer::Zeros);
        Llm {
            model: Decoder {
                embed_tokens: embedding.init(device),
                layers: (0..self.layers)
                    .map(|_| DecoderBlock::new(self, device))
                    .collect(),
                norm: RmsNormConfig::new(self.width)
                    .with_epsilon(self.norm_epsilon)
                    .init(device),
            },
            lm_head: (!self.is_tied).then(|| head.init(device)),
            config: self.clone(),
            checkpoint: Checkpoint::None,
            lora: None,
            trained_parameters: self.parameters(),
        }
    }
}

impl<B: Backend> Llm<B> {
    /// The model with the weights of a Hugging Face directory, each of which is read when it is
    /// first used, in the type of the backend's floats: so burn-zero's `offload_parameters`, and
    /// `prepare` at stage 3, have one of them at a time.
    ///
    /// # Errors
    ///
    /// A file that cannot be read, or is no safetensors file; a tensor that the model lacks, or has
    /// in another shape.
    ///
    /// # Panics
    ///
    /// The first use of a parameter panics if its file cannot be read any more.
    pub fn read_weights(self, folder: &Path) -> Result<Self, LlmError> {
        weights::read_on_use(self, folder)
    }

    /// Writes a Hugging Face directory that `transformers` loads: the parameters in f32, adapters
    /// merged into the layers that they adapt, each read when it is written, with the configuration and the tokenizer of the directory `from`, which
    /// the model was read from. Where ranks share the parameters all of them call this, and one has
    /// a directory to write to.
    ///
    /// # Errors
    ///
    /// A file that cannot be read or written.
    pub fn write(&self, from: &Path, to: Option<&Path>) -> Result<(), LlmError> {
        write::write(self, from, to)
    }

    /// What the model is made of.
    pub fn config(&self) -> &LlmConfig {
        &self.config
    }

    /// How its layers are adapted, if any is.
    pub fn lora(&self) -> Option<&LoraConfig> {
        self.lora.as_ref()
    }

    /// The number of trained numbers.
    pub fn trained_parameters(&self) -> usize {
        self.trained_parameters
    }

    pub(super) fn with_trained_parameters(self, trained_parameters: usize) -> Self {
        Self {
            trained_parameters,
            ..self
        }
    }

    /// A frozen model whose layers have been given adapters.
    pub(super) fn adapted(self, config: &LoraConfig) -> Self {
        let projections = self.projections();
        let adapted = projections
            .iter()
            .filter(|(_, layer)| layer.adapter().is_some());
        let numbers = adapted.map(|(_, layer)| config.rank * layer.sizes().iter().sum::<usize>());
        let trained_parameters = numbers.sum();
        Self {
            lora: Some(config.clone()),
            trained_parameters,
            ..self
        }
    }

    /// The linear layers of the blocks, with their paths.
    pub(super) fn projections(&self) -> Vec<(String, &Projection<B>)> {
        let blocks = self.model.layers.iter().enumerate();
        let of_block = |(number, block): (usize, _)| {
            let layers = DecoderBlock::projections(block).into_iter();
            layers.map(move |(path, layer)| (format!("model.layers.{number}.{path}"), layer))
        };
        blocks.flat_map(of_block).collect()
    }

    /// As [`projections`](Self::projections).
    pub(super) fn projections_mut(&mut self) -> Vec<(String, &mut Projection<B>)> {
        let blocks = self.model.layers.iter_mut().enumerate();
        let of_block = |(number, block): (usize, _)| {
            let layers = DecoderBlock::projections_mut(block).into_iter();
            layers.map(move |(path, layer)| (format!("model.layers.{number}.{path}"), layer))
        };
        blocks.flat_map(of_block).collect()
    }

    /// What becomes of the activations of each block until backward.
    #[must_use]
    pub fn with_checkpoint(self, checkpoint: Checkpoint) -> Self {
        Self { checkpoint, ..self }
    }

    /// # Shapes
    ///
    /// - tokens: `[batch, time]`
    /// - output: `[batch, time, width]`
    fn hidden(&self, tokens: Tensor<B, 2, Int>, layout: &Layout<B>) -> Tensor<B, 3> {
        // In a scope, because a tensor can only be moved to the host if a scope has recorded it from
        // its beginning.
        let embed = || in_f32(self.model.embed_tokens.forward(tokens));
        let embedded = self.checkpoint.scope("embedding", embed);
        let blocks = self.model.layers.iter().enumerate();
        let x = blocks.fold(embedded, |x, (number, block)| {
            let label = format!("layers.{number}");
            self.checkpoint.scope(&label, || block.forward(x, layout))
        });
        normalised(&self.model.norm, x)
    }

    /// # Shapes
    ///
    /// - tokens: `[batch, time]`
    /// - output: `[batch, time, vocabulary]`
    pub fn logits(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let [_, time] = tokens.dims();
        let layout = Layout::new(&self.config, &[], time, &tokens.device());
        let hidden = self.hidden(tokens, &layout);
        hidden.matmul(self.head_weight().unsqueeze())
    }

    /// The mean cross entropy of every token after the first of its document, in nats a token, and
    /// the number of these tokens. The logits never exist whole.
    pub fn loss(&self, sequences: &Sequences<B>) -> LinearCrossEntropy<B> {
        let [_, time] = sequences.tokens.dims();
        let (device, read) = (sequences.tokens.device(), time - 1);
        let layout = Layout::new(&self.config, &sequences.boundaries, read, &device);
        let tokens = sequences.tokens.clone().slice_dim(1, 0..read);
        let hidden = self.hidden(tokens, &layout).flatten::<2>(0, 1);
        let loss = LinearCrossEntropyLossConfig::new().with_ignore_index(Some(IGNORED));
        let targets = sequences.targets(IGNORED);
        loss.init()
            .forward_counted(hidden, self.head_weight(), None, targets)
    }

    /// `[width, vocabulary]`
    fn head_weight(&self) -> Tensor<B, 2> {
        match &self.lm_head {
            Some(head) => head.weight.val(),
            None => self.model.embed_tokens.weight.val().transpose(),
        }
    }
}

/// The residual stream is not in the type of a frozen embedding, or sums over many blocks would be
/// rounded to it.
fn in_f32<B: Backend>(embedded: Tensor<B, 3>) -> Tensor<B, 3> {
    match embedded.dtype() {
        DType::BF16 | DType::F16 => embedded.cast(DType::F32),
        _ => embedded,
    }
}
