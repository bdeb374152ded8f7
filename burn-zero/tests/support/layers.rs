//! A stack of square layers, each as large as a bucket: what tests that count bytes train.

use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;

/// Without biases.
pub type Layers<B> = Vec<Linear<B>>;

/// The same in every process and thread; weights lie within half of `spread` around zero.
pub fn layers<B: Backend>(count: usize, width: usize, spread: f64) -> Layers<B> {
    let device = Default::default();
    let layers = (0..count).map(|layer| {
        let weight = |index: usize| ((index * 37 + layer * 11) % 101) as f32 / 101.0 - 0.5;
        let weights: Vec<_> = (0..width * width).map(weight).collect();
        let weights = Tensor::<B, 1>::from_data(weights.as_slice(), &device);
        let mut linear = LinearConfig::new(width, width)
            .with_bias(false)
            .init(&device);
        linear.weight = Param::from_tensor(weights.reshape([width, width]) * spread);
        linear
    });
    layers.collect()
}

/// Of `[rows, width]`.
#[allow(dead_code, reason = "not by each test")]
pub fn loss<B: Backend>(layers: &Layers<B>, x: Tensor<B, 2>) -> Tensor<B, 1> {
    let y = layers.iter().fold(x, |x, layer| layer.forward(x).tanh());
    y.sum()
}

/// All weights, a layer after the other.
#[allow(dead_code, reason = "not by each test")]
pub fn weights<B: Backend>(layers: &Layers<B>) -> Vec<f32> {
    let weights = layers
        .iter()
        .map(|layer| layer.weight.val().into_data().into_vec::<f32>());
    weights.flat_map(Result::unwrap).collect()
}
