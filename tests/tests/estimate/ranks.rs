//! One rank of many, simulated: against the formulas and against ranks that are there.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_estimate::{Estimate, Kind, Meta, SimulatedGroup, estimate_step};
use burn_flex::Flex;
use burn_zero::group::Operation;
use burn_zero::{
    GroupOptions, ModelStates, ProcessGroup, Sharded, Stage, ThreadGroup, ZeroConfig,
    ZeroOptimizer, ZeroSettings,
};

use super::turn;

const WIDTH: usize = 1024;
const PARAMETERS: u64 = 4 * (1024 * 1024 + 1024);

type Model<B> = Vec<Linear<B>>;

fn model<B: AutodiffBackend>() -> Model<B> {
    let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(&B::Device::default());
    (0..4).map(layer).collect()
}

fn settings(stage: Stage) -> ZeroSettings {
    ZeroSettings {
        bucket_elements: 1 << 20,
        ..ZeroSettings::stage(stage)
    }
}

/// One update of a prepared model.
fn update<B: AutodiffBackend>(
    model: Model<B>,
    optimizer: &mut impl Optimizer<Model<B>, B>,
) -> Model<B> {
    let x = Tensor::<B, 2>::zeros([4, WIDTH], &B::Device::default());
    let y = model.iter().fold(x, |x, layer| layer.forward(x));
    let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
    optimizer.step(1e-3, model, gradients)
}

/// What a rank takes, and the bytes that it sends for an update.
fn simulated(stage: Stage, world_size: usize) -> (Estimate, u64) {
    type B = Sharded<Autodiff<Meta>>;
    let group = SimulatedGroup::new(0, world_size);
    let shared: Arc<dyn ProcessGroup> = group.clone();
    let adamw = AdamWConfig::new().init();
    let mut zero = ZeroOptimizer::new(adamw, shared, settings(stage)).expect("ranks agree");
    let model = zero
        .prepare::<B, _>(model::<B>())
        .expect("AdamW can be sharded");
    let before = group.sent_bytes();
    let (estimate, _) = estimate_step::<B, _>(model, |model| update(model, &mut zero));
    // Of two steps.
    (estimate, (group.sent_bytes() - before) / 2)
}

/// The bytes that the first of real ranks sends for an update.
fn real(stage: Stage, world_size: usize) -> u64 {
    type B = Sharded<Autodiff<Flex>>;
    let sent = ThreadGroup::spawn(world_size, GroupOptions::default(), |group| {
        let shared: Arc<dyn ProcessGroup> = Arc::new(group.clone());
        let adamw = AdamWConfig::new().init();
        let mut zero =
            ZeroOptimizer::new(adamw, shared, settings(stage)).expect("ranks agree");
        let model = zero
            .prepare::<B, _>(model::<B>())
            .expect("AdamW can be sharded");
        let sent = || {
            let operations = [
                Operation::AllReduce,
                Operation::ReduceScatter,
                Operation::AllGather,
            ];
            let of = |operation| group.traffic().of(operation).data_bytes;
            operations.into_iter().map(of).sum::<u64>()
        };
        let before = sent();
        update(model, &mut zero);
        sent() - before
    });
    sent.expect("ranks work")[0]
}

fn within_2_percent(what: &str, found: u64, formula: f64) {
    let ratio = found as f64 / formula;
    println!("{what}: {found}, {ratio:.4} of the formula");
    assert!((0.98..=1.02).contains(&ratio), "{what}: {found}, {formula}");
}

#[test]
fn traffic_and_state_are_those_of_the_paper() {
    let _turn = turn();
    for world_size in [2, 8, 64, 1024] {
        for stage in Stage::ALL {
            let (estimate, sent) = simulated(stage, world_size);
            let what = format!("{world_size} ranks, stage {stage:?}");
            // Section 7: 2 P in every stage up to 2, but for the part that is the rank's own.
            let parts = (world_size - 1) as f64 / world_size as f64;
            let formula = 2.0 * 4.0 * PARAMETERS as f64 * parts;
            within_2_percent(&format!("{what}, bytes sent"), sent, formula);
            // Section 5: two moments of 4 bytes, over all ranks from stage 1 on.
            let shards = if stage.shards_optimizer_state() {
                world_size
            } else {
                1
            };
            let moments = 8.0 * PARAMETERS as f64 / shards as f64;
            let state = estimate.bytes_of(Kind::OptimizerState);
            within_2_percent(&format!("{what}, optimizer state"), state, moments);

            let config = ZeroConfig {
                stage,
                reduce_bucket_size: 1 << 20,
                ..ZeroConfig::default()
            };
            let said = burn_zero::estimate(&ModelStates::adam(PARAMETERS), &config, world_size);
            within_2_percent("burn-zero's estimate", sent, said.sent_bytes as f64);
        }
    }
}

#[test]
fn traffic_is_that_of_real_ranks() {
    let _turn = turn();
    for world_size in 1..=4 {
        for stage in Stage::ALL {
            let (_, sent) = simulated(stage, world_size);
            assert_eq!(
                sent,
                real(stage, world_size),
                "{world_size} ranks, {stage:?}"
            );
        }
    }
}
