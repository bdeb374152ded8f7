//! What a rank sends and holds is what the paper says, and what was estimated.

use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, MuonConfig};
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::FloatDType;
use burn::tensor::backend::AutodiffBackend;
use burn_accum::AccumConfig;
use burn_ranks::shard::Parameter;
use burn_ranks::{BufferDtype, Sent};
use burn_zero::{
    BatchConfig, Estimate, ModelStates, Partition, ShardMap, Stage, ZeroConfig, ZeroSettings,
    estimate,
};
use ciborium::Value;

use super::support::*;

type Wide = Vec<Linear<B>>;
type Inner = <B as AutodiffBackend>::InnerBackend;

const UPDATES: u64 = 3;
const LAYERS: [(usize, usize); 3] = [(37, 41), (41, 53), (53, 29)];

/// Bytes of all tensors in an optimizer's record.
pub fn tensor_bytes<R: Record<B>>(record: R) -> u64 {
    // Only elements of tensors are bytes in such a tree.
    fn count(value: &Value) -> u64 {
        match value {
            Value::Bytes(bytes) => bytes.len() as u64,
            Value::Array(values) => values.iter().map(count).sum(),
            Value::Map(fields) => fields.iter().map(|(_, value)| count(value)).sum(),
            _ => 0,
        }
    }
    let item = record.into_item::<FullPrecisionSettings>();
    count(&Value::serialized(&item).unwrap())
}

fn close(what: &str, found: u64, formula: f64) {
    let difference = (found as f64 - formula).abs();
    assert!(
        difference <= 0.05 * formula,
        "{what}: {found}, the formula says {formula}"
    );
}

/// What a rank sent an update, and held.
#[derive(Clone, Copy, Debug)]
struct Found {
    sent: Sent,
    state_bytes: u64,
    /// When backward is over.
    gradient_bytes: u64,
    peak_gradient_bytes: u64,
}

/// Trains with micro-batches; what each rank found.
fn train(config: &ZeroConfig, world_size: usize) -> Vec<Found> {
    let steps = config.batch.gradient_accumulation_steps.unwrap();
    on_each_rank(world_size, |group| {
        let adam = AdamWConfig::new().init();
        let (update, reduction) = reduced(adam, group.clone(), config.settings()).unwrap();
        let windows = AccumConfig::mean(steps as usize);
        let mut update = update.accumulate(windows).unwrap();
        let model = LAYERS.map(|(i, o)| LinearConfig::new(i, o).init(&Default::default()));
        let mut model: Wide = update.prepare(model.to_vec()).unwrap();
        let before = group.traffic().of_tensors();
        let mut gradient_bytes = 0;
        for _ in 0..UPDATES * steps {
            let x = Tensor::<B, 2>::ones([2, 37], &Default::default());
            let y = model.iter().fold(x, |x, layer| layer.forward(x).tanh());
            let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
            gradient_bytes = held(&gradients, &model);
            model = update.step(0.05, model, gradients).unwrap();
        }
        let after = group.traffic().of_tensors();
        Found {
            sent: Sent {
                elements: (after.elements - before.elements) / UPDATES,
                data_bytes: (after.data_bytes - before.data_bytes) / UPDATES,
                ..Sent::default()
            },
            state_bytes: tensor_bytes(update.record()),
            gradient_bytes,
            peak_gradient_bytes: reduction.peak_gradient_bytes(),
        }
    })
}

fn parameters() -> u64 {
    LAYERS.iter().map(|(i, o)| i * o + o).sum::<usize>() as u64
}

