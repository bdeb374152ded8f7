//! Three small models, of blocks, and what a few steps of training make of them: losses and
//! gradients. Compiled in the workspace with the patch and in the one without.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2dConfig, MaxPool2dConfig};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, Gelu,
    GroupNorm, GroupNormConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, Relu,
};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Distribution, Gradients, Int, Tensor};

const CLASSES: usize = 8;
/// With fewer rows the gradients of weights are most of a step, and a budget finds nothing to evict.
const BATCH: usize = 8;
const STEPS: usize = 3;

/// The backend on which a program is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// Burn's backend for CPUs.
    Flex,
    /// CubeCL on Vulkan, with Fusion if the feature is on.
    #[cfg(feature = "vulkan")]
    Vulkan,
}

impl On {
    /// Its device, with autodiff.
    pub fn device(self) -> Device {
        match self {
            Self::Flex => Device::flex().autodiff(),
            #[cfg(feature = "vulkan")]
            Self::Vulkan => Device::wgpu(burn::tensor::DeviceKind::DefaultDevice).autodiff(),
        }
    }

    /// The file, from this one's folder, with what stock Burn gives on this machine: on other CPUs
    /// and drivers kernels sum in another order.
    pub fn reference(self) -> &'static str {
        match self {
            Self::Flex => "target/reference-flex.json",
            #[cfg(feature = "vulkan")]
            Self::Vulkan if cfg!(feature = "fusion") => "target/reference-fusion.json",
            #[cfg(feature = "vulkan")]
            Self::Vulkan => "target/reference-vulkan.json",
        }
    }
}

/// What runs a block: the block itself, or a scope around it.
pub trait Around {
    /// Runs `block`.
    fn run<const D: usize>(&self, block: impl FnOnce() -> Tensor<D>) -> Tensor<D>;

    /// Runs the step of an optimizer.
    fn update<R>(&self, update: impl FnOnce() -> R) -> R {
        update()
    }
}

/// Nothing around a block.
pub struct Plain;

impl Around for Plain {
    fn run<const D: usize>(&self, block: impl FnOnce() -> Tensor<D>) -> Tensor<D> {
        block()
    }
}

/// A classifier made of blocks.
pub trait Program: Module {
    /// The name of its line in the reference.
    const NAME: &'static str;
    /// The model with new weights.
    fn init(device: &Device) -> Self;
    /// The logits `[batch, classes]` of new random inputs.
    fn logits(&self, device: &Device, around: &impl Around) -> Tensor<2>;
}

/// Linear, layer norm, GELU, dropout, with residuals.
#[derive(Module, Debug)]
pub struct Mlp {
    blocks: Vec<MlpBlock>,
    output: Linear,
}

#[derive(Module, Debug)]
struct MlpBlock {
    linear: Linear,
    norm: LayerNorm,
    dropout: Dropout,
}

impl Program for Mlp {
    const NAME: &'static str = "mlp";

    fn init(device: &Device) -> Self {
        let block = |_| MlpBlock {
            linear: LinearConfig::new(32, 32).init(device),
            norm: LayerNormConfig::new(32).init(device),
            dropout: DropoutConfig::new(0.1).init(),
        };
        Self {
            blocks: (0..3).map(block).collect(),
            output: LinearConfig::new(32, CLASSES).init(device),
        }
    }

    fn logits(&self, device: &Device, around: &impl Around) -> Tensor<2> {
        let mut x = Tensor::<2>::random([BATCH, 32], Distribution::Normal(0.0, 1.0), device);
        for block in &self.blocks {
            x = around.run(|| {
                let y = Gelu::new().forward(block.norm.forward(block.linear.forward(x.clone())));
                x.clone() + block.dropout.forward(y)
            });
        }
        self.output.forward(x)
    }
}

/// Convolutions, batch and group norm, pooling.
#[derive(Module, Debug)]
pub struct Cnn {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: GroupNorm,
    output: Linear,
}

impl Program for Cnn {
    const NAME: &'static str = "cnn";

    fn init(device: &Device) -> Self {
        Self {
            conv1: Conv2dConfig::new([3, 8], [3, 3]).init(device),
            norm1: BatchNormConfig::new(8).init(device),
            conv2: Conv2dConfig::new([8, 16], [3, 3]).init(device),
            norm2: GroupNormConfig::new(4, 16).init(device),
            output: LinearConfig::new(16, CLASSES).init(device),
        }
    }

