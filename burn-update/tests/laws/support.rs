//! A small network, batches for it, and gradients that are made up where a test wants particular
//! ones.

use burn::{
    backend::Autodiff,
    module::{Module, ModuleVisitor, Param},
    nn::{Linear, LinearConfig},
    optim::{AdamWConfig, GradientsParams, Optimizer},
    tensor::{
        Tensor, TensorData,
        activation::tanh,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_amp::{Autocast, F16};
use burn_flex::Flex;
use burn_update::{Part, Stateful, Step, UpdateError};

pub type F32 = Autodiff<Flex>;
pub type Half = Autocast<Autodiff<Flex>, F16>;

pub const LR: f64 = 0.02;

#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
}

/// The paths of a [`Net`]'s parameters, in module order.
pub const PATHS: [&str; 4] = ["first.weight", "first.bias", "second.weight", "second.bias"];

/// With fixed weights.
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

pub fn adamw<B: AutodiffBackend>() -> impl Optimizer<Net<B>, B> {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

impl<B: Backend> Net<B> {
    /// The mean over rows `from..to` of an endless data set.
    pub fn loss(&self, from: usize, to: usize) -> Tensor<B, 1> {
        let rows = |columns: usize, wave: f32| {
            let values: Vec<f32> = (from * columns..to * columns)
                .map(|i| (i as f32 * wave).sin())
                .collect();
            let data = TensorData::new(values, [to - from, columns]);
            Tensor::from_data(data, &Default::default())
        };
        let (x, y): (Tensor<B, 2>, Tensor<B, 2>) = (rows(5, 0.37), rows(3, 0.91));
        let error = self.second.forward(tanh(self.first.forward(x))) - y;
        error.square().sum() / (to - from) as f32
    }
}

/// Made-up gradients: finite ones, but for one element of each parameter in `bad`.
pub fn gradients<B: AutodiffBackend>(net: &Net<B>, step: usize, bad: &[usize]) -> GradientsParams {
    let mut filler = Filler {
        gradients: GradientsParams::new(),
        step,
        bad,
        index: 0,
    };
    net.visit(&mut filler);
    filler.gradients
}

struct Filler<'a> {
    gradients: GradientsParams,
    step: usize,
    bad: &'a [usize],
    index: usize,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Filler<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let index = self.index;
        self.index += 1;
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

/// A part that writes down the gradients of each update, and what the step says after it.
#[derive(Clone)]
pub struct Spy {
    pub name: &'static str,
    /// The first element of the first parameter's gradient, of each update.
    pub seen: std::sync::Arc<std::sync::Mutex<Vec<f32>>>,
}

impl Spy {
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            seen: Default::default(),
        }
    }

    pub fn seen(&self) -> Vec<f32> {
        self.seen.lock().unwrap().clone()
    }
}

impl<B: AutodiffBackend> Stateful<B> for Spy {
    fn name(&self) -> String {
        self.name.to_owned()
    }
}

impl<B: AutodiffBackend> Part<Net<B>, B> for Spy {
    fn gradients(
        &mut self,
        _: &mut Step<B::InnerBackend>,
        model: &Net<B>,
        gradients: GradientsParams,
    ) -> Result<GradientsParams, UpdateError> {
        let first: Tensor<B::InnerBackend, 2> = gradients.get(model.first.weight.id).unwrap();
        let value = first.into_data().iter::<f32>().next().unwrap();
        self.seen.lock().unwrap().push(value);
        Ok(gradients)
    }
}
