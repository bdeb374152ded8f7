//! Progress where stdout is not a terminal: a line now and then, and one for each epoch.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use burn::data::dataloader::Progress;
use burn::train::metric::{MetricDefinition, MetricId};
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};

use super::plan::Plan;

/// Time between two lines within an epoch.
const PAUSE: Duration = Duration::from_secs(10);

/// Prints lines to stdout.
pub struct Lines {
    plan: Plan,
    accum: usize,
    names: HashMap<MetricId, String>,
    train: Metrics,
    valid: Metrics,
    started: Instant,
    printed: Instant,
}

/// The last formatted value of each metric, by name; Burn formats them as `epoch <mean> - batch <value>`.
#[derive(Default)]
struct Metrics(Vec<(String, String)>);

impl Lines {
    /// Lines about a training with this plan, whose steps are so many micro-batches each.
    pub fn new(plan: Plan, accum: usize) -> Self {
        Self {
            plan,
            accum,
            names: HashMap::new(),
            train: Metrics::default(),
            valid: Metrics::default(),
            started: Instant::now(),
            printed: Instant::now(),
        }
    }

    fn name(&self, id: &MetricId) -> String {
        self.names.get(id).cloned().unwrap_or_default()
    }

    /// Steps that are done, and micro-batches of the next.
    fn head(&self, steps: usize, micro_batches: usize) -> String {
        let head = format!("step {steps}/{}", self.plan.steps());
        match self.accum {
            1 => head,
            accum => format!("{head} (+{micro_batches}/{accum})"),
        }
    }

    fn print(&mut self, head: &str, metrics: &str) {
        let seconds = self.started.elapsed().as_secs();
        println!("{:3}:{:02}  {head}  {metrics}", seconds / 60, seconds % 60);
        self.printed = Instant::now();
    }
}

impl Metrics {
    fn set(&mut self, name: String, state: MetricState) {
        let (MetricState::Generic(entry) | MetricState::Numeric(entry, _)) = state;
        let text = entry.serialized_entry.formatted;
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some((_, old)) => *old = text,
            None => self.0.push((name, text)),
        }
    }

    /// The metrics in one line, each with the value that `pick` takes of its text.
    fn line(&self, pick: fn(&str) -> &str) -> String {
        let metric =
            |(name, text): &(String, String)| format!("{} {}", name.to_lowercase(), pick(text));
        self.0.iter().map(metric).collect::<Vec<_>>().join("  ")
    }
}

fn of_epoch(text: &str) -> &str {
    let epoch = text.split(" - batch ").next().unwrap_or(text);
    epoch.strip_prefix("epoch ").unwrap_or(epoch)
}

fn of_batch(text: &str) -> &str {
    text.split(" - batch ").last().unwrap_or(text)
}

fn is_last(progress: Option<&Progress>) -> bool {
    progress.is_some_and(|progress| progress.items_processed == progress.items_total)
}

impl MetricsRendererTraining for Lines {
    fn update_train(&mut self, state: MetricState) {
        let (MetricState::Generic(entry) | MetricState::Numeric(entry, _)) = &state;
        let name = self.name(&entry.metric_id);
        self.train.set(name, state);
    }

    fn update_valid(&mut self, state: MetricState) {
        let (MetricState::Generic(entry) | MetricState::Numeric(entry, _)) = &state;
        let name = self.name(&entry.metric_id);
        self.valid.set(name, state);
    }

    fn render_train(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        if self.printed.elapsed() < PAUSE {
            return;
        }
        let done = self
            .plan
            .steps_of(item.global_progress.items_processed)
            .start;
        let micro_batches = item.iteration.unwrap_or(0);
        let metrics = self.train.line(of_batch);
        let head = self.head(
            done + micro_batches / self.accum,
            micro_batches % self.accum,
        );
        self.print(&head, &metrics);
    }

    fn render_valid(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        if !is_last(item.progress.as_ref()) {
            return;
        }
        let Progress {
            items_processed: epoch,
            items_total: epochs,
        } = item.global_progress;
        let head = format!("epoch {epoch}/{epochs}");
        let (train, valid) = (self.train.line(of_epoch), self.valid.line(of_epoch));
        self.print(&head, &format!("training: {train}  validation: {valid}"));
    }
}

impl MetricsRendererEvaluation for Lines {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}

    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Lines {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_a_window() {
        let lines = |accum| Lines::new(Plan::new(12, 4), accum);
        assert_eq!(lines(1).head(5, 0), "step 5/12");
        assert_eq!(lines(4).head(5, 3), "step 5/12 (+3/4)");
    }

    #[test]
    fn burns_format_is_taken_apart() {
        assert_eq!(of_epoch("epoch 2.31 - batch 2.50"), "2.31");
        assert_eq!(of_batch("epoch 2.31 - batch 2.50"), "2.50");
        assert_eq!(of_epoch("17"), "17");
        assert_eq!(of_batch("17"), "17");
    }
}
