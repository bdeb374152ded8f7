//! A renderer for processes that are not rank 0.

use burn::train::metric::MetricDefinition;
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};

/// Shows nothing. Burn makes its own renderer, which takes over the terminal, before it calls a
/// strategy: so set this one in processes other than rank 0.
///
/// ```no_run
/// # use burn::train::{LearningComponentsTypes, SupervisedTraining};
/// # use burn_update::SilentRenderer;
/// # fn quiet<LC: LearningComponentsTypes + Send + 'static>(mut training: SupervisedTraining<LC>, rank: usize) -> SupervisedTraining<LC> {
/// if rank != 0 {
///     training = training.renderer(SilentRenderer).with_application_logger(None);
/// }
/// # training
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct SilentRenderer;

impl MetricsRendererTraining for SilentRenderer {
    fn update_train(&mut self, _: MetricState) {}
    fn update_valid(&mut self, _: MetricState) {}
    fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
    fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
}

impl MetricsRendererEvaluation for SilentRenderer {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for SilentRenderer {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}
