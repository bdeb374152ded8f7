//! Progress where stdout is not a terminal: a line every ten seconds, and one for each epoch.

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
    micro_batch: usize,
    accum: usize,
    /// Micro-batches in an iteration of the strategy: with several ranks one, else as many as an update has.
    iteration: usize,
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
    /// Lines about a training with this plan, whose updates are `accum` micro-batches of `micro_batch` sequences on each of
    /// `ranks` ranks.
    pub fn new(plan: Plan, micro_batch: usize, accum: usize, ranks: usize) -> Self {
        Self {
            plan,
            micro_batch: micro_batch * ranks,
            accum,
            iteration: if ranks == 1 { accum } else { 1 },
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

    /// How far the training is: updates, and micro-batches where an update is several.
    fn head(&self, item: &TrainingProgress) -> String {
        let done = self
            .plan
            .steps_of(item.global_progress.items_processed)
            .start;
        let steps = self.plan.steps();
        let updates = done + item.iteration.unwrap_or(0) * self.iteration / self.accum;
        let head = format!("update {updates}/{steps}");
        if self.accum == 1 {
            return head;
        }
        let sequences = item
            .progress
            .as_ref()
            .map_or(0, |items| items.items_processed);
        let micro_batches = done * self.accum + sequences / self.micro_batch;
        format!("{head}  micro-batch {micro_batches}/{}", steps * self.accum)
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
        let metrics = self.train.line(of_batch);
        let head = self.head(&item);
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
    fn updates_and_micro_batches_are_counted_from_the_start() {
        let head = |accum, ranks, iteration| {
            Lines::new(Plan::new(12, 4), 2, accum, ranks).head(&TrainingProgress {
                progress: Some(Progress::new(14 * ranks, 32 * ranks)),
                global_progress: Progress::new(2, 3),
                iteration: Some(iteration),
            })
        };
        assert_eq!(head(1, 1, 1), "update 5/12");
        assert_eq!(head(4, 1, 1), "update 5/12  micro-batch 23/48");
        assert_eq!(head(4, 3, 7), "update 5/12  micro-batch 23/48");
    }

    #[test]
    fn burns_format_is_taken_apart() {
        assert_eq!(of_epoch("epoch 2.31 - batch 2.50"), "2.31");
        assert_eq!(of_batch("epoch 2.31 - batch 2.50"), "2.50");
        assert_eq!(of_epoch("17"), "17");
        assert_eq!(of_batch("17"), "17");
    }
}
