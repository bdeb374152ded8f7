//! A model whose `optimize` freezes or unfreezes a layer after its first step.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::lr_scheduler::constant::ConstantLr;
use burn::module::AutodiffModule;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::record::{DefaultFileRecorder, FullPrecisionSettings};
use burn::tensor::backend::AutodiffBackend;
use burn::train::{
    InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_update::Update;
use burn_zero::{ReduceOverRanks, SilentRenderer, ZeroSettings};

use crate::Z;
use crate::loader::loader;
use crate::model::{Row, rows};

const WIDTH: usize = 6;

#[derive(Module, Debug)]
struct Layers<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
    last: Linear<B>,
}

thread_local! {
    /// Steps of this thread, which is a rank.
    static STEPS: Cell<usize> = const { Cell::new(0) };
}

impl<B: Backend> Layers<B> {
    /// The second layer is trained, or not.
    fn new(is_trained: bool) -> Self {
        let linear = || {
            let config = LinearConfig::new(WIDTH, WIDTH).with_bias(false);
            config.init(&Default::default())
        };
        let mut model = Self {
            first: linear(),
            second: linear(),
            last: linear(),
        };
        model.second.weight = model.second.weight.set_require_grad(is_trained);
        model
    }

    fn output(&self, rows: &[Row]) -> RegressionOutput<B> {
        let device = Default::default();
        let x = Tensor::<B, 2>::ones([rows.len(), WIDTH], &device);
        let x = self.second.forward(self.first.forward(x));
        let none = Tensor::zeros([1, 1], &device);
        let loss = self.last.forward(x).square().mean();
        RegressionOutput::new(loss, none.clone(), none)
    }
}

impl TrainStep for Layers<Z> {
    type Input = Vec<Row>;
    type Output = RegressionOutput<Z>;

    fn step(&self, rows: Vec<Row>) -> TrainOutput<Self::Output> {
        STEPS.set(STEPS.get() + 1);
        let output = self.output(&rows);
        TrainOutput::new(self, output.loss.backward(), output)
    }

    fn optimize<B, O>(self, optimizer: &mut O, lr: f64, gradients: GradientsParams) -> Self
    where
        B: AutodiffBackend,
        O: Optimizer<Self, B>,
        Self: AutodiffModule<B>,
    {
        let mut model = optimizer.step(lr, self, gradients);
        if STEPS.get() == 1 {
            STEPS.set(2);
            let weight = model.second.weight;
            let is_trained = weight.is_require_grad();
            model.second.weight = weight.set_require_grad(!is_trained);
        }
        model
    }
}

impl<B: Backend> InferenceStep for Layers<B> {
    type Input = Vec<Row>;
    type Output = RegressionOutput<B>;

    fn step(&self, rows: Vec<Row>) -> Self::Output {
        self.output(&rows)
    }
}

#[test]
fn a_record_after_it_is_refused_and_names_the_parameter() {
    let _turn = crate::turn();
    for (stage, is_trained) in crate::STAGES
        .into_iter()
        .flat_map(|stage| [(stage, true), (stage, false)])
    {
        let update = Update::new(SgdConfig::new().init());
        let update = update.reduce_in_learner(ZeroSettings::stage(stage));
        let update: Update<Layers<Z>, Z> = update.unwrap();
        let strategy = update.strategy().threads(2);
        let directory = tempfile::tempdir().unwrap();
        // One step on each rank.
        let train = loader::<Z>(rows(0, 4), 2);
        let valid = loader(rows(8, 10), 2);
        let learner = Learner::new(Layers::new(is_trained), update, ConstantLr::new(0.05));
        let trained = catch_unwind(AssertUnwindSafe(|| {
            SupervisedTraining::new(directory.path(), train, valid)
                .num_epochs(1)
                .with_application_logger(None)
                .renderer(SilentRenderer)
                .with_file_checkpointer(DefaultFileRecorder::<FullPrecisionSettings>::new())
                .with_training_strategy(strategy.into())
                .launch(learner)
        }));
        STEPS.set(0);
        let panic = trained.err().expect("it is refused");
        let message = *panic.downcast::<String>().expect("a message");
        let names = message.contains("parameter 1 of the module is")
            && message.contains("second.weight")
            && message.contains("prepare the model again");
        assert!(names, "{stage}, {is_trained}: {message}");
    }
}
