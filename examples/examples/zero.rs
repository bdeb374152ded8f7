//! ZeRO with ranks that are threads: the backend's alias gets `Sharded`, and the optimizer goes
//! into an update that reduces its gradients over the ranks.
//!
//! `cargo run --release --example zero`. Under `mpirun` a rank is a process: `MpiGroup::init()?`
//! takes the place of `ThreadGroup`.

use std::sync::{Arc, Mutex};

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::activation::gelu;
use burn::tensor::{Distribution, Tensor, backend::Backend};
use burn_flex::Flex;
use burn_update::{Update, UpdateError};
use burn_zero::{
    GroupOptions, ProcessGroup, RankReduction, ReduceOverRanks, Sharded, Stage, ThreadGroup,
    ZeroSettings,
};

/// Was: `Autodiff<Flex>`. On a GPU: `Sharded<Autodiff<Cuda>>`.
type B = Sharded<Autodiff<Flex>>;

const RANKS: usize = 4;
const ROWS: usize = 32;
const WIDTH: usize = 128;
const STEPS: usize = 5;

#[derive(Module, Debug)]
struct Model<B: Backend> {
    layers: Vec<Linear<B>>,
}

impl Model<B> {
    fn new() -> Self {
        let device = Default::default();
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

struct Trained {
    /// Bytes of the optimizer's state, of gradients at the peak, and sent in a step.
    bytes: [u64; 3],
    weights: Vec<f32>,
}

/// One rank: the program for one device, except for two lines.
fn train(
    group: Arc<ThreadGroup>,
    stage: Stage,
    model: Model<B>,
    batch: &[f32],
) -> Result<Trained, UpdateError> {
    let device = Default::default();
    // This rank's part of the batch.
    let rows = ROWS / group.world_size();
    let part = batch
        .chunks_exact(rows * WIDTH)
        .nth(group.rank())
        .expect("a part for each rank");
    let x = Tensor::<B, 1>::from_floats(part, &device).reshape([rows, WIDTH]);

    // Was: AdamWConfig::new().init(). Buckets are small here so that this small model has several:
    // a program takes `ZeroSettings::stage(stage)`.
    let settings = ZeroSettings {
        bucket_elements: 1 << 14,
        ..ZeroSettings::stage(stage)
    };
    let reduction = RankReduction::new(settings, group.clone())?;
    let mut update = Update::new(AdamWConfig::new().init()).reduce_by(&reduction)?;
    let mut model = update.prepare(model)?; // gives all ranks rank 0's weights
    let before = group.traffic().total().data_bytes;
    for _ in 0..STEPS {
        let gradients = update.backward(&model, model.loss(x.clone()));
        model = update.step(1e-3, model, gradients)?;
    }
    let state = BinBytesRecorder::<FullPrecisionSettings>::default();
    let state = Recorder::<B>::record(&state, update.record(), ()).expect("bytes in memory");
    let sent = (group.traffic().total().data_bytes - before) / STEPS as u64;
    let weights = model.layers[0].weight.val().into_data().to_vec();
    Ok(Trained {
        bytes: [state.len() as u64, reduction.peak_gradient_bytes(), sent],
        weights: weights.expect("f32"),
    })
}

fn main() -> Result<(), UpdateError> {
    let device = Default::default();
    let model = Mutex::new(Model::new().fork(&device)); // weights are drawn here, once for all stages
    let batch = Tensor::<Flex, 1>::random([ROWS * WIDTH], Distribution::Normal(0.0, 1.0), &device);
    let batch: Vec<f32> = batch.into_data().to_vec().expect("f32");
    println!("a rank of {RANKS}, KiB:  optimizer state  gradients at the peak  sent a step");
    let mut weights = Vec::new();
    for stage in Stage::WITH_WHOLE_PARAMETERS {
        let ranks = ThreadGroup::spawn(RANKS, GroupOptions::default(), |group| {
            let model = model.lock().expect("no rank failed").clone();
            train(Arc::new(group), stage, model.fork(&device), &batch)
        })?;
        let ranks = ranks.into_iter().collect::<Result<Vec<_>, _>>()?;
        let [state, gradients, sent] = ranks[0].bytes.map(|bytes| bytes / 1024);
        let stage = stage.number();
        println!("stage {stage:<19} {state:15} {gradients:22} {sent:12}");
        weights.extend(ranks.into_iter().map(|rank| rank.weights));
    }
    assert!(weights.windows(2).all(|pair| pair[0] == pair[1]));
    println!("The weights of all ranks in stages 0 to 2 are equal, bit for bit.");
    Ok(())
}
