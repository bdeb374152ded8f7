//! A consolidated record is one that plain Burn loads.

use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Distribution, Int, Tensor, TensorData};
use burn_flex::Flex;
use burn_store::{ModuleSnapshot, SafetensorsStore};
use burn_zero::record::{Dtype, Entry, Keep, TensorSlice, TensorSpec, TrainingState};
use burn_zero::{GroupOptions, ProcessGroup, ThreadGroup, consolidate, save_sharded};

type B = Flex;

#[derive(Module, Debug)]
struct Block<B: Backend> {
    norm: LayerNorm<B>,
    up: Linear<B>,
    down: Option<Linear<B>>,
}

#[derive(Module, Debug)]
struct Model<B: Backend> {
    embedding: Embedding<B>,
    blocks: Vec<Block<B>>,
    scale: Param<Tensor<B, 1>>,
}

impl<B: Backend> Model<B> {
    fn new(device: &B::Device) -> Self {
        let block = |down: bool| Block {
            norm: LayerNormConfig::new(6).init(device),
            up: LinearConfig::new(6, 10).init(device),
            down: down.then(|| LinearConfig::new(10, 6).with_bias(false).init(device)),
        };
        Self {
            embedding: EmbeddingConfig::new(11, 6).init(device),
            blocks: vec![block(true), block(false)],
            scale: Param::from_tensor(Tensor::random([1], Distribution::Default, device)),
        }
    }

    fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let mut x = self.embedding.forward(tokens);
        for block in &self.blocks {
            let hidden = block.up.forward(block.norm.forward(x.clone()));
            x = match &block.down {
                Some(down) => x + down.forward(hidden),
                None => hidden,
            };
        }
        x * self.scale.val().unsqueeze()
    }
}

/// Paths and values as Burn's own visitor meets them.
#[derive(Default)]
struct Collect {
    path: Vec<String>,
    found: Vec<(String, TensorData)>,
}

impl<B: Backend> ModuleVisitor<B> for Collect {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.found
            .push((self.path.join("."), param.val().into_data()));
    }

    fn visit_int<const D: usize>(&mut self, _: &Param<Tensor<B, D, Int>>) {}

    fn visit_bool<const D: usize>(&mut self, _: &Param<Tensor<B, D, Bool>>) {}
}

fn parameters(model: &Model<B>) -> Vec<(String, TensorData)> {
    let mut collect = Collect::default();
    model.visit(&mut collect);
    collect.found
}

fn save(dir: &Path, parameters: &[(String, TensorData)], ranks: usize) {
    let saved = ThreadGroup::spawn(ranks, GroupOptions::default(), |group| {
        let entries = parameters.iter().map(|(path, data)| {
            let name = format!("model/{path}");
            let tensor = TensorSpec::new(name, Dtype::F32, data.shape.to_vec());
            let elements = data.num_elements();
            let cut = |rank: usize| rank * elements / ranks;
            let range = cut(group.rank())..cut(group.rank() + 1);
            let bytes = &data.bytes[range.start * 4..range.end * 4];
            Entry::new(TensorSlice::new(tensor, range), bytes)
        });
        let state = TrainingState::at_step(3);
        save_sharded(dir, &group, entries.collect(), state, Keep::default()).unwrap();
    });
    saved.unwrap();
}

#[test]
fn burn_loads_what_was_consolidated() {
    let device = Default::default();
    let trained = Model::<B>::new(&device);
    let parameters_of_trained = parameters(&trained);
    assert_eq!(parameters_of_trained.len(), 1 + 2 + 2 + 1 + 2 + 2 + 1);
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), &parameters_of_trained, 3);

    let file = dir.path().join("model.safetensors");
    consolidate(dir.path(), &file).unwrap();

    let mut plain = Model::<B>::new(&device);
    let tokens = || Tensor::<B, 2, Int>::from_data([[0, 5, 10], [3, 3, 1]], &device);
    let expected = trained.forward(tokens()).into_data();
    assert_ne!(plain.forward(tokens()).into_data(), expected);
    let mut store = SafetensorsStore::from_file(&file);
    let applied = plain.load_from(&mut store).unwrap();
    assert!(
        applied.unused.is_empty() && applied.missing.is_empty(),
        "{applied}"
    );
    assert_eq!(plain.forward(tokens()).into_data(), expected);
    for (loaded, saved) in parameters(&plain).iter().zip(&parameters_of_trained) {
        assert_eq!(loaded.0, saved.0);
        assert!(loaded.1.bytes[..] == saved.1.bytes[..], "{}", saved.0);
    }
}
