//! Mixed precision: the backend's alias gets `Autocast`; f16, whose gradients underflow, also an
//! update with a loss scale.
//!
//! `cargo run --release --example amp`

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::activation::gelu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Distribution, Tensor};
use burn_amp::{Autocast, F16, GradScaler, GradScalerConfig};
use burn_flex::Flex;
use burn_update::{Update, UpdateError};
use peak_alloc::PeakAlloc;

/// Counts the heap, for the figures below.
#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// On a GPU: `Autodiff<Cuda>`, and so on. Parameters, gradients and the optimizer's state are f32
/// in all three.
type Plain = Autodiff<Flex>;
type Bf16 = Autocast<Autodiff<Flex>>;
type Half = Autocast<Autodiff<Flex>, F16>;

const ROWS: usize = 1024;
const WIDTH: usize = 64;
const STEPS: usize = 40;

#[derive(Module, Debug)]
struct Model<B: Backend> {
    layers: Vec<Linear<B>>,
}

impl<B: Backend> Model<B> {
    fn new(device: &B::Device) -> Self {
        B::seed(device, 1);
        let widths = [(WIDTH, 256), (256, 256), (256, 256), (256, 1)];
        let layer = |(inputs, outputs)| LinearConfig::new(inputs, outputs).init(device);
        Self {
            layers: widths.map(layer).into(),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let (last, hidden) = self.layers.split_last().expect("four layers");
        last.forward(hidden.iter().fold(x, |x, layer| gelu(layer.forward(x))))
    }
}

/// Learns the length of a vector of random numbers. Returns the last loss.
fn train<B>(name: &str, mut optimizer: impl Optimizer<Model<B>, B>) -> f32
where
    B: AutodiffBackend,
{
    let device = Default::default();
    let mut model = Model::<B>::new(&device);
    B::seed(&device, 2);
    let x = Tensor::<B, 2>::random([ROWS, WIDTH], Distribution::Normal(0.0, 1.0), &device);
    let length = x.clone().square().sum_dim(1).sqrt() - 8.0;
    let mut kept = 0;
    let mut last = 0.0;
    for _ in 0..STEPS {
        let held = HEAP.current_usage();
        let output = model.forward(x.clone());
        kept = HEAP.current_usage() - held; // by autodiff, for backward
        // Squares and means run in f32 for operands of any type.
        let loss = (output - length.clone()).square().mean();
        assert_eq!(loss.dtype(), DType::F32);
        last = loss.clone().into_data().iter::<f32>().sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, gradients);
    }
    let mib = kept as f64 / f64::from(1 << 20);
    println!("{name:<18} loss {last:.4}, {mib:5.1} MiB kept for backward");
    last
}

fn main() -> Result<(), UpdateError> {
    let adamw = AdamWConfig::new();
    let plain = train::<Plain>("f32", adamw.init());
    let bf16 = train::<Bf16>("bf16", adamw.init());

    let scaler = GradScaler::new(GradScalerConfig::default()).expect("PyTorch's defaults");
    let update = Update::new(adamw.init()).scale(scaler.clone())?;
    let half = train::<Half>("f16 and a scale", update);
    println!(
        "the scale was {} at the end, {} steps overflowed and were skipped",
        scaler.scale(),
        scaler.skipped_steps()
    );
    for low in [bf16, half] {
        assert!(
            (low - plain).abs() < 0.1 * plain + 0.01,
            "{low} for {plain}"
        );
    }
    println!(
        "The CPU computes bf16 and f16 through f32: a GPU has the same losses, and is faster."
    );
    Ok(())
}