#[test]
fn bytes_are_those_of_the_formulas_and_of_the_estimate() {
    let p = parameters() as f64;
    for world_size in 1..=4 {
        for stage in STAGES {
            for communication_dtype in [BufferDtype::F32, BufferDtype::Bf16] {
                for steps in [1, 3] {
                    let what = format!(
                        "{world_size} ranks, {stage}, {communication_dtype}, {steps} micro-batches"
                    );
                    let config = ZeroConfig {
                        stage,
                        communication_dtype,
                        reduce_bucket_size: 600,
                        batch: BatchConfig {
                            gradient_accumulation_steps: Some(steps),
                            ..BatchConfig::default()
                        },
                        ..ZeroConfig::default()
                    };
                    let model = ModelStates {
                        largest_parameter: LAYERS.iter().map(|(i, o)| i * o).max().unwrap() as u64,
                        ..ModelStates::adam(parameters())
                    };
                    let said = estimate(&model, &config, world_size);
                    let n = world_size as f64;
                    let others = p * (n - 1.0) / n;
                    let size = communication_dtype.size_bytes() as f64;
                    // Once a micro-batch in stage 2, and what comes back: stage 0's gradients, or
                    // parameters.
                    let (reductions, back) = match stage {
                        Stage::DataParallel => (1.0, size),
                        Stage::OptimizerState => (1.0, 4.0),
                        _ => (steps as f64, 4.0),
                    };
                    let state_shard = if stage == Stage::DataParallel {
                        p
                    } else {
                        p / n
                    };
                    let gradient_shard = if stage == Stage::Gradients { p / n } else { p };
                    close(&what, said.sent_bytes, others * (reductions * size + back));
                    for found in train(&config, world_size) {
                        close(&what, found.sent.elements, others * (reductions + 1.0));
                        close(&what, found.sent.elements, said.sent_elements as f64);
                        close(&what, found.sent.data_bytes, said.sent_bytes as f64);
                        close(&what, found.state_bytes, 8.0 * state_shard);
                        close(&what, found.state_bytes, said.optimizer_bytes as f64);
                        close(&what, found.gradient_bytes, 4.0 * gradient_shard);
                        close(&what, found.gradient_bytes, said.gradient_bytes as f64);
                        check_peak(&what, found, &said, steps);
                    }
                }
            }
        }
    }
}

/// The peak is of what was counted: at least the shard, and of buckets no more than was said. A
/// weight that fills several buckets comes whole.
fn check_peak(what: &str, found: Found, said: &Estimate, steps: u64) {
    let window = if steps > 1 { said.gradient_bytes } else { 0 };
    assert_eq!(said.window_bytes, window, "{what}");
    let most = said.gradient_bytes + said.underway_bytes + said.spanning_bytes;
    let peak = found.peak_gradient_bytes;
    assert!(peak <= most, "{what}: {peak}, not {most}");
    assert!(peak >= found.gradient_bytes, "{what}: {peak}");
}

/// A bucket a layer, so that a shard and what is under way are less than all gradients on two ranks
/// already.
#[test]
fn no_rank_ever_holds_all_gradients() {
    const WIDTH: usize = 24;
    const COUNT: usize = 12;
    let layer_elements = (WIDTH * WIDTH) as u64;
    let model = ModelStates::adam(COUNT as u64 * layer_elements);
    let config = ZeroConfig {
        stage: Stage::Gradients,
        reduce_bucket_size: layer_elements,
        ..ZeroConfig::default()
    };
    for world_size in 2..=4 {
        let most = estimate(&model, &config, world_size).peak_gradient_bytes();
        let whole = 4 * COUNT as u64 * layer_elements;
        assert!(most * 5 / 4 < whole, "{most} would not tell");
        let peaks = on_each_rank(world_size, |group| {
            let adam = AdamWConfig::new().init();
            let (mut update, reduction) = reduced(adam, group, config.settings()).unwrap();
            let layer = LinearConfig::new(WIDTH, WIDTH).with_bias(false);
            let layers = (0..COUNT).map(|_| layer.init(&Default::default()));
            let mut model: Wide = update.prepare(layers.collect()).unwrap();
            for _ in 0..2 {
                let x = Tensor::<B, 2>::ones([2, WIDTH], &Default::default());
                let y = model.iter().fold(x, |x, layer| layer.forward(x).tanh());
                let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
                model = update.step(0.05, model, gradients).unwrap();
            }
            reduction.peak_gradient_bytes()
        });
        for peak in peaks {
            assert!(peak <= most, "{world_size} ranks: {peak}, not {most}");
        }
    }
}

