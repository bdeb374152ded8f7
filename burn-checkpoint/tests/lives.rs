//! What outlives its step pins nothing of it: under a budget forty steps of any training loop hold
//! what fifteen hold, and no step's peak is higher than without a budget. Bytes of the heap, so a
//! process of its own, whose tests take turns.

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{Adam, AdamConfig, GradientsParams, Optimizer};
use burn::tensor::activation::{log_softmax, relu, softmax};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use burn_checkpoint::{MemoryBudget, Remat, RematStats};
use burn_flex::Flex;
use parking_lot::{Mutex, MutexGuard};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// The heap is the process's: tests take turns.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock()
}

type B = Autodiff<Remat<Flex>>;
type Inner = <B as AutodiffBackend>::InnerBackend;

const BATCH: usize = 64;
const WIDTH: usize = 96;
const CLASSES: usize = 32;

/// Two layers; a third makes classes of it.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    layers: Vec<Linear<B>>,
    classes: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new() -> Self {
        let device = B::Device::default();
        let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(&device);
        Self {
            layers: (0..6).map(layer).collect(),
            classes: LinearConfig::new(WIDTH, CLASSES).init(&device),
        }
    }

    fn features(&self, mut x: Tensor<B, 2>) -> Tensor<B, 2> {
        for layer in &self.layers {
            x = relu(layer.forward(x)) + 0.5;
        }
        x
    }

    fn logits(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.classes.forward(self.features(x))
    }
}

/// Convolutions with running statistics.
#[derive(Module, Debug)]
struct Images<B: Backend> {
    convolutions: Vec<Conv2d<B>>,
    norms: Vec<BatchNorm<B>>,
}

impl<B: Backend> Images<B> {
    fn new() -> Self {
        let device = B::Device::default();
        let convolution = |_| {
            let config = Conv2dConfig::new([16, 16], [3, 3]);
            config.with_padding(PaddingConfig2d::Same).init(&device)
        };
        Self {
            convolutions: (0..4).map(convolution).collect(),
            norms: (0..4)
                .map(|_| BatchNormConfig::new(16).init(&device))
                .collect(),
        }
    }

    fn forward(&self, mut x: Tensor<B, 4>) -> Tensor<B, 4> {
        for (convolution, norm) in self.convolutions.iter().zip(&self.norms) {
            x = relu(norm.forward(convolution.forward(x)));
        }
        x
    }
}

fn noise<B: Backend, const D: usize>(step: usize, shape: [usize; D]) -> Tensor<B, D> {
    let numbers = (0..shape.iter().product::<usize>())
        .map(|at| ((at * 7919 + step * 31) % 64) as f32 / 32.0 - 1.0);
    Tensor::from_data(
        TensorData::new(numbers.collect(), shape),
        &B::Device::default(),
    )
}

fn targets<B: Backend>(step: usize) -> Tensor<B, 2, Int> {
    let numbers = (0..BATCH).map(|at| ((at + step) % CLASSES) as i64);
    Tensor::from_data(
        TensorData::new(numbers.collect(), [BATCH, 1]),
        &B::Device::default(),
    )
}

fn cross_entropy<B: Backend>(logits: Tensor<B, 2>, targets: Tensor<B, 2, Int>) -> Tensor<B, 1> {
    -log_softmax(logits, 1).gather(1, targets).mean()
}

/// A model with its optimizer.
struct Trained<M: AutodiffModule<B>> {
    model: Option<M>,
    optimizer: OptimizerAdaptor<Adam, M, B>,
}

impl<M: AutodiffModule<B>> Trained<M> {
    fn new(model: M) -> Self {
        Self {
            model: Some(model),
            optimizer: AdamConfig::new().init(),
        }
    }

    fn model(&self) -> &M {
        self.model.as_ref().expect("no step is under way")
    }

    fn update(&mut self, loss: Tensor<B, 1>) {
        let gradients = GradientsParams::from_grads(loss.backward(), self.model());
        let model = self.model.take().expect("no step is under way");
        self.model = Some(self.optimizer.step(1e-3, model, gradients));
    }
}

fn input<B: Backend>(step: usize) -> Tensor<B, 2> {
    noise(step, [BATCH, WIDTH])
}

