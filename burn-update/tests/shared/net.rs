//! A small network, and gradients for it that are made up where a test wants particular ones.
#![allow(dead_code)] // each test program uses its part

use burn::{
    module::{Module, ModuleVisitor, Param},
    nn::{Linear, LinearConfig},
    optim::GradientsParams,
    tensor::{
        Tensor, TensorData,
        activation::tanh,
        backend::{AutodiffBackend, Backend},
    },
};

#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    pub first: Linear<B>,
    second: Linear<B>,
}

/// The paths of a [`Net`]'s parameters, in module order.
pub const PATHS: [&str; 4] = ["first.weight", "first.bias", "second.weight", "second.bias"];

/// With fixed weights: AdamW divides by gradients, and where weights are drawn a gradient may be a
/// rounding error.
pub fn net<B: Backend>() -> Net<B> {
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
        let bias = Tensor::from_data(values(&[to], wave), &device);
        linear.bias = Some(Param::from_tensor(bias));
        linear
    };
    Net {
        first: linear(5, 7, 1.3),
        second: linear(7, 3, 2.1),
    }
}

/// Inputs and targets: rows `from..to` of an endless data set.
pub fn rows<B: Backend>(from: usize, to: usize) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let rows = |columns: usize, wave: f32| {
        let values: Vec<f32> = (from * columns..to * columns)
            .map(|i| (i as f32 * wave).sin())
            .collect();
        let data = TensorData::new(values, [to - from, columns]);
        Tensor::from_data(data, &Default::default())
    };
    (rows(5, 0.37), rows(3, 0.91))
}

impl<B: Backend> Net<B> {
    /// The mean of the squared error over rows.
    pub fn mean_error(&self, x: Tensor<B, 2>, y: Tensor<B, 2>) -> Tensor<B, 1> {
        let rows = x.dims()[0];
        let error = self.second.forward(tanh(self.first.forward(x))) - y;
        error.square().sum() / rows as f32
    }
}

/// Made-up gradients: finite ones, but for one element of each parameter in `bad`, and none for
/// those in `missing`.
pub fn gradients<B: AutodiffBackend>(
    net: &Net<B>,
    step: usize,
    bad: &[usize],
    missing: &[usize],
) -> GradientsParams {
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

impl<B: AutodiffBackend> ModuleVisitor<B> for Filler<'_> {
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
        let gradient = Tensor::<B::InnerBackend, D>::from_data(data, &Default::default());
        self.gradients.register(param.id, gradient);
    }
}

/// Every parameter, bit for bit.
pub fn bits<B: Backend>(net: &Net<B>) -> Vec<Vec<u32>> {
    let values = floats(net).into_iter();
    values
        .map(|values| values.into_iter().map(f32::to_bits).collect())
        .collect()
}

/// Every parameter.
pub fn floats<B: Backend>(net: &Net<B>) -> Vec<Vec<f32>> {
    struct Reader(Vec<Vec<f32>>);
    impl<B: Backend> ModuleVisitor<B> for Reader {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(param.val().into_data().iter::<f32>().collect());
        }
    }
    let mut reader = Reader(Vec::new());
    net.visit(&mut reader);
    reader.0
}

/// Equal to rounding: so far apart, relative to the largest element of the tensor, may two orders
/// of summation be.
pub fn assert_close<B: Backend>(left: &Net<B>, right: &Net<B>, tolerance: f32) {
    for ((left, right), path) in floats(left).iter().zip(floats(right)).zip(PATHS) {
        let largest = left
            .iter()
            .fold(1e-3_f32, |largest, x| largest.max(x.abs()));
        for (a, b) in left.iter().zip(right) {
            let apart = (a - b).abs();
            assert!(apart <= tolerance * largest, "{path}: {a} is not {b}");
        }
    }
}
