//! In Burn's own Learner, unmodified.

#[path = "../shared/loader.rs"]
mod data;

use burn::{
    lr_scheduler::constant::ConstantLr,
    module::{AutodiffModule, Module},
    optim::GradientsParams,
    tensor::backend::Backend,
    train::{InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep},
};
use burn_accum::{AccumConfig, ClipByNorm};
use burn_amp::{Autocast, F16, GradScaler};
use burn_flex::Flex;
use burn_update::Update;

use data::loader;

use crate::support::{Half, LR, Net, bits, net};

const ROWS: usize = 12;
const MICRO_BATCH: usize = 3;
const EPOCHS: usize = 3;

#[derive(Module, Debug)]
struct Model<B: Backend> {
    net: Net<B>,
}

impl TrainStep for Model<Half> {
    type Input = Vec<usize>;
    type Output = ();

    fn step(&self, rows: Vec<usize>) -> TrainOutput<()> {
        let loss = self.net.loss(rows[0], rows[0] + rows.len());
        TrainOutput::new(self, loss.backward(), ())
    }
}

type Valid = Autocast<Flex, F16>;

impl InferenceStep for Model<Valid> {
    type Input = Vec<usize>;
    type Output = ();

    fn step(&self, _: Vec<usize>) {}
}

/// `Learner::new(model, update, schedule)` trains as a loop of one's own.
#[test]
fn burns_learner_takes_an_update_for_its_optimizer() {
    let update = |scaler: GradScaler| {
        Update::new(
            burn::optim::AdamWConfig::new()
                .with_weight_decay(0.1)
                .init(),
        )
        .clip_norm(0.5)
        .unwrap()
        .accumulate(AccumConfig::mean(2))
        .unwrap()
        .scale(scaler)
        .unwrap()
    };
    let start = Model { net: net() };
    let directory = tempfile::tempdir().unwrap();
    let scaler = GradScaler::default();
    let training = SupervisedTraining::new(
        directory.path(),
        loader::<Half>(ROWS, MICRO_BATCH),
        loader::<Valid>(ROWS, MICRO_BATCH),
    )
    .num_epochs(EPOCHS)
    .with_application_logger(None);
    let schedule = ConstantLr::from(LR);
    let result = training.launch(Learner::new(
        start.clone(),
        update(scaler.clone()),
        schedule,
    ));

    let own_scaler = GradScaler::default();
    let mut own: Update<Model<Half>, Half> = update(own_scaler.clone());
    let mut model = start;
    for _ in 0..EPOCHS {
        for from in (0..ROWS).step_by(MICRO_BATCH) {
            let loss = model.net.loss(from, from + MICRO_BATCH);
            let gradients: GradientsParams = own.backward(&model, loss);
            model = own.step(LR, model, gradients).unwrap();
        }
    }
    // The first of twelve micro-batches overflows at the initial scale, and the last one waits.
    assert_eq!(own.updates(), 5);
    assert_eq!((scaler.steps(), scaler.skipped_steps()), (12, 1));
    assert_eq!((own_scaler.steps(), own_scaler.skipped_steps()), (12, 1));
    assert_eq!(bits(&result.model.net), bits(&model.valid().net));
}
