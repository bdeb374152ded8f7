//! Through the unmodified Learner: metrics, an orderly stop when the loss scale collapses, and a
//! panic without an interrupter.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::Module;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn::train::metric::{Adaptor, LossInput, LossMetric};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{Interrupter, ItemLazy, Learner, SupervisedTraining};
use burn_amp::{
    AmpError, Autocast, F16, GradScaler, GradScalerConfig, LossScaleMetric, SkippedStepsMetric,
};
use burn_flex::Flex;
use burn_update::Update;

type B = Autocast<Autodiff<Flex>, F16>;

/// Learns a constant; an item of infinity overflows.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    linear: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let y = self.linear.forward(x.clone().clamp(-1.0, 1.0));
        MseLoss::new().forward(y, x.ones_like(), Reduction::Mean) * x.max_abs().reshape([1])
    }
}

pub struct Output(pub f32);

impl ItemLazy for Output {
    type ItemSync = Self;

    fn sync(self) -> Self {
        self
    }
}

impl Adaptor<LossInput<Flex>> for Output {
    fn adapt(&self) -> LossInput<Flex> {
        LossInput::new(Tensor::from_floats([self.0], &Default::default()))
    }
}

/// Steps of the Learner for a `Model` with a `loss`.
macro_rules! learner_steps {
    () => {
        impl<B: burn::tensor::backend::AutodiffBackend> burn::train::TrainStep for Model<B> {
            type Input = Tensor<B, 2>;
            type Output = Output;

            fn step(&self, x: Tensor<B, 2>) -> burn::train::TrainOutput<Output> {
                let loss = self.loss(x);
                let value = tests::compare::values(loss.clone())[0];
                burn::train::TrainOutput::new(self, loss.backward(), Output(value))
            }
        }

        impl<B: Backend> burn::train::InferenceStep for Model<B> {
            type Input = Tensor<B, 2>;
            type Output = Output;

            fn step(&self, x: Tensor<B, 2>) -> Output {
                Output(tests::compare::values(self.loss(x))[0])
            }
        }
    };
}
pub(super) use learner_steps;

learner_steps!();

#[derive(Clone)]
struct Rows;

impl<B: Backend> Batcher<B, f32, Tensor<B, 2>> for Rows {
    fn batch(&self, items: Vec<f32>, device: &B::Device) -> Tensor<B, 2> {
        let rows = items.len();
        Tensor::<B, 1>::from_floats(items.as_slice(), device).reshape([rows, 1])
    }
}

pub fn loader<B: Backend>(items: &[f32]) -> Arc<dyn DataLoader<B, Tensor<B, 2>>> {
    DataLoaderBuilder::new(Rows)
        .batch_size(1)
        .build(InMemDataset::new(items.to_vec()))
}

/// Trains one epoch on these items.
fn train(scaler: &GradScaler, items: &[f32], interrupter: Interrupter) -> std::path::PathBuf {
    let device = Default::default();
    let directory = std::env::temp_dir().join(format!(
        "burn-amp-learner-{}-{}",
        std::process::id(),
        items.len()
    ));
    let model = Model {
        linear: LinearConfig::new(1, 1).init::<B>(&device),
    };
    let update = Update::new(SgdConfig::new().init()).scale(scaler.clone());
    let learner = Learner::new(model, update.expect("no other scale"), ConstantLr::new(0.1));
    SupervisedTraining::new(&directory, loader(items), loader(&[1.0]))
        .metric_train_numeric(LossMetric::<Flex>::new())
        .metric_train_numeric(LossScaleMetric::new(scaler))
        .metric_train_numeric(SkippedStepsMetric::new(scaler))
        .with_interrupter(interrupter)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1)
        .launch(learner);
    directory
}

fn scaler() -> GradScaler {
    GradScaler::new(GradScalerConfig {
        init_scale: 4.0,
        growth_interval: 2,
        ..Default::default()
    })
    .expect("valid")
}

#[test]
fn the_metrics_show_scale_and_skipped_steps() {
    let _turn = super::turn();
    let scaler = scaler();
    let items = [1.0, 1.0, 1.0, 3e38, 1.0, 1.0];
    let directory = train(&scaler, &items, Interrupter::new());
    let log = |name| {
        let text = std::fs::read_to_string(directory.join("train/epoch-1").join(name));
        let text = text.expect("a log");
        let values = text
            .lines()
            .map(|line| line.split(',').next().map(str::to_owned));
        values
            .map(|value| value.unwrap_or_default())
            .collect::<Vec<_>>()
    };
    // The metric of a step is read before its optimizer step.
    assert_eq!(scaler.skipped_steps(), 1);
    assert_eq!(scaler.steps(), 6);
    assert_eq!(scaler.scale(), 8.0);
    assert_eq!(log("Loss_Scale.log").len(), 6);
    assert_eq!(log("Skipped_Steps.log").len(), 6);
    std::fs::remove_dir_all(directory).expect("cleaned up");
}

#[test]
fn a_collapsed_scale_stops_the_training_in_order() {
    let _turn = super::turn();
    let interrupter = Interrupter::new();
    let scaler = scaler().with_interrupter(interrupter.clone());
    let mut items = vec![1.0];
    items.resize(40, 3e38);
    let directory = train(&scaler, &items, interrupter.clone());
    let Some(AmpError::ScaleCollapsed {
        parameters, step, ..
    }) = scaler.error()
    else {
        panic!("{:?}", scaler.error());
    };
    assert_eq!(parameters, ["linear.weight", "linear.bias"]);
    assert!(scaler.steps() < 40, "stopped at step {step} of 40");
    let message = interrupter.get_message().expect("a message");
    assert!(
        message.contains("loss scale collapsed") && message.contains("linear.weight"),
        "{message}"
    );
    std::fs::remove_dir_all(directory).expect("cleaned up");
}
