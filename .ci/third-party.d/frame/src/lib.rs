//! Trains the model of another project, whose code is not edited, plain and with each of these
//! crates, and compares the runs.
//!
//! Each run is a process of its own, so that heaps, panics and the backend's random numbers do not
//! mix: the program starts itself with the name of a [`Run`]. Without a name it starts all of them
//! and prints one row of the table.

mod compare;
mod run;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use burn_amp::GradScaler;
use burn_checkpoint::{RematError, checkpoint_units};
use burn_update::{Update, UpdateError};
use burn_zero::{ProcessGroup, RanksError, ReduceOverRanks, ZeroSettings};
use peak_alloc::PeakAlloc;

pub use run::Run;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Training steps of a run. The first one makes the optimizer's state, and a budget of a fraction
/// measures it.
pub const STEPS: usize = 4;
pub const LEARNING_RATE: f64 = 1e-3;

/// A model of another project, and how it is trained.
pub trait Project {
    /// With its version.
    const NAME: &'static str;
    /// Rows of a batch: even, because two ranks divide them.
    const ROWS: usize;
    /// Why two ranks with half of a batch each are not one with the whole batch, where they are
    /// not.
    const NOT_ADDITIVE: Option<&'static str> = None;

    /// The limit of the budget, of what the first step takes.
    const BUDGET: f64 = 0.4;

    fn training<B: AutodiffBackend>(device: B::Device, dropout: Dropout) -> impl Training<B>;
}

/// Whether a model drops activations, if it can: two ranks draw other masks than one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropout {
    OfTheProject,
    Off,
}

/// The [`checksum`] of the model after training, or why there is none.
pub type Ended = Result<u32, NotTrained>;

/// Why a run ends without a trained model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotTrained {
    /// The project allows no other way.
    ByProject(String),
    /// An error of these crates.
    ByCrates(String),
}

impl From<RematError> for NotTrained {
    fn from(error: RematError) -> Self {
        match error {
            RematError::NoRepeatedBlocks { .. } => Self::ByProject(error.to_string()),
            error => Self::ByCrates(error.to_string()),
        }
    }
}

impl From<RanksError> for NotTrained {
    fn from(error: RanksError) -> Self {
        Self::ByCrates(error.to_string())
    }
}

impl From<UpdateError> for NotTrained {
    fn from(error: UpdateError) -> Self {
        Self::ByCrates(error.to_string())
    }
}

/// The part of a model that a checksum is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Whole,
    /// Without running statistics, which are those of a rank's own batches.
    Trained,
}

/// A model with its training loop, for the optimizers of a run.
pub trait Training<B: AutodiffBackend>: Sized {
    fn parameters(&self) -> usize;
    fn with_adamw(self, steps: &mut Steps) -> Ended;
    /// With scopes of its units.
    fn with_units(self, steps: &mut Steps) -> Ended;
    fn with_scaler(self, scaler: &GradScaler, steps: &mut Steps) -> Ended;
    fn as_rank(
        self,
        group: Arc<dyn ProcessGroup>,
        settings: ZeroSettings,
        steps: &mut Steps,
    ) -> Ended;
}

/// A training loop for any optimizer.
pub trait TrainingLoop<B: AutodiffBackend, M: AutodiffModule<B>> {
    fn run<O: Optimizer<M, B>>(self, model: M, optimizer: O, steps: &mut Steps) -> M;
}

/// What a run reports of each of its steps.
pub struct Steps {
    /// Rows of the batch that this rank has.
    pub rows: Range<usize>,
    heap_before: usize,
    begin: Instant,
    pub losses: Vec<f32>,
    pub times: Vec<Duration>,
    pub peak_bytes: Vec<usize>,
}

impl Steps {
    pub fn new(rows: Range<usize>) -> Self {
        Self {
            rows,
            heap_before: HEAP.current_usage(),
            begin: Instant::now(),
            losses: Vec::new(),
            times: Vec::new(),
            peak_bytes: Vec::new(),
        }
    }

    /// The first step begins.
    pub fn start(&mut self) {
        HEAP.reset_peak_usage();
        self.begin = Instant::now();
    }

    /// A step is over.
    pub fn end(&mut self, loss: f32) {
        self.losses.push(loss);
        self.times.push(self.begin.elapsed());
        let peak = HEAP.peak_usage().saturating_sub(self.heap_before);
        self.peak_bytes.push(peak);
        self.start();
    }
}

/// A model and a loop that takes any optimizer.
struct AnyOptimizer<M, L> {
    model: M,
    training_loop: L,
}

/// The [`Training`] of a model by a loop.
pub fn training<B, M, L>(model: M, training_loop: L) -> impl Training<B>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    L: TrainingLoop<B, M>,
{
    // Parameters are initialised at their first use, and each clone draws its own numbers: here,
    // before anything is cloned.
    model.visit(&mut Initialise);
    AnyOptimizer {
        model,
        training_loop,
    }
}

/// The [`Training`] of a model by a function of the model, the step and the rows, that returns the
/// loss and gradients.
pub fn steps<B, M, F>(model: M, step: F) -> impl Training<B>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    F: FnMut(&M, usize, Range<usize>) -> (Tensor<B, 1>, GradientsParams),
{
    training(model, ByStep(step))
}

