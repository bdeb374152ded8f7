//! What it costs a step that each read to the host takes 20 ms and waits at its first poll, as on
//! cubecl-cuda and cubecl-hip:
//!
//! ```text
//! cargo bench --workspace --bench hidden_reads
//! ```
//!
//! Twelve layers whose backward takes longer than a read. Steps with and without the delay take
//! turns; printed is the ratio of the medians, and that of the fastest steps, which what else the
//! machine does disturbs least. The read of the last gradient has nothing to hide behind. With two
//! ranks, stages 0 and 1 read gradients on the device in the step, in which nothing computes: one
//! after the other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::{Distribution, Tensor};
use burn_flex::Flex;
use burn_update::Update;
use burn_zero::{
    GroupOptions, HostAdamWConfig, Memory, OffloadConfig, ProcessGroup, ReduceOverRanks, Sharded,
    SingleRank, Stage, ThreadGroup, ZeroSettings,
};
use tests::queue::{Answers, Queue, answer_reads};

type B = Sharded<Autodiff<Queue<Flex>>>;
type Model = Vec<Linear<B>>;

const LAYERS: usize = 12;
const WIDTH: usize = 1024;
const ROWS: usize = 1024;
const ROUNDS: usize = 15;
const DELAY: Duration = Duration::from_millis(20);

fn model() -> Model {
    let layer = |_| LinearConfig::new(WIDTH, WIDTH).with_bias(false);
    let layers = (0..LAYERS).map(layer);
    layers
        .map(|layer| layer.init(&Default::default()))
        .collect()
}

/// Milliseconds of a step.
fn step<O: Optimizer<Model, B>>(model: &mut Model, optimizer: &mut O, answers: Answers) -> f64 {
    let x = Tensor::<B, 2>::random([ROWS, WIDTH], Distribution::Default, &Default::default());
    answer_reads(answers);
    let start = Instant::now();
    let y = model.iter().fold(x, |x, layer| layer.forward(x).tanh());
    let gradients = GradientsParams::from_grads(y.square().mean().backward(), model);
    *model = optimizer.step(1e-4, std::mem::take(model), gradients);
    let time = start.elapsed();
    answer_reads(Answers::AtOnce);
    time.as_secs_f64() * 1e3
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn fastest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn measure<O: Optimizer<Model, B>>(what: &str, mut model: Model, mut optimizer: O, prints: bool) {
    let (mut at_once, mut delayed) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let plain = step(&mut model, &mut optimizer, Answers::AtOnce);
        let late = step(&mut model, &mut optimizer, Answers::LaterAndBlock(DELAY));
        if round > 0 {
            at_once.push(plain);
            delayed.push(late);
        }
    }
    if prints {
        let medians = median(&delayed) / median(&at_once);
        let fastest = fastest(&delayed) / fastest(&at_once);
        let plain = median(&at_once);
        println!(
            "{what:<76} {plain:7.0} ms a step, with late reads {medians:.3} of that, \
             fastest of {ROUNDS} steps {fastest:.3}"
        );
    }
}

fn main() {
    let adamw = || {
        let config = OffloadConfig {
            bucket_elements: 4 * WIDTH * WIDTH,
            ..OffloadConfig::new(HostAdamWConfig::default())
        };
        config.init().expect("numbers that work")
    };
    let (own, mut optimizer) = (model(), adamw());
    optimizer.prepare(&own);
    measure("OffloadedAdamW", own, optimizer, true);

    let settings = |stage, gradients| ZeroSettings {
        bucket_elements: 4 * WIDTH * WIDTH,
        gradients,
        ..ZeroSettings::stage(stage)
    };
    let stages = [Stage::DataParallel, Stage::OptimizerState, Stage::Gradients];
    for (stage, gradients) in stages
        .into_iter()
        .flat_map(|stage| [Memory::Device, Memory::Host].map(|memory| (stage, memory)))
    {
        if gradients == Memory::Host {
            let group: Arc<dyn ProcessGroup> = Arc::new(SingleRank::new());
            let update = Update::new(adamw()).reduce(settings(stage, gradients), group);
            let mut update = update.expect("valid settings");
            let own = update.prepare(model()).expect("one rank");
            measure(
                &format!("{stage}, one rank, {gradients:?}"),
                own,
                update,
                true,
            );
        }
        let ranks = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
            let is_first = group.rank() == 0;
            let sgd = Update::new(SgdConfig::new().init());
            let update = sgd.reduce(settings(stage, gradients), Arc::new(group));
            let mut update = update.expect("valid settings");
            let own = update.prepare(model()).expect("ranks agree");
            measure(
                &format!("{stage}, two ranks, {gradients:?}"),
                own,
                update,
                is_first,
            );
        });
        ranks.expect("ranks end");
    }
}
