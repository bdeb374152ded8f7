//! A Learner trains a model of many small parameters, which is large by value.

#[path = "../support/wide.rs"]
mod model;

use burn::lr_scheduler::constant::ConstantLr;
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{
    InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_update::Update;
use burn_zero::{ReduceOverRanks, SilentRenderer, ZeroSettings};

use crate::Z;
use crate::loader::loader;
use crate::model::{Row, rows};
use model::{WIDTH, Wide};

fn output<B: Backend>(model: &Wide<B>, rows: &[Row]) -> RegressionOutput<B> {
    let device = Default::default();
    let loss = model.loss(Tensor::ones([rows.len(), 2, WIDTH], &device));
    let none = Tensor::zeros([1, 1], &device);
    RegressionOutput::new(loss, none.clone(), none)
}

impl<B: AutodiffBackend> TrainStep for Wide<B> {
    type Input = Vec<Row>;
    type Output = RegressionOutput<B>;

    fn step(&self, rows: Vec<Row>) -> TrainOutput<Self::Output> {
        let output = output(self, &rows);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Wide<B> {
    type Input = Vec<Row>;
    type Output = RegressionOutput<B>;

    fn step(&self, rows: Vec<Row>) -> Self::Output {
        output(self, &rows)
    }
}

#[test]
fn a_learner_trains_a_model_of_57_kib_by_value() {
    let _turn = crate::turn();
    for stage in crate::STAGES {
        let model = Wide::<Z>::new(&Default::default());
        let before = model.a0.weight.val().into_data();
        let update = Update::new(AdamWConfig::new().init());
        let update = update.reduce_in_learner(ZeroSettings::stage(stage));
        let update: Update<Wide<Z>, Z> = update.unwrap();
        let strategy = update.strategy().threads(2);
        let directory = tempfile::tempdir().unwrap();
        let train = loader::<Z>(rows(0, 8), 2);
        let valid = loader(rows(8, 10), 2);
        let trained = SupervisedTraining::new(directory.path(), train, valid)
            .with_application_logger(None)
            .renderer(SilentRenderer)
            .with_training_strategy(strategy.into())
            .launch(Learner::new(model, update, ConstantLr::new(0.05)));
        assert_ne!(trained.model.a0.weight.val().into_data(), before, "{stage}");
    }
}
