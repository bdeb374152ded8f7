//! AdamW with its state in host memory: the optimizer's line changes. 8 of 16 bytes of a parameter
//! leave the device, 12 with `Sharded`.
//!
//! `cargo run --release --example offload`

use std::time::Instant;

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::activation::gelu;
use burn::tensor::{Distribution, Tensor, backend::Backend};
use burn_flex::Flex;
use burn_zero::{HostAdamWConfig, OffloadConfig, ZeroError};

/// On a GPU `Autodiff<Cuda>`. With `Sharded<Autodiff<Cuda>>` gradients leave the device during
/// backward, too.
type B = Autodiff<Flex>;

const WIDTH: usize = 512;
const STEPS: usize = 6;

#[derive(Module, Debug)]
struct Model<B: Backend> {
    layers: Vec<Linear<B>>,
}

impl Model<B> {
    fn new() -> Self {
        let device = Default::default();
        B::seed(&device, 1);
        let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(&device);
        Self {
            layers: (0..8).map(layer).collect(),
        }
    }

    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let layers = self.layers.iter();
        let output = layers.fold(x.clone(), |x, layer| gelu(layer.forward(x)));
        (output - x).square().mean()
    }
}

/// Trains, and returns the losses, the fastest step of the optimizer in milliseconds, and the
/// optimizer.
fn train<O: Optimizer<Model<B>, B>>(mut optimizer: O) -> (Vec<f32>, f64, O) {
    let mut model = Model::new();
    let x = Tensor::random([64, WIDTH], Distribution::Default, &Default::default());
    let mut losses = Vec::new();
    let mut fastest = f64::INFINITY;
    for _ in 0..STEPS {
        let loss = model.loss(x.clone());
        losses.push(loss.clone().into_scalar());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let begin = Instant::now();
        model = optimizer.step(1e-3, model, gradients);
        fastest = f64::min(fastest, begin.elapsed().as_secs_f64() * 1e3);
    }
    (losses, fastest, optimizer)
}

fn main() -> Result<(), ZeroError> {
    // PyTorch's defaults, which `HostAdamWConfig` has too; Burn's own differ.
    let adamw = AdamWConfig::new()
        .with_epsilon(1e-8)
        .with_weight_decay(0.01);
    let (device, on_device, _) = train(adamw.init());

    let offloaded = OffloadConfig::new(HostAdamWConfig::default()).init()?; // was: adamw.init()
    let (host, on_host, offloaded) = train(offloaded);

    println!(
        "state of AdamW: {} bytes in host memory",
        offloaded.state_bytes()
    );
    println!("a step of Burn's AdamW {on_device:.1} ms, of the one fused loop {on_host:.1} ms");
    println!("losses {device:?}\n       {host:?}");
    for (device, host) in device.iter().zip(&host) {
        assert!((device - host).abs() <= 1e-4 * device.abs());
    }
    Ok(())
}
