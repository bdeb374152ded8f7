//! In Burn's own Learner, unmodified: one device, several devices with their worker threads, Burn's
//! own accumulation.

#[path = "../../../burn-update/tests/shared/loader.rs"]
mod data;

use burn::{
    lr_scheduler::constant::ConstantLr,
    module::{AutodiffModule, Module},
    optim::{Optimizer, SgdConfig},
    tensor::backend::Backend,
    train::{
        ExecutionStrategy, InferenceStep, Learner, MultiDeviceOptim, SupervisedTraining,
        TrainOutput, TrainStep, TrainingStrategy,
    },
};
use burn_accum::{AccumConfig, Accumulation, CountSlot, Counted, UpdatesMetric};
use burn_flex::{Flex, FlexDevice};
use burn_update::Update;

use data::loader;

use crate::support::{B, Batch, Net, assert_close, net};

/// Rows of the data set, and rows a micro-batch: 4, 4, 2.
const ROWS: usize = 10;
const MICRO_BATCH: usize = 4;

#[derive(Module, Debug)]
struct Model<B: Backend> {
    net: Net<B>,
    count: CountSlot<B>,
}

impl TrainStep for Model<B> {
    type Input = Vec<usize>;
    type Output = ();

    fn step(&self, rows: Vec<usize>) -> TrainOutput<()> {
        let batch = Batch::rows(rows[0], rows[0] + rows.len());
        let loss = self.net.loss(&batch);
        Counted::mean(loss, rows.len()).output(self, ())
    }
}

impl InferenceStep for Model<Flex> {
    type Input = Vec<usize>;
    type Output = ();

    fn step(&self, _: Vec<usize>) {}
}

const EPOCHS: usize = 3;
const RATE: f64 = 0.1;

/// Trains, and tells the model and the number of updates.
fn train(
    start: &Model<B>,
    name: &str,
    steps: usize,
    burns_accumulation: Option<usize>,
    devices: Option<MultiDeviceOptim>,
) -> (Net<Flex>, u64) {
    let directory = std::env::temp_dir().join(format!("burn-accum-{}-{name}", std::process::id()));
    let sgd = SgdConfig::new().init::<B, Model<B>>();
    let windows = Accumulation::new(AccumConfig::tokens(steps)).unwrap();
    let counter = windows.updates();
    let optimizer = Update::new(sgd).accumulate(windows).unwrap();
    let scheduler = optimizer.per_update(ConstantLr::from(RATE));

    let mut training = SupervisedTraining::new(
        &directory,
        loader::<B>(ROWS, MICRO_BATCH),
        loader::<Flex>(ROWS, MICRO_BATCH),
    )
    .num_epochs(EPOCHS)
    .with_application_logger(None)
    .metric_train_numeric(UpdatesMetric::new(&counter));
    if let Some(accumulation) = burns_accumulation {
        training = training.grads_accumulation(accumulation);
    }
    if let Some(optim) = devices {
        let devices = vec![FlexDevice, FlexDevice];
        let strategy = ExecutionStrategy::multi(devices, optim);
        training = training.with_training_strategy(TrainingStrategy::Default(strategy));
    }
    let result = training.launch(Learner::new(start.clone(), optimizer, scheduler));
    std::fs::remove_dir_all(directory).unwrap();
    (result.model.net, counter.updates())
}

/// However the ten rows are cut up and wherever they are added up, each epoch is one update of
/// their mean.
#[test]
fn an_epoch_in_micro_batches_is_one_batch() {
    let start = Model {
        net: net(),
        count: CountSlot::new(&Default::default()),
    };
    let mut expected = start.net.clone();
    let mut sgd = SgdConfig::new().init();
    for _ in 0..EPOCHS {
        let gradients = expected.mean_gradients(&Batch::rows(0, ROWS));
        expected = sgd.step(RATE, expected, gradients);
    }

    let main = Some(MultiDeviceOptim::OptimMainDevice);
    let sharded = Some(MultiDeviceOptim::OptimSharded);
    for (name, steps, burns_accumulation, devices) in [
        ("single", 3, None, None),
        ("single-burn", 1, Some(3), None),
        ("main", 2, None, main),
        ("main-burn", 1, Some(2), main),
        ("sharded", 2, None, sharded),
        ("sharded-burn", 1, Some(2), sharded),
    ] {
        let (trained, updates) = train(&start, name, steps, burns_accumulation, devices);
        assert_eq!(updates, EPOCHS as u64, "{name}");
        assert_close(&trained, &expected.valid(), 1e-5);
    }
}