/// `0.9 * average + 0.1 * weights`, for each parameter of a linear layer.
fn blend(average: Linear<B>, weights: &Linear<B>) -> Linear<B> {
    fn mix<const D: usize>(average: Tensor<B, D>, weights: Tensor<B, D>) -> Param<Tensor<B, D>> {
        Param::from_tensor((average.mul_scalar(0.9) + weights.mul_scalar(0.1)).detach())
    }
    Linear {
        weight: mix(average.weight.val(), weights.weight.val()),
        bias: average
            .bias
            .zip(weights.bias.as_ref())
            .map(|(average, weights)| mix(average.val(), weights.val())),
    }
}

fn blend_all(average: Net<B>, weights: &Net<B>) -> Net<B> {
    let layers = average.layers.into_iter().zip(&weights.layers);
    Net {
        layers: layers.map(|(own, other)| blend(own, other)).collect(),
        classes: blend(average.classes, &weights.classes),
    }
}

type Step = Box<dyn FnMut(usize)>;

/// Makes a training loop's step.
type Program = fn() -> Step;

fn plain() -> Step {
    let mut trained = Trained::new(Net::<B>::new());
    Box::new(move |step| {
        let logits = trained.model().logits(input(step));
        trained.update(cross_entropy(logits, targets(step)));
    })
}

fn running_statistics() -> Step {
    let mut trained = Trained::new(Images::<B>::new());
    Box::new(move |step| {
        let y = trained.model().forward(noise(step, [8, 16, 12, 12]));
        trained.update(y.powf_scalar(2.0).mean());
    })
}

/// As a Learner does: metrics read the logits after the update.
fn logits_that_are_read_after_the_update() -> Step {
    let mut trained = Trained::new(Net::<B>::new());
    Box::new(move |step| {
        let logits = trained.model().logits(input(step));
        trained.update(cross_entropy(logits.clone(), targets(step)));
        let predicted = logits.argmax(1).into_data();
        assert_eq!(predicted.num_elements(), BATCH);
    })
}

fn average_of_weights() -> Step {
    let mut trained = Trained::new(Net::<B>::new());
    let mut average = Some(trained.model().clone());
    Box::new(move |step| {
        let logits = trained.model().logits(input(step));
        trained.update(cross_entropy(logits, targets(step)));
        average = average.take().map(|own| blend_all(own, trained.model()));
    })
}

fn target_network_and_a_second_loss() -> Step {
    let mut trained = Trained::new(Net::<B>::new());
    let mut target = Some(trained.model().clone());
    Box::new(move |step| {
        let goal = target
            .as_ref()
            .map(|target| target.logits(input(step)).detach());
        let difference = trained.model().logits(input(step)) - goal.expect("there is a target");
        trained.update(difference.powf_scalar(2.0).mean());
        let second = trained.model().features(input(step + 1)).mean();
        drop(second.backward());
        target = target.take().map(|own| blend_all(own, trained.model()));
    })
}

/// Two losses of one step, whose updates follow both backward passes.
fn two_models_with_two_optimizers() -> Step {
    let mut first = Trained::new(Net::<B>::new());
    let mut second = Trained::new(Net::<B>::new());
    Box::new(move |step| {
        let one = cross_entropy(first.model().logits(input(step)), targets(step)).backward();
        let one = GradientsParams::from_grads(one, first.model());
        let two = cross_entropy(second.model().logits(input(step)), targets(step)).backward();
        let two = GradientsParams::from_grads(two, second.model());
        for (trained, gradients) in [(&mut first, one), (&mut second, two)] {
            let model = trained.model.take().expect("no step is under way");
            trained.model = Some(trained.optimizer.step(1e-3, model, gradients));
        }
    })
}

/// The generator's tape lives on over the discriminator's backward pass and update.
fn generator_and_discriminator() -> Step {
    let mut generator = Trained::new(Net::<B>::new());
    let mut discriminator = Trained::new(Net::<B>::new());
    Box::new(move |step| {
        let made = generator.model().features(input(step));
        let of_real = discriminator.model().features(input(step + 1)).mean();
        let of_made = discriminator.model().features(made.clone().detach()).mean();
        discriminator.update(of_made - of_real);
        let of_made = discriminator.model().features(made).mean();
        generator.update(-of_made);
    })
}