/// The paper's `2 P + 2 P`: parameters of two bytes are gathered in two.
#[test]
fn low_precision_parameters_are_sent_as_they_are() {
    let model = ModelStates {
        parameter_bytes: 2,
        ..ModelStates::adam(parameters())
    };
    for world_size in 2..=4 {
        for stage in [Stage::OptimizerState, Stage::Gradients] {
            let config = ZeroConfig {
                stage,
                communication_dtype: BufferDtype::Bf16,
                reduce_bucket_size: 600,
                ..ZeroConfig::default()
            };
            let said = estimate(&model, &config, world_size).sent_bytes;
            let others = parameters() as f64 * (world_size - 1) as f64 / world_size as f64;
            let what = format!("{world_size} ranks, {stage}");
            close(&what, said, 4.0 * others);
            let found = on_each_rank(world_size, |group| {
                let adam = AdamWConfig::new().with_epsilon(1e-3).init();
                let mut update = over_ranks(adam, group.clone(), config.settings()).unwrap();
                let model = LAYERS.map(|(i, o)| low(LinearConfig::new(i, o)));
                let model: Wide = update.prepare(model.to_vec()).unwrap();
                let before = group.traffic().of_tensors();
                let x = Tensor::<B, 2>::ones([2, 37], &Default::default());
                let x = x.cast(FloatDType::BF16);
                let y = model.iter().fold(x, |x, layer| layer.forward(x).tanh());
                let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
                update.step(0.05, model, gradients).unwrap();
                group.traffic().of_tensors().data_bytes - before.data_bytes
            });
            for found in found {
                close(&what, found, said as f64);
            }
        }
    }
}

/// A layer in bf16.
pub fn low(config: LinearConfig) -> Linear<B> {
    let mut layer = config.init::<B>(&Default::default());
    let weight = layer.weight.val().cast(FloatDType::BF16);
    layer.weight = Param::from_tensor(weight.detach());
    layer.bias = layer
        .bias
        .map(|bias| Param::from_tensor(bias.val().cast(FloatDType::BF16).detach()));
    layer
}

/// Whole parameters: a rank has the state of its own, sends the others' gradients, and its
/// parameters to each of them.
#[test]
fn whole_parameters_have_the_bytes_of_their_map() {
    for world_size in 1..=4 {
        let list = LAYERS.map(|(i, o)| Parameter::new(format!("{i}x{o}"), i * o));
        let map = ShardMap::whole(list.to_vec(), world_size, 600).unwrap();
        let sharding = ZeroSettings {
            partition: Partition::Whole,
            bucket_elements: 600,
            ..ZeroSettings::stage(Stage::Gradients)
        };
        let found = on_each_rank(world_size, |group| {
            let muon = MuonConfig::new().init();
            let mut update = over_ranks(muon, group.clone(), sharding.clone()).unwrap();
            let layer = |(i, o)| {
                LinearConfig::new(i, o)
                    .with_bias(false)
                    .init(&Default::default())
            };
            let model: Wide = update.prepare(LAYERS.map(layer).to_vec()).unwrap();
            let before = group.traffic().of_tensors();
            let x = Tensor::<B, 2>::ones([2, 37], &Default::default());
            let y = model.iter().fold(x, |x, layer| layer.forward(x).tanh());
            let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
            update.step(0.05, model, gradients).unwrap();
            let state = tensor_bytes(update.record());
            (
                group.traffic().of_tensors().data_bytes - before.data_bytes,
                state,
            )
        });
        for (rank, found) in found.into_iter().enumerate() {
            let own = map.shard_elements(rank);
            let sent = map.elements() - own + (world_size - 1) * own;
            let momentum = own; // Muon's
            let expected = ((4 * sent) as u64, (4 * momentum) as u64);
            assert_eq!(found, expected, "rank {rank} of {world_size}");
        }
    }
}

/// Bytes of the gradients that a user holds.
fn held(gradients: &GradientsParams, model: &Wide) -> u64 {
    let layers = model.iter().map(|layer| {
        let weight = gradients.get::<Inner, 2>(layer.weight.id).unwrap();
        let bias = gradients
            .get::<Inner, 1>(layer.bias.as_ref().unwrap().id)
            .unwrap();
        4 * (weight.shape().num_elements() + bias.shape().num_elements())
    });
    layers.sum::<usize>() as u64
}
