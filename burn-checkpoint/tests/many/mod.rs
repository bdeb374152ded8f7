//! Training steps of many small operations: a CTC loss over many time steps, and a recurrent
//! network.

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{log_softmax, sigmoid};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Distribution, ElementConversion, Int, Tensor, module::ctc_loss};

/// One training step: loss and gradients. The sum of the gradients' elements keeps the step from
/// being a no-op.
pub trait Step<B: AutodiffBackend> {
    fn run(&self) -> f32;
}

/// A CTC loss: some 40 operations a time step in forward.
pub struct Ctc<B: AutodiffBackend> {
    logits: Tensor<B, 3>, // [time, batch, classes]
    targets: Tensor<B, 2, Int>,
}

impl<B: AutodiffBackend> Ctc<B> {
    /// 4 sequences of 20 labels in 32 classes: operations on some hundred bytes.
    pub fn new(time: usize) -> Self {
        Self::of([time, 4, 32], 20)
    }

    /// Logits of this shape (time steps, sequences, classes), and so many labels a sequence.
    pub fn of(shape: [usize; 3], labels: usize) -> Self {
        let [_, sequences, classes] = shape.map(|size| size as i64);
        let device = Default::default();
        let logits = Tensor::random(shape, Distribution::Normal(0.0, 1.0), &device);
        let targets = Tensor::<B, 1, Int>::arange(0..sequences * labels as i64, &device);
        Self {
            logits: logits.require_grad(),
            targets: (targets % (classes - 1) + 1).reshape([sequences, -1]),
        }
    }
}

impl<B: AutodiffBackend> Step<B> for Ctc<B> {
    fn run(&self) -> f32 {
        let device = self.logits.device();
        let [time, sequences, _] = self.logits.dims();
        let labels = self.targets.dims()[1];
        let loss = ctc_loss(
            log_softmax(self.logits.clone(), 2),
            self.targets.clone(),
            Tensor::full([sequences], time as i64, &device),
            Tensor::full([sequences], labels as i64, &device),
            0,
        );
        let grads = loss.mean().backward();
        let grad = self.logits.grad(&grads).expect("a gradient");
        grad.abs().sum().into_scalar().elem()
    }
}

/// A layer of an LSTM whose gates and states are normalised.
#[derive(Module, Debug)]
struct Cell<B: burn::tensor::backend::Backend> {
    from_input: Linear<B>,
    from_state: Linear<B>,
    norms: Vec<LayerNorm<B>>, // gates, cell, state
}

/// Two layers of 32 states on 10 steps of a batch of 32, in both directions.
#[derive(Module, Debug)]
struct Network<B: burn::tensor::backend::Backend> {
    cells: Vec<Cell<B>>, // first and second layer of each direction
    out: Linear<B>,
}

const HIDDEN: usize = 32;

impl<B: burn::tensor::backend::Backend> Cell<B> {
    fn new(input: usize, device: &B::Device) -> Self {
        let sizes = [4 * HIDDEN, HIDDEN, HIDDEN];
        Self {
            from_input: LinearConfig::new(input, 4 * HIDDEN).init(device),
            from_state: LinearConfig::new(HIDDEN, 4 * HIDDEN).init(device),
            norms: sizes
                .map(|size| LayerNormConfig::new(size).init(device))
                .into(),
        }
    }

    /// The next state and cell.
    fn next(&self, x: Tensor<B, 2>, state: Tensor<B, 2>, cell: Tensor<B, 2>) -> [Tensor<B, 2>; 2] {
        let gates =
            self.norms[0].forward(self.from_input.forward(x)) + self.from_state.forward(state);
        let gates = gates.chunk(4, 1);
        let [input, forget, output] = [0, 1, 3].map(|gate| sigmoid(gates[gate].clone()));
        let cell = self.norms[1].forward(forget * cell + input * gates[2].clone().tanh());
        [self.norms[2].forward(output * cell.clone().tanh()), cell]
    }
}

pub struct Lstm<B: AutodiffBackend> {
    network: Network<B>,
    x: Tensor<B, 3>, // [batch, time, 1]
}

impl<B: AutodiffBackend> Lstm<B> {
    pub fn new() -> Self {
        let device = Default::default();
        let network = Network {
            cells: [1, HIDDEN, 1, HIDDEN]
                .map(|input| Cell::new(input, &device))
                .into(),
            out: LinearConfig::new(2 * HIDDEN, 1).init(&device),
        };
        let x = Tensor::random([32, 10, 1], Distribution::Default, &device);
        let lstm = Self { network, x };
        lstm.run(); // parameters are made at their first use
        lstm
    }

    fn direction(&self, cells: &[Cell<B>], x: Tensor<B, 3>) -> Tensor<B, 3> {
        let [batch, time, _] = x.dims();
        let zeros = || Tensor::zeros([batch, HIDDEN], &x.device());
        let mut states = [[zeros(), zeros()], [zeros(), zeros()]];
        let steps = (0..time).map(|at| {
            let mut x = x.clone().slice([0..batch, at..at + 1]).squeeze_dim::<2>(1);
            for (cell, pair) in cells.iter().zip(&mut states) {
                let [state, memory] = pair.clone();
                *pair = cell.next(x, state, memory);
                x = pair[0].clone();
            }
            x
        });
        Tensor::stack(steps.collect(), 1)
    }
}

impl<B: AutodiffBackend> Step<B> for Lstm<B> {
    fn run(&self) -> f32 {
        let (forward, reverse) = self.network.cells.split_at(2);
        let forward = self.direction(forward, self.x.clone());
        let reverse = self.direction(reverse, self.x.clone().flip([1])).flip([1]);
        let last = Tensor::cat(vec![forward, reverse], 2)
            .slice([0..32, 9..10])
            .squeeze_dim::<2>(1);
        let loss = (self.network.out.forward(last) - 1.0).powi_scalar(2).mean();
        let grads = loss.backward();
        let weight = self.network.cells[0].from_state.weight.val();
        let grad = weight.grad(&grads).expect("a gradient");
        grad.abs().sum().into_scalar().elem()
    }
}
