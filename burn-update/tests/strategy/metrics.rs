//! The usual metrics, in all that Burn shows.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;

use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, backend::Backend};
use burn::train::logger::MetricLogger;
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{MetricDefinition, NumericEntry};
use burn::train::{Learner, SupervisedTraining};
use burn_accum::{AccumConfig, ClipByNorm};
use burn_amp::GradScalerConfig;
use burn_flex::Flex;
use burn_update::Update;

use crate::falling;
use crate::learner::B;
use crate::model::{Model, Row, rows};
use crate::watch::Watch;

/// Loads each batch so slowly.
struct Slow(Duration);

impl<B: Backend> Batcher<B, Row, Vec<Row>> for Slow {
    fn batch(&self, rows: Vec<Row>, _: &Device<B>) -> Vec<Row> {
        sleep(self.0);
        rows
    }
}

fn loader<B: Backend>(loading: Duration) -> Arc<dyn DataLoader<B, Vec<Row>>> {
    let builder = DataLoaderBuilder::new(Slow(loading)).batch_size(4);
    builder.build(InMemDataset::new(rows(0, 22)))
}

/// The values of training by metric, in the order of steps.
#[derive(Clone, Default)]
struct Values(Arc<Mutex<HashMap<String, Vec<f64>>>>);

impl Values {
    fn of(&self, name: &str) -> Vec<f64> {
        self.0
            .lock()
            .unwrap()
            .get(name)
            .cloned()
            .unwrap_or_default()
    }
}

/// Collects them: an id is not the name.
struct Collecting {
    values: Values,
    names: HashMap<String, String>,
}

impl MetricLogger for Collecting {
    fn log(&mut self, update: MetricsUpdate, _: usize, split: &Split) {
        for numeric in update.entries_numeric {
            if let (NumericEntry::Value(value), Split::Train) = (numeric.numeric_entry, split) {
                let id = format!("{:?}", numeric.entry.metric_id);
                let name = self.names[&id].clone();
                let mut values = self.values.0.lock().unwrap();
                values.entry(name).or_default().push(value);
            }
        }
    }

    fn read_numeric(&mut self, _: &str, _: usize, _: &Split) -> Result<Vec<NumericEntry>, String> {
        Ok(Vec::new())
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        let id = format!("{:?}", definition.metric_id);
        self.names.insert(id, definition.name);
    }

    fn log_epoch_summary(&mut self, _: EpochSummary) {}
}

/// A training of two epochs of six micro-batches, in windows of two.
fn watched(loading: Duration) -> Values {
    let update = Update::new(AdamWConfig::new().init())
        .clip_norm(1.0)
        .unwrap()
        .accumulate(AccumConfig::mean(2))
        .unwrap()
        .scale(GradScalerConfig::default())
        .unwrap();
    let strategy = update.strategy().with_bytes_in_use(|| 3 << 20);
    let directory = tempfile::tempdir().unwrap();
    let values = Values::default();
    let logger = Collecting {
        values: values.clone(),
        names: HashMap::new(),
    };
    SupervisedTraining::new(
        directory.path(),
        loader::<B>(loading),
        loader::<Flex>(loading),
    )
    .num_epochs(2)
    .with_application_logger(None)
    .renderer(Watch::default().renderer())
    .with_metric_logger(logger)
    .metrics(strategy.metrics())
    .with_training_strategy(strategy.into())
    .launch(Learner::new(Model::new(), update, falling()));
    values
}

#[test]
fn they_are_logged_without_a_handle() {
    let _turn = crate::turn();
    let logged = watched(Duration::ZERO);
    for name in ["Step Time", "Items per Second", "Waiting for Data"] {
        let values = logged.of(name);
        assert_eq!(values.len(), 12, "{name}");
        assert!(
            values.iter().all(|value| *value >= 0.0),
            "{name} {values:?}"
        );
    }
    assert!(
        logged
            .of("Waiting for Data")
            .iter()
            .all(|share| *share <= 100.0)
    );
    // After each step, or the one after it: metrics are computed while training goes on.
    let updates = logged.of("Updates");
    assert_eq!(updates.len(), 12);
    assert!(updates.is_sorted(), "{updates:?}");
    assert!((5.0..=6.0).contains(&updates[11]), "{updates:?}");
    // None before the first update.
    let norms = logged.of("Gradient Norm");
    assert!((9..=12).contains(&norms.len()), "{norms:?}");
    assert!(norms.iter().all(|norm| *norm > 0.0), "{norms:?}");
    assert_eq!(logged.of("Memory in Use"), [3.0; 12]);
    assert_eq!(logged.of("Loss Scale"), [65_536.0; 12]);
    assert_eq!(logged.of("Skipped Steps"), [0.0; 12]);
}

/// A step waits 60 ms for its four rows, and computes for less.
#[test]
fn a_slow_loader_is_seen() {
    let _turn = crate::turn();
    let loading = Duration::from_millis(60);
    let logged = watched(loading);
    let waiting = logged.of("Waiting for Data");
    let mean = waiting.iter().sum::<f64>() / waiting.len() as f64;
    assert!(mean > 50.0, "{waiting:?}");
    let times = logged.of("Step Time");
    assert!(times.iter().all(|time| *time >= 60.0), "{times:?}");
    let speeds = logged.of("Items per Second");
    // Of four rows, or of the two that are left.
    assert!(
        speeds.iter().all(|speed| *speed > 0.0 && *speed <= 67.0),
        "{speeds:?}"
    );
}
