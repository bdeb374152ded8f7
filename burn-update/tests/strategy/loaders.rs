//! Within an epoch it is resumed exactly with the loaders that give the same batches again, and with
//! a schedule that follows updates.

use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder};
use burn::tensor::{Device, backend::Backend};
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::{Learner, SupervisedTraining};
use burn_flex::Flex;
use burn_update::{DistributedSampler, SampledLoader};

use crate::learner::B;
use crate::model::{Model, Row, bits, rows};
use crate::watch::Watch;
use crate::{falling, windows};

#[derive(Clone)]
struct Rows;

impl<I: Backend> Batcher<I, Row, Vec<Row>> for Rows {
    fn batch(&self, rows: Vec<Row>, _: &Device<I>) -> Vec<Row> {
        rows
    }
}

/// 22 rows, six batches.
fn data() -> InMemDataset<Row> {
    InMemDataset::new(rows(0, 22))
}

/// Burn's loader with a worker, which shuffles.
fn with_a_worker() -> Arc<dyn DataLoader<B, Vec<Row>>> {
    let builder = DataLoaderBuilder::new(Rows).batch_size(4);
    builder.shuffle(3).num_workers(1).build(data())
}

/// Trains for ten updates of two micro-batches, with a record after every four. Returns the bits of
/// the model, and the number of items that were shown.
fn run(is_sampled: bool, directory: &Path, resume: Option<usize>) -> (Vec<Vec<u32>>, usize) {
    let update = windows(2);
    let mut strategy = update.strategy().until_updates(10);
    if is_sampled {
        let sampler = DistributedSampler::shuffled(5);
        strategy =
            strategy.with_train_loader(SampledLoader::<B, _, _>::new(sampler, data(), |items| {
                DataLoaderBuilder::new(Rows).batch_size(4).build(items)
            }));
    }
    let strategy = strategy.validate_every(4).unwrap();
    let schedule = update.per_update(falling());
    let watch = Watch::default();
    let valid = DataLoaderBuilder::<Flex, _, _>::new(Rows).build(data());
    let recorder = NamedMpkFileRecorder::<FullPrecisionSettings>::new();
    let mut training = SupervisedTraining::new(directory, with_a_worker(), valid)
        .with_application_logger(None)
        .renderer(watch.renderer())
        .with_metric_logger(watch.logger())
        .with_file_checkpointer(recorder)
        .with_checkpointing_strategy(KeepLastNCheckpoints::new(9));
    if let Some(record) = resume {
        training = training.checkpoint(record);
    }
    let start = match resume {
        None => Model::new(),
        Some(_) => Model::lazy(0.0, &Default::default()),
    };
    let trained = training
        .with_training_strategy(strategy.into())
        .launch(Learner::new(start, update, schedule));
    (bits(&trained.model), watch.shown("item train: ").len())
}

#[test]
fn a_worker_and_a_sampled_loader_go_on_with_the_next_batch() {
    let _turn = crate::turn();
    let orders = [false, true].map(|is_sampled| {
        let directory = tempfile::tempdir().unwrap();
        let (whole, items) = run(is_sampled, directory.path(), None);
        assert_eq!(items, 20);
        for record in [1, 2] {
            let (resumed, items) = run(is_sampled, directory.path(), Some(record));
            assert_eq!(resumed, whole, "sampled: {is_sampled}, record {record}");
            assert_eq!(items, 20 - 8 * record);
        }
        whole
    });
    // They are other orders.
    assert_ne!(orders[0], orders[1]);
}
