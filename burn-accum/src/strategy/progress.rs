//! Micro-batches and updates in the progress that a renderer shows.

use std::error::Error;

use burn::train::{
    LearnerSummary,
    metric::MetricDefinition,
    renderer::{
        EvaluationName, EvaluationProgress, MetricState, MetricsRenderer,
        MetricsRendererEvaluation, MetricsRendererTraining, ProgressType, TrainingProgress,
    },
};

/// A renderer that shows micro-batches and updates of the epoch, under an
/// [`AccumulatingStrategy`](crate::AccumulatingStrategy), where Burn's shows one number named
/// "Iteration".
///
/// It changes the indicators that are shown in a terminal (`tui`) or by a renderer of your own.
/// Burn's `CliMetricsRenderer` prints only `iteration`, which counts updates, and the items.
///
/// ```
/// use burn::train::renderer::CliMetricsRenderer;
/// use burn_accum::AccumProgress;
///
/// let renderer = AccumProgress::new(CliMetricsRenderer::new()); // training.renderer(renderer)
/// # let _ = renderer;
/// ```
#[derive(Debug)]
pub struct AccumProgress<R> {
    inner: R,
    epoch: usize,
    micro_batches: usize,
}

impl<R> AccumProgress<R> {
    /// Wraps `inner`, for instance Burn's `TuiMetricsRendererWrapper`.
    pub fn new(inner: R) -> Self {
        Self {
            inner,
            epoch: 0,
            micro_batches: 0,
        }
    }

    /// The renderer that shows it.
    pub fn inner(&self) -> &R {
        &self.inner
    }

    /// Gives the renderer back.
    pub fn into_inner(self) -> R {
        self.inner
    }

    /// Each item of an epoch is a micro-batch.
    fn count(&mut self, epoch: usize) {
        if self.epoch != epoch {
            self.epoch = epoch;
            self.micro_batches = 0;
        }
        self.micro_batches += 1;
    }

    fn split(&self, indicator: ProgressType) -> Vec<ProgressType> {
        let value = |tag: &str, value| ProgressType::Value {
            tag: tag.to_owned(),
            value,
        };
        match indicator {
            ProgressType::Value {
                tag,
                value: updates,
            } if tag == "Iteration" => vec![
                value("Micro-batches", self.micro_batches),
                value("Updates", updates),
            ],
            other => vec![other],
        }
    }
}

impl<R: MetricsRenderer> MetricsRendererTraining for AccumProgress<R> {
    fn update_train(&mut self, state: MetricState) {
        self.inner.update_train(state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.inner.update_valid(state);
    }

    fn render_train(&mut self, item: TrainingProgress, indicators: Vec<ProgressType>) {
        self.count(item.global_progress.items_processed);
        let indicators = indicators
            .into_iter()
            .flat_map(|indicator| self.split(indicator));
        let indicators = indicators.collect();
        self.inner.render_train(item, indicators);
    }

    fn render_valid(&mut self, item: TrainingProgress, indicators: Vec<ProgressType>) {
        self.inner.render_valid(item, indicators);
    }

    fn on_train_end(&mut self, summary: Option<LearnerSummary>) -> Result<(), Box<dyn Error>> {
        self.inner.on_train_end(summary)
    }
}

impl<R: MetricsRenderer> MetricsRendererEvaluation for AccumProgress<R> {
    fn update_test(&mut self, name: EvaluationName, state: MetricState) {
        self.inner.update_test(name, state);
    }

    fn render_test(&mut self, item: EvaluationProgress, indicators: Vec<ProgressType>) {
        self.inner.render_test(item, indicators);
    }

    fn on_test_end(&mut self, summary: Option<LearnerSummary>) -> Result<(), Box<dyn Error>> {
        self.inner.on_test_end(summary)
    }
}

impl<R: MetricsRenderer> MetricsRenderer for AccumProgress<R> {
    fn manual_close(&mut self) {
        self.inner.manual_close();
    }

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.inner.register_metric(definition);
    }
}
