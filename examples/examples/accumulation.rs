//! Gradient accumulation: the optimizer goes into `MultiSteps`, and a batch that does not fit into
//! memory is split into parts.
//!
//! `cargo run --release --example accumulation`

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::activation::gelu;
use burn::tensor::{Distribution, Tensor};
use burn_accum::{AccumConfig, ClipGlobalNorm, MultiSteps};
use burn_flex::Flex;
use peak_alloc::PeakAlloc;

/// Counts the heap, for the figures below.
#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Accumulation needs no change of the backend.
type B = Autodiff<Flex>;

const BATCH: usize = 2048;
const WIDTH: usize = 256;
const UPDATES: usize = 5;

#[derive(Module, Debug)]
struct Model<B: burn::tensor::backend::Backend> {
    layers: Vec<Linear<B>>,
}

impl Model<B> {
    fn new() -> Self {
        let device = Default::default();
        <B as burn::tensor::backend::Backend>::seed(&device, 1);
        let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(&device);
        Self {
            layers: (0..8).map(layer).collect(),
        }
    }

    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let output = self
            .layers
            .iter()
            .fold(x.clone(), |x, layer| gelu(layer.forward(x)));
        (output - x).square().mean()
    }
}

/// Trains in micro-batches of `rows`, and returns the model's output on one batch.
fn train(name: &str, rows: usize) -> Vec<f32> {
    let device = Default::default();
    let mut model = Model::new();
    let batch = Tensor::<B, 2>::random([BATCH, WIDTH], Distribution::Default, &device);

    // Was: AdamWConfig::new().init(). The norm that is clipped is that of the whole batch's
    // gradients.
    let clip = ClipGlobalNorm::new(AdamWConfig::new().init(), 0.5).expect("a positive norm");
    let steps = AccumConfig::mean(BATCH / rows);
    let mut optimizer = MultiSteps::new(clip, steps).expect("one step or more");

    let updates = optimizer.updates();
    let held = HEAP.current_usage();
    let mut peak = 0;
    for _ in 0..UPDATES {
        for part in batch.clone().split(rows, 0) {
            HEAP.reset_peak_usage();
            let gradients = GradientsParams::from_grads(model.loss(part).backward(), &model);
            model = optimizer.step(1e-3, model, gradients); // the model changes at the last part only
            peak = peak.max(HEAP.peak_usage() - held);
        }
    }
    let mib = peak as f64 / f64::from(1 << 20);
    println!(
        "{name:<26} {mib:5.1} MiB, {} micro-batches, {} updates",
        updates.micro_batches(),
        updates.updates()
    );
    let output = model.layers[0].forward(batch);
    output.into_data().to_vec().expect("f32")
}

fn main() {
    let whole = train("a batch of 2048", BATCH);
    let parts = train("8 micro-batches of 256", BATCH / 8);
    let differences = whole.iter().zip(&parts).map(|(a, b)| (a - b).abs());
    let largest = differences.fold(0.0, f32::max);
    println!("The largest difference of an output after {UPDATES} updates: {largest:e}");
    assert!(largest < 1e-4);
}
