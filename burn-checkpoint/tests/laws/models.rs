//! Small models, and one seeded step of them on any backend.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Distribution, Int, Tensor};
use parking_lot::{Mutex, MutexGuard};

use crate::block::Block;

/// Flex draws from one generator for the whole process: seeded steps take turns.
pub fn generator() -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    GENERATOR.lock()
}

/// A chain of blocks.
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    pub blocks: Vec<Block<B>>,
}

/// What a model's forward is wrapped with, block by block.
pub trait Around {
    fn block<B: Backend, const D: usize>(
        &self,
        region: impl FnOnce() -> Tensor<B, D>,
    ) -> Tensor<B, D>;
}

/// Nothing.
pub struct Bare;

impl Around for Bare {
    fn block<B: Backend, const D: usize>(
        &self,
        region: impl FnOnce() -> Tensor<B, D>,
    ) -> Tensor<B, D> {
        region()
    }
}

/// A model with a loss of its own.
pub trait Model<B: Backend>: Module<B> {
    fn new(device: &B::Device) -> Self;
    fn loss(&self, around: &impl Around, device: &B::Device) -> Tensor<B, 1>;
}

impl<B: Backend> Model<B> for Mlp<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            blocks: (0..6).map(|_| Block::new(16, 32, 0.2, device)).collect(),
        }
    }

    fn loss(&self, around: &impl Around, device: &B::Device) -> Tensor<B, 1> {
        let mut x = Tensor::random([32, 16], Distribution::Normal(0.0, 1.0), device);
        for block in &self.blocks {
            x = around.block(|| block.forward(x));
        }
        x.powf_scalar(2.0).mean()
    }
}

/// Convolutions, batch norm, pooling.
#[derive(Module, Debug)]
pub struct Cnn<B: Backend> {
    conv1: Conv2d<B>,
    pub norm: BatchNorm<B>,
    conv2: Conv2d<B>,
}

impl<B: Backend> Model<B> for Cnn<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            conv1: Conv2dConfig::new([3, 8], [3, 3]).init(device),
            norm: BatchNormConfig::new(8).init(device),
            conv2: Conv2dConfig::new([8, 4], [3, 3]).init(device),
        }
    }

    fn loss(&self, around: &impl Around, device: &B::Device) -> Tensor<B, 1> {
        let x = Tensor::random([4, 3, 12, 12], Distribution::Normal(0.0, 1.0), device);
        let x = around.block(|| {
            let x = self.norm.forward(self.conv1.forward(x));
            burn::tensor::activation::relu(x)
        });
        let x = around.block(|| {
            let x = burn::tensor::module::max_pool2d(x, [2, 2], [2, 2], [0, 0], [1, 1], false);
            burn::tensor::activation::softmax(self.conv2.forward(x), 1)
        });
        x.powf_scalar(2.0).mean()
    }
}

/// Embeddings with tied weights and Burn's transformer encoder, with masks and dropout.
#[derive(Module, Debug)]
pub struct Transformer<B: Backend> {
    tokens: Embedding<B>,
    encoder: TransformerEncoder<B>,
}

impl<B: Backend> Model<B> for Transformer<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(32, 16).init(device),
            encoder: TransformerEncoderConfig::new(16, 32, 2, 2).init(device),
        }
    }

    fn loss(&self, around: &impl Around, device: &B::Device) -> Tensor<B, 1> {
        let tokens = Tensor::<B, 1, Int>::arange(0..24, device)
            .remainder_scalar(32)
            .reshape([4, 6]);
        let pad = tokens.clone().lower_elem(3);
        let x = around.block(|| self.tokens.forward(tokens));
        let mask = burn::nn::attention::generate_autoregressive_mask(4, 6, device);
        let x = around.block(|| {
            let input = TransformerEncoderInput::new(x)
                .mask_attn(mask)
                .mask_pad(pad);
            self.encoder.forward(input)
        });
        let table = self.tokens.weight.val().transpose().unsqueeze::<3>();
        let logits = around.block(|| x.matmul(table));
        burn::tensor::activation::log_softmax(logits, 2)
            .narrow(2, 0, 3)
            .mean()
            .neg()
    }
}

struct Collect<'a, B: AutodiffBackend> {
    grads: &'a B::Gradients,
    found: Vec<Vec<u8>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Collect<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let value = param.val();
        // Running statistics have no gradients, and are those of the step before here: see
        // `statistics.rs`.
        let found = value.grad(self.grads).unwrap_or_else(|| value.inner());
        self.found.push(found.into_data().bytes.to_vec());
    }
}

/// A model whose parameters are drawn, the same each time.
pub fn model<B: Backend, M: Model<B>>() -> M {
    let device = Default::default();
    B::seed(&device, 7);
    let model = M::new(&device);
    parameters::<B, M>(&model);
    model
}

/// The bits of the loss and of every gradient of one step.
pub fn step<B: AutodiffBackend, M: Model<B>>(around: &impl Around) -> Vec<Vec<u8>> {
    let model = model::<B, M>();
    step_of::<B, M>(&model, around)
}

/// As [`step`], of this model.
pub fn step_of<B: AutodiffBackend, M: Model<B>>(model: &M, around: &impl Around) -> Vec<Vec<u8>> {
    B::seed(&Default::default(), 8);
    gradients::<B, M>(model, around)
}

/// The bits of the loss and of every gradient of one pass.
pub fn gradients<B: AutodiffBackend, M: Model<B>>(model: &M, around: &impl Around) -> Vec<Vec<u8>> {
    bits_of(model, model.loss(around, &Default::default()))
}

/// The same of a loss.
pub fn bits_of<B: AutodiffBackend, M: Model<B>>(model: &M, loss: Tensor<B, 1>) -> Vec<Vec<u8>> {
    let mut bits = vec![loss.to_data().bytes.to_vec()];
    let grads = loss.backward();
    let mut collect = Collect::<B> {
        grads: &grads,
        found: Vec::new(),
    };
    model.visit(&mut collect);
    bits.extend(collect.found);
    bits
}

struct Parameters {
    found: Vec<Vec<u8>>,
}

impl<B: Backend> ModuleVisitor<B> for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.found.push(param.val().into_data().bytes.to_vec());
    }
}

/// The bits of every parameter.
pub fn parameters<B: Backend, M: Module<B>>(model: &M) -> Vec<Vec<u8>> {
    let mut parameters = Parameters { found: Vec::new() };
    model.visit(&mut parameters);
    parameters.found
}
