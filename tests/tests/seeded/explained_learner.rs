//! The first bad operation, in the unmodified Learner: it is in the log once.

use std::sync::Mutex;

use burn::backend::Autodiff;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep};
use burn_amp::{Autocast, F16, GradScaler, GradScalerConfig, Watch, explain_overflow};
use burn_flex::Flex;
use burn_update::Update;
use log::{LevelFilter, Log, Metadata, Record};

use super::learner::{Output, loader};

type B = Autocast<Autodiff<Watch<Flex>>, F16>;

/// The product of a large item overflows.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    linear: Linear<B>,
}

impl<B: AutodiffBackend> TrainStep for Model<B> {
    type Input = Tensor<B, 2>;
    type Output = Output;

    fn step(&self, x: Tensor<B, 2>) -> TrainOutput<Output> {
        explain_overflow(self, x, |model, x| {
            let loss = model.linear.forward(x).square().mean();
            TrainOutput::new(model, loss.backward(), Output(0.0))
        })
    }
}

impl<B: Backend> InferenceStep for Model<B> {
    type Input = Tensor<B, 2>;
    type Output = Output;

    fn step(&self, _: Tensor<B, 2>) -> Output {
        Output(0.0)
    }
}

/// What is said of repeated steps.
struct Lines(Mutex<Vec<String>>);

static LINES: Lines = Lines(Mutex::new(Vec::new()));

impl Log for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("burn_amp")
    }

    fn log(&self, record: &Record<'_>) {
        let text = record.args().to_string();
        if self.enabled(record.metadata()) && text.contains("run once more") {
            self.0.lock().expect("no panic").push(text);
        }
    }

    fn flush(&self) {}
}

#[test]
fn the_first_overflow_is_explained_once() {
    let _turn = super::turn();
    log::set_logger(&LINES).expect("no other logger");
    log::set_max_level(LevelFilter::Warn);

    let scaler = GradScaler::new(GradScalerConfig::fixed(1.0)).expect("valid");
    let device = Default::default();
    let model = Model {
        linear: Linear {
            weight: Param::from_data([[2.0]], &device),
            ..LinearConfig::new(1, 1).with_bias(false).init::<B>(&device)
        },
    };
    let update = Update::new(SgdConfig::new().init()).scale(scaler.clone());
    let learner = Learner::new(
        model,
        update.expect("no other scale"),
        ConstantLr::new(0.01),
    );
    let directory = std::env::temp_dir().join(format!("burn-explained-{}", std::process::id()));
    // 2 * 6e4 is beyond f16.
    let items = [1.0, 6e4, 1.0, 6e4, 1.0];
    SupervisedTraining::new(&directory, loader(&items), loader(&[1.0]))
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1)
        .launch(learner);

    assert_eq!(scaler.skipped_steps(), 2);
    let found = scaler.first_non_finite().expect("explained");
    assert_eq!((found.operation, found.backward), ("linear", false));
    assert_eq!(found.parameter.as_deref(), Some("linear.weight"));
    let lines = LINES.0.lock().expect("no panic").clone();
    let line = "a step with a loss or a gradient that is not finite, run once more";
    assert_eq!(lines, [format!("{line}: {found}")]);
}
