//! A disk that is slower than the deadline ends nothing.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::record::{
    FileRecorder, FullPrecisionSettings, PrettyJsonFileRecorder, Recorder, RecorderError,
};
use burn::tensor::{Device, backend::Backend};
use burn::train::{Learner, SupervisedTraining};
use burn_zero::{GroupOptions, ProcessGroup, Stage, ThreadGroup, ZeroStrategy};
use serde::{Serialize, de::DeserializeOwned};
use tempfile::tempdir;

use crate::learner::MICRO_BATCH;
use crate::model::{Model, Row, bits, rows};
use crate::watch::Watch;
use crate::{Z, adamw};

/// Shorter than a file takes, and longer than anything else on a loaded machine.
const DEADLINE: Duration = Duration::from_secs(3);
const FILE: Duration = Duration::from_secs(5);

/// Takes its time over each file.
#[derive(Clone, Debug, Default)]
struct Slow(PrettyJsonFileRecorder<FullPrecisionSettings>);

impl<B: Backend> Recorder<B> for Slow {
    type Settings = FullPrecisionSettings;
    type RecordArgs = PathBuf;
    type RecordOutput = ();
    type LoadArgs = PathBuf;

    fn save_item<I: Serialize>(&self, item: I, file: PathBuf) -> Result<(), RecorderError> {
        thread::sleep(FILE);
        Recorder::<B>::save_item(&self.0, item, file)
    }

    fn load_item<I: DeserializeOwned>(&self, file: &mut PathBuf) -> Result<I, RecorderError> {
        Recorder::<B>::load_item(&self.0, file)
    }
}

impl<B: Backend> FileRecorder<B> for Slow {
    fn file_extension() -> &'static str {
        "json"
    }
}

pub struct AsTheyAre;

impl<B: Backend> Batcher<B, Row, Vec<Row>> for AsTheyAre {
    fn batch(&self, rows: Vec<Row>, _: &Device<B>) -> Vec<Row> {
        rows
    }
}

pub fn loader<B: Backend>(rows: Vec<Row>, batch_size: usize) -> Arc<dyn DataLoader<B, Vec<Row>>> {
    let builder = DataLoaderBuilder::new(AsTheyAre).batch_size(batch_size);
    builder.build(InMemDataset::new(rows))
}

/// Burn's checkpointer takes the second record when it has written the first: rank 0 waits in the middle of the others' call.
#[test]
fn the_others_wait_for_rank_0_however_long_a_record_takes() {
    let _turn = crate::turn();
    let model = Model::<Z>::new();
    let options = GroupOptions::with_deadline(DEADLINE);
    let start = Instant::now();
    let trained = ThreadGroup::spawn(3, options, |group| {
        let directory = tempdir().unwrap();
        let (rank, watch) = (group.rank(), Watch::default());
        let training = SupervisedTraining::new(
            directory.path(),
            loader(rows(0, 24), MICRO_BATCH),
            loader(rows(1000, 1006), MICRO_BATCH),
        );
        let result = training
            .num_epochs(2)
            .with_application_logger(None)
            .renderer(watch.renderer())
            .with_metric_logger(watch.logger())
            .with_file_checkpointer(Slow::default())
            .with_training_strategy(ZeroStrategy::process(Arc::new(group)).into())
            .launch(Learner::new(
                model.clone(),
                adamw::<Z>(Stage::Gradients),
                ConstantLr::new(0.1),
            ));
        let recorded = directory.path().join("checkpoint/optim-2.json").exists();
        assert_eq!(recorded, rank == 0);
        bits(&result.model)
    })
    .unwrap();
    assert!(trained.iter().all(|model| *model == trained[0]));
    assert!(
        start.elapsed() > 2 * FILE,
        "the second record waited for the first"
    );
}
