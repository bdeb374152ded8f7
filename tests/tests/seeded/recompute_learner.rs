//! Recomputation in the unmodified Learner: what its metrics show.

use std::sync::{Arc, Mutex};

use burn::backend::Autodiff;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn::train::metric::{LossMetric, MetricDefinition};
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use burn::train::{Learner, SupervisedTraining, TrainStep};
use burn_checkpoint::{HoldersMetric, Remat, RematMetric, RematStats, checkpoint};
use burn_flex::Flex;

use super::learner::{Output, learner_steps, loader};

type B = Autodiff<Remat<Flex>>;

const ITEMS: [f32; 6] = [1.0, 0.5, 0.25, 1.0, 0.5, 0.25];

/// Its forward pass is a scope.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    linear: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn new() -> Self {
        Self {
            linear: LinearConfig::new(1, 1).init(&Default::default()),
        }
    }

    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        checkpoint(|| self.linear.forward(x).tanh().exp()).mean()
    }
}

learner_steps!();

/// Keeps what is shown of the holders.
#[derive(Clone, Default)]
struct Shown(Arc<Mutex<Vec<String>>>);

impl MetricsRendererTraining for Shown {
    fn update_train(&mut self, state: MetricState) {
        let (MetricState::Generic(entry) | MetricState::Numeric(entry, _)) = state;
        let text = entry.serialized_entry.formatted;
        if text.contains("float_") {
            self.0.lock().unwrap().push(text);
        }
    }

    fn update_valid(&mut self, _: MetricState) {}
    fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
    fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
}

impl MetricsRendererEvaluation for Shown {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Shown {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}

#[test]
fn the_metrics_show_what_came_back() {
    let _turn = super::turn();
    let device = Default::default();
    RematStats::reset_thread();
    let x = Tensor::<B, 2>::ones([1, 1], &device);
    drop(TrainStep::step(&Model::<B>::new(), x));
    let of_a_step = RematStats::of_thread().replayed_operations;
    assert!(of_a_step > 0);

    let directory = std::env::temp_dir().join(format!("burn-remat-{}", std::process::id()));
    let learner = Learner::new(
        Model::<B>::new(),
        SgdConfig::new().init(),
        ConstantLr::new(0.1),
    );
    let shown = Shown::default();
    SupervisedTraining::new(&directory, loader(&ITEMS), loader(&[1.0]))
        .metric_train_numeric(LossMetric::<Flex>::new())
        .metric_train_numeric(RematMetric::replayed_operations())
        .metric_train_numeric(RematMetric::peak_bytes())
        .metric_train_numeric(HoldersMetric::new())
        .with_application_logger(None)
        .renderer(shown.clone())
        .num_epochs(1)
        .launch(learner);
    let log = |name| -> Vec<f64> {
        let text = std::fs::read_to_string(directory.join("train/epoch-1").join(name));
        let text = text.expect("a log");
        let value = |line: &str| line.split(',').next()?.parse().ok();
        text.lines().map(|line| value(line).expect(line)).collect()
    };
    let replayed = log("Replayed_Operations.log");
    assert_eq!(replayed.len(), ITEMS.len());
    for (step, replayed) in (1..).zip(&replayed) {
        // Another thread reads the metrics, so they may be those of a later step.
        assert!(
            (step * of_a_step..=6 * of_a_step).contains(&(*replayed as u64)),
            "step {step}: {replayed}, {of_a_step} each"
        );
    }
    assert_eq!(replayed[5] as u64, 6 * of_a_step);
    assert!(log("Activation_Peak.log").iter().all(|mib| *mib > 0.0));
    assert!(log("Largest_Holders.log").iter().all(|mib| *mib > 0.0));
    // The peak, and the three largest holders then. The first read has the whole first step in it.
    // Later reads come whenever the metrics thread runs, also within a step.
    let shown = shown.0.lock().unwrap();
    let first = shown.first().expect("shown after each batch");
    let (peak, holders) = first.split_once(": ").expect(first);
    assert!(peak.ends_with(" B"), "{first}");
    assert_eq!(holders.split(", ").count(), 3, "{first}");
    std::fs::remove_dir_all(directory).expect("cleaned up");
}