/// The gradients of a loss.
pub fn backward<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    loss: Tensor<B, 1>,
) -> (Tensor<B, 1>, GradientsParams) {
    let gradients = GradientsParams::from_grads(loss.backward(), model);
    (loss, gradients)
}

struct ByStep<F>(F);

impl<B, M, F> TrainingLoop<B, M> for ByStep<F>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    F: FnMut(&M, usize, Range<usize>) -> (Tensor<B, 1>, GradientsParams),
{
    fn run<O: Optimizer<M, B>>(mut self, mut model: M, mut optimizer: O, steps: &mut Steps) -> M {
        steps.start();
        for step in 0..STEPS {
            let (loss, gradients) = (self.0)(&model, step, steps.rows.clone());
            model = optimizer.step(LEARNING_RATE, model, gradients);
            steps.end(value(loss));
        }
        model
    }
}

impl<B, M, L> Training<B> for AnyOptimizer<M, L>
where
    B: AutodiffBackend,
    M: AutodiffModule<B> + 'static,
    L: TrainingLoop<B, M>,
{
    fn parameters(&self) -> usize {
        self.model.num_params()
    }

    fn with_adamw(self, steps: &mut Steps) -> Ended {
        let optimizer = AdamWConfig::new().init();
        let model = self.training_loop.run(self.model, optimizer, steps);
        Ok(checksum::<B, M>(&model, Part::Whole))
    }

    fn with_units(self, steps: &mut Steps) -> Ended {
        let (model, units) = checkpoint_units::<B, M>(self.model)?;
        let optimizer = units.wrap(AdamWConfig::new().init());
        let model = self.training_loop.run(model, optimizer, steps);
        Ok(checksum::<B, M>(&model, Part::Whole))
    }

    fn with_scaler(self, scaler: &GradScaler, steps: &mut Steps) -> Ended {
        let update = Update::new(AdamWConfig::new().init()).scale(scaler.clone())?;
        let model = self.training_loop.run(self.model, update, steps);
        Ok(checksum::<B, M>(&model, Part::Whole))
    }

    fn as_rank(
        self,
        group: Arc<dyn ProcessGroup>,
        settings: ZeroSettings,
        steps: &mut Steps,
    ) -> Ended {
        let mut update = Update::new(AdamWConfig::new().init()).reduce(settings, group)?;
        let model = update.prepare(self.model)?;
        let model = self.training_loop.run(model, update, steps);
        Ok(checksum::<B, M>(&model, Part::Trained))
    }
}

struct Initialise;

impl<B: Backend> ModuleVisitor<B> for Initialise {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let _ = param.val();
    }
}

/// Of the bits of a model's parameters, in the order of visit.
pub fn checksum<B: Backend, M: Module<B>>(model: &M, part: Part) -> u32 {
    struct Bits {
        hasher: crc32fast::Hasher,
        part: Part,
    }
    impl<B: Backend> ModuleVisitor<B> for Bits {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let value = param.val();
            if self.part == Part::Whole || value.is_require_grad() {
                let data = value.into_data().convert::<f32>();
                self.hasher.update(data.as_bytes());
            }
        }
    }
    let hasher = crc32fast::Hasher::new();
    let mut bits = Bits { hasher, part };
    model.visit(&mut bits);
    bits.hasher.finalize()
}

/// A loss on the host, whatever its type.
pub fn value<B: Backend>(loss: Tensor<B, 1>) -> f32 {
    let data = loss.into_data().convert::<f32>();
    data.to_vec::<f32>().expect("just converted")[0]
}

/// A number of a row that depends on nothing else than its place: ranks have their rows of the same
/// batch.
fn draw(step: usize, row: usize, place: usize) -> u64 {
    // splitmix64 (Steele, Lea, Flood 2014)
    let mut bits = (step as u64) << 48 ^ (row as u64) << 32 ^ place as u64;
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

/// Numbers between -1 and 1, for one row.
pub fn row(step: usize, row: usize, len: usize) -> Vec<f32> {
    let number = |place| (draw(step, row, place) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    (0..len).map(number).collect()
}

/// Numbers between -1 and 1: `[rows, inner..]`. The first size of `shape` is ignored.
pub fn numbers<B: Backend, const D: usize>(
    device: &B::Device,
    step: usize,
    rows: Range<usize>,
    mut shape: [usize; D],
) -> Tensor<B, D> {
    shape[0] = rows.len();
    let inner = shape[1..].iter().product();
    let numbers: Vec<f32> = rows.flat_map(|index| row(step, index, inner)).collect();
    Tensor::from_data(TensorData::new(numbers, shape), device)
}

/// Integers below `limit`: `[rows, inner..]`. The first size of `shape` is ignored.
pub fn integers<B: Backend, const D: usize>(
    device: &B::Device,
    step: usize,
    rows: Range<usize>,
    mut shape: [usize; D],
    limit: u64,
) -> Tensor<B, D, Int> {
    shape[0] = rows.len();
    let inner: usize = shape[1..].iter().product();
    let of_row = |row| (0..inner).map(move |place| (draw(step, row, place) % limit) as i64);
    let integers: Vec<i64> = rows.flat_map(of_row).collect();
    Tensor::from_data(TensorData::new(integers, shape), device)
}

/// The program of a project.
pub fn main<P: Project>() {
    match std::env::args().nth(1) {
        Some(name) => run::start::<P>(&name),
        None => compare::print_row::<P>(),
    }
}
