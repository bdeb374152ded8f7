//! A linear layer of a block, which LoRA can adapt.

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig, Initializer};
use burn::prelude::*;
use burn::tensor::module::linear;
use burn::tensor::{DType, Distribution, TensorPrimitive};
use burn_backend::tensor::FloatTensor;

use super::LoraConfig;

/// `x weight + bias`, and with an [`Adapter`] what that adds.
#[derive(Module, Debug)]
pub struct Projection<B: Backend> {
    /// `[inputs, outputs]`
    weight: Param<Tensor<B, 2>>,
    bias: Option<Param<Tensor<B, 1>>>,
    lora: Option<Adapter<B>>,
}

/// The trained part of an adapted layer, `scale dropout(x) a b` (Hu et al., arXiv 2106.09685).
#[derive(Module, Debug)]
pub struct Adapter<B: Backend> {
    /// `[inputs, rank]`
    a: Param<Tensor<B, 2>>,
    /// `[rank, outputs]`
    b: Param<Tensor<B, 2>>,
    dropout: Dropout,
    scale: f64,
}

impl<B: Backend> Projection<B> {
    /// A layer whose values are read from a file.
    pub(super) fn new(inputs: usize, outputs: usize, has_bias: bool, device: &B::Device) -> Self {
        let zeros = Initializer::Zeros;
        Self {
            weight: zeros.init([inputs, outputs], device),
            bias: has_bias.then(|| zeros.init([outputs], device)),
            lora: None,
        }
    }

    /// # Shapes
    ///
    /// - x: `[batch, time, inputs]`
    /// - output: `[batch, time, outputs]`
    pub fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let bias = self.bias.as_ref().map(|bias| bias.val());
        let adapted = self.lora.as_ref().map(|lora| lora.forward(x.clone()));
        let base = linear(x, self.weight.val(), bias);
        match adapted {
            Some(adapted) => base + adapted,
            None => base,
        }
    }

    /// Inputs and outputs.
    pub(super) fn sizes(&self) -> [usize; 2] {
        self.weight.lazy_shape().dims()
    }

    pub(super) fn adapter(&self) -> Option<&Adapter<B>> {
        self.lora.as_ref()
    }

    pub(super) fn set_adapter(&mut self, adapter: Adapter<B>) {
        self.lora = Some(adapter);
    }

    pub(super) fn device(&self) -> B::Device {
        self.weight.lazy_device()
    }
}

impl<B: Backend> Adapter<B> {
    /// PEFT's first values: `a` is drawn as PyTorch draws a linear layer's weight (Kaiming uniform
    /// with `a = sqrt(5)`), and `b` is zero, so that the model is the base at first.
    pub(super) fn drawn(
        config: &LoraConfig,
        [inputs, outputs]: [usize; 2],
        device: &B::Device,
    ) -> Self {
        let bound = 1.0 / (inputs as f64).sqrt();
        let uniform = Distribution::Uniform(-bound, bound);
        let a = Tensor::random([inputs, config.rank], uniform, device);
        let b = Tensor::zeros([config.rank, outputs], device);
        Self::new(config, a, b)
    }

    /// # Shapes
    ///
    /// - a: `[inputs, rank]`
    /// - b: `[rank, outputs]`
    pub(super) fn new(config: &LoraConfig, a: Tensor<B, 2>, b: Tensor<B, 2>) -> Self {
        Self {
            a: Param::from_tensor(a),
            b: Param::from_tensor(b),
            dropout: DropoutConfig::new(config.dropout).init(),
            scale: config.scale(),
        }
    }

    /// Scaled where it is narrowest.
    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let narrow = linear(self.dropout.forward(x), self.a.val(), None);
        linear(narrow * self.scale, self.b.val(), None)
    }

    /// What it adds to the layer's weight.
    pub(super) fn product(&self) -> Product<B> {
        Product {
            a: self.a.val(),
            b: self.b.val(),
            scale: self.scale,
        }
    }
}

/// The matrix that an adapter adds to its layer's weight, not computed yet.
pub(super) struct Product<B: Backend> {
    a: Tensor<B, 2>,
    b: Tensor<B, 2>,
    scale: f64,
}

impl<B: Backend> Product<B> {
    /// Adds it to a weight, in f32.
    ///
    /// # Shapes
    ///
    /// - weight, output: `[inputs, outputs]`
    pub(super) fn add_to(&self, weight: FloatTensor<B>) -> FloatTensor<B> {
        let weight = Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(weight));
        let product = self.a.clone().matmul(self.b.clone()) * self.scale;
        (weight.cast(DType::F32) + product)
            .into_primitive()
            .tensor()
    }
}