fn confusion_matrix_on_the_device() -> Step {
    let mut trained = Trained::new(Net::<B>::new());
    let mut matrix = Tensor::<Inner, 2>::zeros([CLASSES, CLASSES], &Default::default());
    Box::new(move |step| {
        let logits = trained.model().logits(input(step));
        trained.update(cross_entropy(logits.clone(), targets(step)));
        let predicted = softmax(logits.inner(), 1);
        let hit = targets::<Inner>(step)
            .reshape([BATCH])
            .one_hot::<2>(CLASSES)
            .float();
        matrix = matrix.clone() + hit.transpose().matmul(predicted);
    })
}

/// Back-propagation through time in windows of four, whose state is carried on.
fn recurrent_state() -> Step {
    let mut trained = Trained::new(Net::<B>::new());
    let mut state = input::<B>(0);
    Box::new(move |step| {
        let mut losses = Tensor::zeros([1], &Default::default());
        for time in 0..4 {
            state = (trained.model().features(input(step + time)) + state.clone()).tanh();
            losses = losses + state.clone().powf_scalar(2.0).mean();
        }
        state = state.clone().detach();
        trained.update(losses);
    })
}

/// Predictions of the last eight steps.
fn a_history_that_nothing_reads() -> Step {
    let mut trained = Trained::new(Net::<B>::new());
    let mut history = std::collections::VecDeque::new();
    Box::new(move |step| {
        let logits = trained.model().logits(input(step));
        history.push_back(logits.clone());
        history.truncate(8);
        if history.len() == 8 {
            history.pop_front();
        }
        trained.update(cross_entropy(logits, targets(step)));
    })
}

/// Three batches of `valid()` after each step, whose losses are added up on the device.
fn validation_in_between() -> Step {
    let mut trained = Trained::new(Net::<B>::new());
    let mut sum = Tensor::<Inner, 1>::zeros([1], &Default::default());
    Box::new(move |step| {
        let logits = trained.model().logits(input(step));
        trained.update(cross_entropy(logits, targets(step)));
        let valid = trained.model().valid();
        for batch in 0..3 {
            let logits = valid.logits(input(step + batch));
            sum = sum.clone() + cross_entropy(logits, targets(step + batch));
        }
    })
}

/// No backward pass at all: each step appends to a cache and forgets its oldest row.
fn generation_with_a_cache() -> Step {
    let model = Net::<B>::new().valid();
    let mut cache = noise::<Inner, 2>(0, [BATCH, WIDTH]);
    let mut token = noise::<Inner, 2>(1, [1, WIDTH]);
    Box::new(move |_| {
        let key = model.features(token.clone());
        cache = Tensor::cat(
            vec![cache.clone().slice([1..BATCH, 0..WIDTH]), key.clone()],
            0,
        );
        let weights = softmax(key.matmul(cache.clone().transpose()), 1);
        token = weights.matmul(cache.clone()).tanh();
    })
}

/// A loop whose validation sums never meet a backward pass.
fn validation_alone() -> Step {
    let model = Net::<B>::new().valid();
    let mut sum = Tensor::<Inner, 1>::zeros([1], &Default::default());
    Box::new(move |step| {
        sum = sum.clone() + cross_entropy(model.logits(input(step)), targets(step));
    })
}

/// Training loops, and two that take no backward pass: these keep nothing that could be evicted.
const PROGRAMS: [(&str, Program); 13] = [
    ("plain", plain),
    ("running statistics", running_statistics),
    (
        "logits that are read",
        logits_that_are_read_after_the_update,
    ),
    ("average of weights", average_of_weights),
    ("target network", target_network_and_a_second_loss),
    ("two optimizers", two_models_with_two_optimizers),
    ("adversarial", generator_and_discriminator),
    ("confusion matrix", confusion_matrix_on_the_device),
    ("recurrent state", recurrent_state),
    ("history", a_history_that_nothing_reads),
    ("validation in between", validation_in_between),
    ("generation", generation_with_a_cache),
    ("validation alone", validation_alone),
];

