//! What a step costs whose parameters are in host memory, beside one that copies each parameter on
//! the host at each use, and begins no upload before it:
//!
//! ```text
//! cargo bench --workspace --bench uploads
//! ```
//!
//! Forward and backward of layers on Flex, with few rows, so that the bytes of the parameters
//! matter. The two take turns; a ratio is the median of those of the rounds.

use std::time::Instant;

use burn::backend::Autodiff;
use burn::tensor::{DType, Distribution, Tensor, TensorData, TensorPrimitive};
use burn_checkpoint::{Delivery, Remat, UploadOrder, UploadPlace, delivered, delivered_in_order};
use burn_decorator::shared;
use burn_flex::Flex;

type B = Autodiff<Remat<Flex>>;
type Weights = Vec<Tensor<B, 2>>;

const LAYERS: usize = 8;
const ROUNDS: usize = 21;

/// The version of a parameter after an update.
struct OnHost(TensorData);

impl Delivery for OnHost {
    fn data(&self, _dtype: DType) -> TensorData {
        self.0.clone()
    }

    fn at_hand(&self, dtype: DType) -> Option<TensorData> {
        Some(self.data(dtype))
    }
}

/// Weights that are copied at each use.
fn copied(data: &[TensorData]) -> Weights {
    let weights = data.iter().map(|data| {
        let (shape, data) = (data.shape.clone(), data.clone());
        let leaf = delivered::<B>(shape, DType::F32, &Default::default(), move || data.clone());
        Tensor::from_primitive(TensorPrimitive::Float(leaf.expect("a `Remat`"))).require_grad()
    });
    weights.collect()
}

/// Weights that are shared, and uploaded in the order of the step before.
fn in_order(data: &[TensorData], places: &[UploadPlace]) -> Weights {
    let weights = data.iter().zip(places).map(|(data, place)| {
        let (shape, device) = (data.shape.clone(), Default::default());
        let on_host = OnHost(data.clone());
        let leaf = delivered_in_order::<B>(place, shape, DType::F32, &device, on_host);
        Tensor::from_primitive(TensorPrimitive::Float(leaf.expect("a `Remat`"))).require_grad()
    });
    weights.collect()
}

/// Milliseconds of a forward and a backward pass.
fn step(weights: &Weights, x: &Tensor<B, 2>) -> f64 {
    let start = Instant::now();
    let layer = |x: Tensor<B, 2>, weight: &Tensor<B, 2>| x.matmul(weight.clone()).tanh();
    let y = weights.iter().fold(x.clone(), layer);
    drop(y.square().mean().backward());
    start.elapsed().as_secs_f64() * 1e3
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    for (width, rows) in [(256, 32), (1024, 8), (1024, 128)] {
        let random =
            |dims| Tensor::<B, 2>::random(dims, Distribution::Default, &Default::default());
        let x = random([rows, width]);
        let own: Vec<_> = (0..LAYERS)
            .map(|_| random([width, width]).into_data())
            .collect();
        let common: Vec<_> = own.iter().cloned().map(shared).collect();
        let order = UploadOrder::new();
        let places: Vec<_> = own.iter().map(|_| order.place()).collect();
        let (mut times, mut ratios) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let before = step(&copied(&own), &x);
            let after = step(&in_order(&common, &places), &x);
            if round > 1 {
                times.push(after);
                ratios.push(after / before);
            }
        }
        let (time, ratio) = (median(times), median(ratios));
        println!("width {width:5}, {rows:4} rows {time:8.2} ms, {ratio:.3} of copies at each use");
    }
}
