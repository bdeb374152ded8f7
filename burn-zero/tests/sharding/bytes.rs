//! What a rank sends and holds is what the paper says.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::backend::AutodiffBackend;
use burn_zero::group::Operation;
use burn_zero::{ModelStates, Sharding, Stage, ZeroConfig, ZeroOptimizer, estimate};

use super::support::*;

type Wide = Vec<Linear<B>>;
type Inner = <B as AutodiffBackend>::InnerBackend;

const STEPS: usize = 3;

/// Elements of all tensors in a record.
fn elements<R: Record<B>>(record: R) -> usize {
    fn count(value: &serde_json::Value) -> usize {
        use serde_json::Value;
        match value {
            Value::Object(fields) => match fields.get("shape") {
                Some(Value::Array(shape)) => shape
                    .iter()
                    .map(|size| size.as_u64().unwrap() as usize)
                    .product(),
                _ => fields.values().map(count).sum(),
            },
            Value::Array(values) => values.iter().map(count).sum(),
            _ => 0,
        }
    }
    count(&serde_json::to_value(record.into_item::<FullPrecisionSettings>()).unwrap())
}

fn close(what: &str, found: f64, formula: f64) {
    let difference = (found - formula).abs();
    assert!(
        difference <= 0.05 * formula,
        "{what}: {found}, the formula says {formula}"
    );
}

#[test]
fn bytes_are_those_of_the_formulas() {
    for world_size in 1..=4 {
        for stage in STAGES {
            on_ranks(world_size, |group| {
                let device = Default::default();
                let adam = AdamWConfig::new().init();
                let sharding = Sharding {
                    bucket_elements: 2000,
                    ..Sharding::stage(stage)
                };
                let mut optimizer = ZeroOptimizer::new(adam, group.clone(), sharding)?;
                let layers = [(37, 41), (41, 53), (53, 29)];
                let model: Wide = layers
                    .map(|(i, o)| LinearConfig::new(i, o).init(&device))
                    .to_vec();
                let mut model = optimizer.prepare::<B, _>(model)?;
                let (parameters, ranks) = (model.num_params() as f64, world_size as f64);

                let before = group.traffic();
                let mut gradient_elements = 0;
                for _ in 0..STEPS {
                    let x = Tensor::<B, 2>::ones([2, 37], &device);
                    let y = model.iter().fold(x, |x, layer| layer.forward(x).tanh());
                    let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
                    gradient_elements = held(&gradients, &model);
                    model = optimizer.step(0.05, model, gradients);
                }
                let sent = group.traffic().total().elements - before.total().elements;
                let sent = sent as f64 / STEPS as f64;
                close("sent", sent, 2.0 * parameters * (ranks - 1.0) / ranks);

                let shard = parameters
                    / if stage == Stage::DataParallel {
                        1.0
                    } else {
                        ranks
                    };
                let record = Optimizer::<Wide, B>::to_record(&optimizer);
                close("state", elements(record) as f64, 2.0 * shard);
                let whole = if stage == Stage::Gradients {
                    ranks
                } else {
                    1.0
                };
                close("gradients", gradient_elements as f64, parameters / whole);

                let config = ZeroConfig {
                    stage,
                    reduce_bucket_size: 2000,
                    ..ZeroConfig::default()
                };
                let states = ModelStates::adam(parameters as u64);
                let said = estimate(&states, &config, world_size);
                close("sent, as estimated", sent, said.sent_elements as f64);
                let bytes = |elements: usize| 4.0 * elements as f64;
                let record = elements(Optimizer::<Wide, B>::to_record(&optimizer));
                close("state", bytes(record), said.optimizer_bytes as f64);
                close(
                    "gradients",
                    bytes(gradient_elements),
                    said.gradient_bytes as f64,
                );

                let reduces = match stage {
                    Stage::DataParallel => Operation::AllReduce,
                    _ => Operation::ReduceScatter,
                };
                assert_eq!(group.traffic().of(reduces).calls > 0, world_size > 1);
                Ok(())
            });
        }
    }
}

/// Elements of the gradients that a user holds.
fn held(gradients: &GradientsParams, model: &Wide) -> usize {
    let layers = model.iter().map(|layer| {
        let weight = gradients.get::<Inner, 2>(layer.weight.id).unwrap();
        let bias = gradients
            .get::<Inner, 1>(layer.bias.as_ref().unwrap().id)
            .unwrap();
        weight.shape().num_elements() + bias.shape().num_elements()
    });
    layers.sum()
}