const WITHOUT_BACKWARD: [&str; 2] = ["generation", "validation alone"];

/// KiB of the heap, beyond what was there before the program.
#[derive(Debug)]
struct Found {
    /// The most after one of the first steps.
    early: usize,
    /// The most after one of the other steps.
    late: usize,
    /// The most in a step, from the second on.
    peak: usize,
    evicted: u64,
    counted_peak: u64,
}

const STEPS: usize = 40;
const EARLY: usize = 15;

fn run(program: Program, budget: Option<u64>) -> Found {
    B::seed(&Default::default(), 1);
    let before = HEAP.current_usage();
    let kib = |bytes: usize| bytes.saturating_sub(before) >> 10;
    let mut step = program();
    let installed = budget.map(|bytes| MemoryBudget::bytes(bytes).install());
    RematStats::reset_thread();
    let mut found = Found {
        early: 0,
        late: 0,
        peak: 0,
        evicted: 0,
        counted_peak: 0,
    };
    for at in 0..STEPS {
        HEAP.reset_peak_usage();
        step(at);
        if at > 0 {
            found.peak = found.peak.max(kib(HEAP.peak_usage()));
        }
        let after = if at < EARLY {
            &mut found.early
        } else {
            &mut found.late
        };
        *after = (*after).max(kib(HEAP.current_usage()));
    }
    found.evicted = RematStats::of_thread().evicted_operations;
    found.counted_peak = installed.map_or(0, |budget| budget.peak_bytes());
    drop(step);
    // What no loss reached stays until the next backward pass.
    let x = Tensor::<B, 1>::zeros([2], &Default::default()).require_grad();
    drop(x.exp().sum().backward());
    found
}

/// KiB of nodes and recipes of a step, which are no tensors.
const BOOKKEEPING: usize = 256;

#[test]
fn a_budget_raises_no_peak_and_many_steps_hold_what_ten_hold() {
    let _alone = alone();
    let mut failed = Vec::new();
    for (name, program) in PROGRAMS {
        run(program, None);
        let without = run(program, None);
        println!("{name}: without {without:?}");
        let roomy = run(program, Some(1 << 40));
        let tight = run(program, Some(roomy.counted_peak / 4));
        for (budget, found) in [("never reached", roomy), ("of a quarter", tight)] {
            println!("{name}: {budget} {found:?}");
            let evicts = budget == "of a quarter" && !WITHOUT_BACKWARD.contains(&name);
            if evicts && found.evicted == 0 {
                failed.push(format!("{name}, {budget}: nothing was evicted"));
            }
            if found.late > found.early + 64 {
                failed.push(format!(
                    "{name}, {budget}: {} KiB become {}",
                    found.early, found.late
                ));
            }
            if found.peak > without.peak + BOOKKEEPING {
                failed.push(format!(
                    "{name}, {budget}: a peak of {} KiB, {} without",
                    found.peak, without.peak
                ));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// The limit after a step that a whole budget has measured.
fn measured_limit(draws_under_budget: bool, updates: bool) -> u64 {
    B::seed(&Default::default(), 1);
    let mut trained = Trained::new(Net::<B>::new());
    if !draws_under_budget {
        // Parameters are drawn when they are used first.
        drop(trained.model().valid().logits(input(0)));
    }
    let budget = MemoryBudget::fraction(1.0).expect("a whole").install();
    let loss = |trained: &Trained<Net<B>>, step| {
        cross_entropy(trained.model().logits(input(step)), targets(step))
    };
    let first = loss(&trained, 0);
    if updates {
        trained.update(first);
    } else {
        drop(first.backward());
    }
    drop(loss(&trained, 1));
    let limits = budget.limit_bytes();
    limits[0].expect("the second step has begun")
}

#[test]
fn a_fraction_is_one_of_forward_and_backward() {
    let _alone = alone();
    let limit = measured_limit(false, false);
    assert_eq!(measured_limit(false, true), limit, "an update adds nothing");
    for updates in [false, true] {
        let drawn = measured_limit(true, updates);
        let difference = drawn.abs_diff(limit);
        assert!(
            difference <= limit / 50,
            "updates {updates}: {drawn} with drawn parameters, {limit} without"
        );
    }
}
