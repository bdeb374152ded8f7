//! Gradient accumulation: the optimizer goes into an `Update` with windows of micro-batches, and a
//! batch that does not fit into memory is split into parts.
//!
//! `cargo run --release --example accumulation`

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::gelu;
use burn::tensor::{Distribution, Tensor};
use burn_accum::{AccumConfig, Accumulation, ClipByNorm};
use burn_flex::Flex;
use burn_update::{Update, UpdateError};
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
fn train(name: &str, rows: usize) -> Result<Vec<f32>, UpdateError> {
    let device = Default::default();
    let mut model = Model::new();
    let batch = Tensor::<B, 2>::random([BATCH, WIDTH], Distribution::Default, &device);

    // Was: AdamWConfig::new().init(). The norm that is clipped is that of the whole batch's
    // gradients.
    let windows = Accumulation::new(AccumConfig::mean(BATCH / rows))?;
    let counter = windows.updates();
    let mut update = Update::new(AdamWConfig::new().init())
        .clip_norm(0.5)?
        .accumulate(windows)?;

    let held = HEAP.current_usage();
    let mut peak = 0;
    for _ in 0..UPDATES {
        for part in batch.clone().split(rows, 0) {
            HEAP.reset_peak_usage();
            let gradients = update.backward(&model, model.loss(part));
            model = update.step(1e-3, model, gradients)?; // the model changes at the last part only
            peak = peak.max(HEAP.peak_usage() - held);
        }
    }
    let mib = peak as f64 / f64::from(1 << 20);
    println!(
        "{name:<26} {mib:5.1} MiB, {} micro-batches, {} updates",
        counter.micro_batches(),
        update.updates()
    );
    let output = model.layers[0].forward(batch);
    Ok(output.into_data().to_vec().expect("f32"))
}

fn main() -> Result<(), UpdateError> {
    let whole = train("a batch of 2048", BATCH)?;
    let parts = train("8 micro-batches of 256", BATCH / 8)?;
    let differences = whole.iter().zip(&parts).map(|(a, b)| (a - b).abs());
    let largest = differences.fold(0.0, f32::max);
    println!("The largest difference of an output after {UPDATES} updates: {largest:e}");
    assert!(largest < 1e-4);
    Ok(())
}
