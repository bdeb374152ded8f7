//! A small network whose gradients are made up: finite, or overflowing where a test wants it.
#![allow(dead_code)] // each test file uses its part

use burn::{
    backend::Autodiff,
    module::{AutodiffModule, Module, ModuleVisitor, Param},
    nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig},
    optim::{GradientsParams, Optimizer},
    record::{FullPrecisionSettings, Record},
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_amp::GradScaler;
use burn_flex::Flex;
use burn_update::Update;

pub type Inner = Flex;
pub type B = Autodiff<Flex>;

#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    layers: Vec<Linear<B>>,
    norm: LayerNorm<B>,
}

/// The paths of a [`Net`]'s parameters, in module order.
pub const PATHS: [&str; 6] = [
    "layers.0.weight",
    "layers.0.bias",
    "layers.1.weight",
    "layers.1.bias",
    "norm.gamma",
    "norm.beta",
];

pub fn net() -> Net<B> {
    let device = Default::default();
    let net = Net {
        layers: vec![
            LinearConfig::new(5, 7).init(&device),
            LinearConfig::new(7, 3).init(&device),
        ],
        norm: LayerNormConfig::new(3).init(&device),
    };
    // Parameters are initialised when they are first used, and each clone would draw its own.
    values(&net);
    net
}

/// Gradients of the given step: finite ones, except for one element of each parameter in
/// `overflowing`.
pub fn gradients(net: &Net<B>, step: usize, overflowing: &[usize]) -> GradientsParams {
    let mut filler = Filler {
        gradients: GradientsParams::new(),
        step,
        overflowing,
        index: 0,
    };
    net.visit(&mut filler);
    filler.gradients
}

/// Every parameter, bit for bit.
pub fn values(net: &Net<B>) -> Vec<Vec<u32>> {
    let mut reader = Reader(Vec::new());
    net.visit(&mut reader);
    reader.0
}

/// A record, as a value that can be compared.
pub fn json<R: Record<B>>(record: R) -> serde_json::Value {
    serde_json::to_value(record.into_item::<FullPrecisionSettings>()).unwrap()
}

/// An update by `optimizer` under `scaler`.
pub fn scaled<M, B>(scaler: &GradScaler, optimizer: impl Optimizer<M, B> + 'static) -> Update<M, B>
where
    M: AutodiffModule<B> + 'static,
    B: AutodiffBackend,
{
    Update::new(optimizer).scale(scaler.clone()).unwrap()
}

/// The state of an update's optimizer, as a value that can be compared.
pub fn state(update: &Update<Net<B>, B>) -> serde_json::Value {
    json(update.record())["parts"]["optimizer"].clone()
}

/// The state of an optimizer, as that of an update's.
pub fn state_of(optimizer: &(impl Optimizer<Net<B>, B> + 'static)) -> serde_json::Value {
    state(&Update::new(optimizer.clone()))
}

struct Filler<'a> {
    gradients: GradientsParams,
    step: usize,
    overflowing: &'a [usize],
    index: usize,
}

impl ModuleVisitor<B> for Filler<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let shape = param.val().shape();
        let mut values: Vec<f32> = (0..shape.num_elements())
            .map(|i| ((i * 31 + self.step * 17 + self.index * 7) as f32).sin())
            .collect();
        if self.overflowing.contains(&self.index) {
            let bad = [f32::INFINITY, f32::NAN, f32::NEG_INFINITY][self.step % 3];
            let at = self.step % values.len();
            values[at] = bad;
        }
        let data = burn::tensor::TensorData::new(values, shape);
        let gradient = Tensor::<Inner, D>::from_data(data, &Default::default());
        self.gradients.register(param.id, gradient);
        self.index += 1;
    }
}

struct Reader(Vec<Vec<u32>>);

impl ModuleVisitor<B> for Reader {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let data = param.val().into_data();
        self.0.push(data.iter::<f32>().map(f32::to_bits).collect());
    }
}
