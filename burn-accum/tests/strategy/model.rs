//! A small network, rows for it, and how it is trained.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use burn::{
    module::{Module, ModuleVisitor, Param},
    nn::{Dropout, DropoutConfig, Linear, LinearConfig},
    tensor::{
        DType, Tensor, TensorData,
        activation::tanh,
        backend::{AutodiffBackend, Backend},
    },
    train::{
        InferenceStep, ItemLazy, TrainOutput, TrainStep,
        metric::{Adaptor, LossInput},
    },
};
use burn_accum::Counted;
use burn_flex::Flex;

/// One row of an endless data set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    pub index: usize,
    /// Of its loss. 0: it is padding and not counted; infinity: its gradients are not finite.
    pub weight: f32,
}

/// Rows `from..to`, each of weight 1.
pub fn rows(from: usize, to: usize) -> Vec<Row> {
    let row = |index| Row { index, weight: 1.0 };
    (from..to).map(row).collect()
}

#[derive(Module, Debug)]
pub struct Model<B: Backend> {
    pub first: Linear<B>,
    second: Linear<B>,
    pub dropout: Dropout,
    tokens: bool,
    /// The first layer is used a second time, backwards.
    pub reuses: bool,
    /// Its weight, if the model holds it again for that.
    pub again: Option<Param<Tensor<B, 2>>>,
}

impl<B: Backend> Model<B> {
    /// Trains by the mean over rows, with parameters that are initialised when they are first used.
    pub fn lazy(dropout: f64, device: &B::Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        Self {
            first: linear(5, 7),
            second: linear(7, 3),
            dropout: DropoutConfig::new(dropout).init(),
            tokens: false,
            reuses: false,
            again: None,
        }
    }

    /// Always the same, without dropout, also where several threads make one: they take turns,
    /// because the random generator is the process's.
    pub fn new() -> Self {
        static MAKING: Mutex<()> = Mutex::new(());
        let _turn = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        let device = Default::default();
        B::seed(&device, 5);
        let model = Self::lazy(0.0, &device);
        values(&model);
        model
    }

    /// Trains by the mean over counted rows, and tells their number.
    pub fn counting(self) -> Self {
        Self {
            tokens: true,
            ..self
        }
    }

    /// The same on another backend.
    pub fn on<C: Backend>(&self) -> Model<C> {
        let mut copy = Model::<C>::new();
        let device = Default::default();
        copy.first.weight = Param::from_data(self.first.weight.val().into_data(), &device);
        copy.second.weight = Param::from_data(self.second.weight.val().into_data(), &device);
        copy
    }

    /// The sum over rows.
    pub fn loss_sum(&self, rows: &[Row]) -> Tensor<B, 1> {
        let waves = |columns: usize, wave: f32| {
            let value = |row: &Row, column| ((row.index * columns + column) as f32 * wave).sin();
            let values: Vec<f32> = rows
                .iter()
                .flat_map(|row| (0..columns).map(move |column| value(row, column)))
                .collect();
            let data = TensorData::new(values, [rows.len(), columns]);
            Tensor::<B, 2>::from_data(data, &Default::default())
        };
        let weights: Vec<f32> = rows.iter().map(|row| row.weight).collect();
        let weights = TensorData::new(weights, [rows.len(), 1]);
        let weights = Tensor::<B, 2>::from_data(weights, &Default::default());

        let mut hidden = tanh(self.first.forward(waves(5, 0.37)));
        if self.reuses {
            let weight = self.again.as_ref().unwrap_or(&self.first.weight).val();
            hidden = tanh(self.first.forward(hidden.matmul(weight.transpose())));
        }
        let error = self.second.forward(self.dropout.forward(hidden)) - waves(3, 0.91);
        (error.cast(DType::F32).square() * weights).sum()
    }
}

/// How many rows count.
pub fn counted(rows: &[Row]) -> usize {
    rows.iter().filter(|row| row.weight != 0.0).count()
}

impl<B: AutodiffBackend> TrainStep for Model<B> {
    type Input = Vec<Row>;
    type Output = Output;

    fn step(&self, rows: Vec<Row>) -> TrainOutput<Output> {
        let loss = self.loss_sum(&rows);
        let output = Output::mean(&loss, &rows);
        if self.tokens {
            Counted::sum(loss, counted(&rows)).output(self, output)
        } else {
            let mean = loss / rows.len() as f32;
            TrainOutput::new(self, mean.backward(), output)
        }
    }
}

impl<B: Backend> InferenceStep for Model<B> {
    type Input = Vec<Row>;
    type Output = Output;

    fn step(&self, rows: Vec<Row>) -> Output {
        Output::mean(&self.loss_sum(&rows), &rows)
    }
}

/// The metrics of a batch with this row take a while.
pub const SLOW_ROW: usize = 2005;

/// The mean loss.
pub struct Output {
    pub loss: f32,
    pub slow: bool,
}

impl Output {
    fn mean<B: Backend>(loss_sum: &Tensor<B, 1>, rows: &[Row]) -> Self {
        let sum = loss_sum.clone().into_data().iter::<f32>().sum::<f32>();
        Self {
            loss: sum / rows.len() as f32,
            slow: rows.iter().any(|row| row.index == SLOW_ROW),
        }
    }
}

impl ItemLazy for Output {
    type ItemSync = Self;

    fn sync(self) -> Self {
        if self.slow {
            std::thread::sleep(Duration::from_millis(5));
        }
        self
    }
}

impl Adaptor<LossInput<Flex>> for Output {
    fn adapt(&self) -> LossInput<Flex> {
        LossInput::new(Tensor::from_floats([self.loss], &Default::default()))
    }
}

/// Every float tensor.
pub fn values<B: Backend>(model: &impl Module<B>) -> Vec<Vec<f32>> {
    struct Reader(Vec<Vec<f32>>);
    impl<B: Backend> ModuleVisitor<B> for Reader {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(param.val().into_data().iter::<f32>().collect());
        }
    }
    let mut reader = Reader(Vec::new());
    model.visit(&mut reader);
    reader.0
}

/// Every parameter, bit for bit.
pub fn bits<B: Backend>(model: &Model<B>) -> Vec<Vec<u32>> {
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    values(model).into_iter().map(bits).collect()
}

/// Equal to `tolerance`, relative to the largest element of each parameter.
pub fn assert_close<A: Backend, B: Backend>(left: &Model<A>, right: &Model<B>, tolerance: f32) {
    for (left, right) in values(left).iter().zip(values(right)) {
        let largest = left.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        for (a, b) in left.iter().zip(right) {
            assert!((a - b).abs() <= tolerance * largest, "{a} is not {b}");
        }
    }
}