    fn logits(&self, device: &Device, around: &impl Around) -> Tensor<2> {
        let normal = Distribution::Normal(0.0, 1.0);
        let x = Tensor::<4>::random([BATCH, 3, 12, 12], normal, device);
        let pool = MaxPool2dConfig::new([2, 2]).init();
        let x = around.run(|| {
            let y = self.norm1.forward(self.conv1.forward(x.clone()));
            pool.forward(Relu::new().forward(y))
        });
        let x = around.run(|| {
            let y = self.norm2.forward(self.conv2.forward(x.clone()));
            Relu::new().forward(y)
        });
        let x = AdaptiveAvgPool2dConfig::new([1, 1]).init().forward(x);
        self.output.forward(x.flatten(1, 3))
    }
}

/// Embeddings and Burn's transformer encoder, a layer a block.
#[derive(Module, Debug)]
pub struct Transformer {
    tokens: Embedding,
    layers: Vec<TransformerEncoder>,
    output: Linear,
}

impl Program for Transformer {
    const NAME: &'static str = "transformer";

    fn init(device: &Device) -> Self {
        let layer = TransformerEncoderConfig::new(16, 32, 2, 1).with_norm_first(true);
        Self {
            tokens: EmbeddingConfig::new(64, 16).init(device),
            layers: (0..2).map(|_| layer.init(device)).collect(),
            output: LinearConfig::new(16, CLASSES).init(device),
        }
    }

    fn logits(&self, device: &Device, around: &impl Around) -> Tensor<2> {
        let tokens = Tensor::<1, Int>::arange(0..(BATCH * 6) as i64, device).reshape([BATCH, 6]);
        let mut x = self.tokens.forward(tokens);
        for layer in &self.layers {
            x = around.run(|| layer.forward(TransformerEncoderInput::new(x.clone())));
        }
        self.output.forward(x.mean_dim(1).flatten(1, 2))
    }
}

/// Cross entropy against fixed targets.
pub fn loss<P: Program>(model: &P, device: &Device, around: &impl Around) -> Tensor<1> {
    let logits = model.logits(device, around);
    let targets = Tensor::<1, Int>::arange(0..BATCH as i64, device);
    CrossEntropyLossConfig::new()
        .init(device)
        .forward(logits, targets)
}

/// The loss and the gradients of a step, in order of visit.
pub struct Step {
    /// The loss.
    pub loss: Vec<f32>,
    /// Every parameter's gradient.
    pub gradients: Vec<Vec<f32>>,
}

/// A few steps with AdamW, from a fixed seed.
pub fn train<P: Program>(on: On, around: &impl Around) -> Vec<Step> {
    let device = on.device();
    device.seed(42);
    let mut model = P::init(&device);
    let mut optimizer: ModuleOptimizer = AdamWConfig::new().build().into();
    let mut found = Vec::new();
    for _ in 0..STEPS {
        let loss = loss(&model, &device, around);
        let grads = loss.backward();
        found.push(Step {
            loss: values(loss),
            gradients: gradients(&model, &grads),
        });
        let grads = GradientsParams::from_grads(grads, &model);
        model = around.update(|| optimizer.step(1e-2, model, grads));
    }
    found
}

/// FNV-1a of the bytes of each loss and of each gradient.
pub fn checksums(steps: &[Step]) -> Vec<u64> {
    let tensors = steps
        .iter()
        .flat_map(|step| std::iter::once(&step.loss).chain(&step.gradients));
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let checksum = |tensor: &Vec<f32>| {
        let bytes = tensor.iter().flat_map(|value| value.to_ne_bytes());
        bytes.fold(0xcbf2_9ce4_8422_2325, hash)
    };
    tensors.map(checksum).collect()
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    let data = tensor.into_data();
    data.try_into_vec::<f32>().expect("f32")
}

fn gradients(model: &impl Module, grads: &Gradients) -> Vec<Vec<f32>> {
    struct Collect<'a>(&'a Gradients, Vec<Vec<f32>>);
    impl ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = param.val().grad(self.0) {
                self.1.push(values(grad));
            }
        }
    }
    let mut visitor = Collect(grads, Vec::new());
    model.visit(&mut visitor);
    visitor.1
}
