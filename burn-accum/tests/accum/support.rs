//! A small network, batches for it, and gradients that are made up where a test wants particular
//! ones.

use burn::{
    backend::Autodiff,
    module::{Module, ModuleVisitor, Param},
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, Optimizer},
    record::{FullPrecisionSettings, Record},
    tensor::{Tensor, TensorData, activation::tanh, backend::Backend},
};
use burn_flex::Flex;

pub type Inner = Flex;
pub type B = Autodiff<Flex>;

#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
}

/// The paths of a [`Net`]'s parameters, in module order.
pub const PATHS: [&str; 4] = ["first.weight", "first.bias", "second.weight", "second.bias"];

/// With fixed weights: AdamW divides by gradients, and where weights are drawn a gradient may be a
/// rounding error.
pub fn net() -> Net<B> {
    let values = |shape: &[usize], wave: f32| {
        let count = shape.iter().product();
        let values = (0..count).map(|i| (i as f32 * wave).sin() * 0.5).collect();
        TensorData::new(values, shape)
    };
    let linear = |from, to, wave| {
        let device = Default::default();
        let mut linear = LinearConfig::new(from, to).init(&device);
        let weight = Tensor::from_data(values(&[from, to], wave), &device);
        linear.weight = Param::from_tensor(weight);
        linear.bias = Some(Param::from_tensor(Tensor::from_data(
            values(&[to], wave),
            &device,
        )));
        linear
    };
    Net {
        first: linear(5, 7, 1.3),
        second: linear(7, 3, 2.1),
    }
}

/// Some rows of input and target.
#[derive(Clone, Debug)]
pub struct Batch {
    pub x: Tensor<B, 2>,
    pub y: Tensor<B, 2>,
}

impl Batch {
    /// Rows `from..to` of an endless data set.
    pub fn rows(from: usize, to: usize) -> Self {
        let rows = |columns: usize, wave: f32| {
            let values: Vec<f32> = (from * columns..to * columns)
                .map(|i| (i as f32 * wave).sin())
                .collect();
            Tensor::from_data(
                TensorData::new(values, [to - from, columns]),
                &Default::default(),
            )
        };
        Self {
            x: rows(5, 0.37),
            y: rows(3, 0.91),
        }
    }

    pub fn len(&self) -> usize {
        self.x.dims()[0]
    }
}

impl Net<B> {
    /// The mean over rows.
    pub fn loss(&self, batch: &Batch) -> Tensor<B, 1> {
        let hidden = tanh(self.first.forward(batch.x.clone()));
        let error = self.second.forward(hidden) - batch.y.clone();
        error.square().sum() / batch.len() as f32
    }

    /// The gradients of the mean over rows.
    pub fn mean_gradients(&self, batch: &Batch) -> GradientsParams {
        GradientsParams::from_grads(self.loss(batch).backward(), self)
    }
}

/// Made-up gradients: finite ones, but for one element of each parameter in `bad`, and none for
/// those in `missing`.
pub fn gradients(net: &Net<B>, step: usize, bad: &[usize], missing: &[usize]) -> GradientsParams {
    let mut filler = Filler {
        gradients: GradientsParams::new(),
        step,
        bad,
        missing,
        index: 0,
    };
    net.visit(&mut filler);
    filler.gradients
}

struct Filler<'a> {
    gradients: GradientsParams,
    step: usize,
    bad: &'a [usize],
    missing: &'a [usize],
    index: usize,
}

impl ModuleVisitor<B> for Filler<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let index = self.index;
        self.index += 1;
        if self.missing.contains(&index) {
            return;
        }
        let shape = param.val().shape();
        let mut values: Vec<f32> = (0..shape.num_elements())
            .map(|i| ((i * 31 + self.step * 17 + index * 7) as f32).sin())
            .collect();
        if self.bad.contains(&index) {
            let at = self.step % values.len();
            values[at] = [f32::INFINITY, f32::NAN, f32::NEG_INFINITY][self.step % 3];
        }
        let data = TensorData::new(values, shape);
        let gradient = Tensor::<Inner, D>::from_data(data, &Default::default());
        self.gradients.register(param.id, gradient);
    }
}

/// Every parameter, bit for bit.
pub fn values(net: &Net<B>) -> Vec<Vec<u32>> {
    floats(net)
        .into_iter()
        .map(|values| values.into_iter().map(f32::to_bits).collect())
        .collect()
}

/// Every parameter.
pub fn floats<B: Backend>(net: &Net<B>) -> Vec<Vec<f32>> {
    let mut reader = Reader(Vec::new());
    net.visit(&mut reader);
    reader.0
}

struct Reader(Vec<Vec<f32>>);

impl<B: Backend> ModuleVisitor<B> for Reader {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.push(param.val().into_data().iter::<f32>().collect());
    }
}

/// Equal to f32 rounding: so far apart, relative to the largest element of the tensor, may two
/// orders of summation be.
pub fn assert_close<B: Backend>(left: &Net<B>, right: &Net<B>, tolerance: f32) {
    for ((left, right), path) in floats(left).iter().zip(floats(right)).zip(PATHS) {
        let largest = left.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        for (a, b) in left.iter().zip(right) {
            assert!(
                (a - b).abs() <= tolerance * largest.max(1e-3),
                "{path}: {a} is not {b}"
            );
        }
    }
}

/// A record, as a value that can be compared.
pub fn json<R: Record<B>>(record: R) -> serde_json::Value {
    serde_json::to_value(record.into_item::<FullPrecisionSettings>()).unwrap()
}

/// The optimizer's state, as a value that can be compared.
pub fn state<O: Optimizer<Net<B>, B>>(optimizer: &O) -> serde_json::Value {
    json(optimizer.to_record())
}

/// The message that `f` panics with.
pub fn panic_of<T>(f: impl FnOnce() -> T) -> String {
    let payload = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
    let Err(payload) = payload else {
        panic!("it did not panic");
    };
    *payload.downcast::<String>().expect("a formatted message")
}
