//! The average of the weights in the Learner.

use burn::module::AutodiffModule;
use burn::optim::{AdamWConfig, Optimizer};
use burn::record::{FullPrecisionSettings, PrettyJsonFileRecorder, Recorder};
use burn_update::{AverageConfig, Update, UpdateRecord};

use crate::learner::{B, Setup, train, turn};
use crate::model::{Model, bits, rows};
use crate::{Trained, falling};

fn averaging() -> Trained {
    let update = Update::new(AdamWConfig::new().init());
    update.average(AverageConfig::new(0.9)).unwrap()
}

/// Its validation is that of the averages, which the record has; the trained model is another.
#[test]
fn it_is_what_the_learner_validates_with() {
    let _turn = turn();
    let update = averaging();
    let strategy = Some(update.strategy().into());
    let setup = Setup::new(rows(0, 20), 2);
    let valid = setup.valid.clone();
    let outcome = train(Model::<B>::new(), update, falling(), setup, strategy);

    let record = outcome.directory.path().join("checkpoint/optim-2");
    let recorder = PrettyJsonFileRecorder::<FullPrecisionSettings>::new();
    let record: UpdateRecord<B> = recorder.load(record, &Default::default()).unwrap();
    let trained = Model::<B>::from_inner(outcome.model.clone());
    let update: Trained = Optimizer::load_record(averaging(), record);
    let averaged = update.averaged(&trained).unwrap();
    assert_ne!(bits(&averaged), bits(&outcome.model));

    // The last batch of the last validation: two rows of six.
    let loss = |model: &Model<burn_flex::Flex>| {
        let sum = model
            .loss_sum(&valid[4..])
            .into_data()
            .iter::<f32>()
            .sum::<f32>();
        f64::from(sum / 2.0)
    };
    let logged = outcome.watch.logged("valid 2 ");
    let has = |loss: f64| {
        let value = format!("aggregated_value: {loss:?}, count: 1");
        logged.iter().any(|line| line.contains(&value))
    };
    assert!(
        has(loss(&averaged)) && !has(loss(&trained.valid())),
        "{logged:?}"
    );
}
