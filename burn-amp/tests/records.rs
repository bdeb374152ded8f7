//! Checkpoints: the scaler's state travels with the optimizer's.

mod support;

use std::path::PathBuf;

use burn::{
    optim::{AdamConfig, AdamWConfig, Optimizer, SgdConfig},
    record::{
        BinBytesRecorder, BinFileRecorder, BinGzFileRecorder, FullPrecisionSettings,
        NamedMpkBytesRecorder, NamedMpkFileRecorder, NamedMpkGzFileRecorder,
        PrettyJsonFileRecorder, Recorder,
    },
};
use burn_amp::{GradScaler, GradScalerConfig};
use burn_update::{Update, UpdateRecord};
use support::{B, Net, gradients, json, net, scaled, state, values};

type Full = FullPrecisionSettings;

fn new_scaler() -> GradScaler {
    let config = GradScalerConfig {
        growth_interval: 4,
        hysteresis: 3,
        ..Default::default()
    };
    GradScaler::new(&config).unwrap()
}

fn step(update: &mut Update<Net<B>, B>, net: Net<B>, number: usize) -> Net<B> {
    let overflowing: &[usize] = if number % 3 == 2 { &[4] } else { &[] };
    let gradients = gradients(&net, number, overflowing);
    update.step(0.05, net, gradients).unwrap()
}

/// Six steps, a round trip of the record, six more: the same as twelve.
fn resumes_exactly<O, F>(optimizer: O, round_trip: F)
where
    O: Optimizer<Net<B>, B> + 'static,
    F: Fn(UpdateRecord<B>) -> UpdateRecord<B>,
{
    let scaler = new_scaler();
    let mut update_a = scaled(&scaler, optimizer.clone());
    let mut net_a = net();
    for number in 0..6 {
        net_a = step(&mut update_a, net_a, number);
    }

    let resumed = new_scaler();
    let record = round_trip(update_a.record());
    let mut update_b = scaled(&resumed, optimizer).load(record).unwrap();
    let mut net_b = net_a.clone();
    for number in 6..12 {
        net_a = step(&mut update_a, net_a, number);
        net_b = step(&mut update_b, net_b, number);
        assert_eq!(values(&net_a), values(&net_b));
        assert_eq!(scaler.scale(), resumed.scale());
        assert_eq!(scaler.growth_tracker(), resumed.growth_tracker());
        assert_eq!(scaler.skipped_steps(), resumed.skipped_steps());
    }
    assert_eq!(json(update_a.record()), json(update_b.record()));
    assert_eq!(scaler.last_overflow(), resumed.last_overflow());
}

fn directory(name: &str) -> PathBuf {
    let directory = std::env::temp_dir().join(format!("burn-amp-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

macro_rules! through_bytes {
    ($name:ident, $recorder:ty) => {
        #[test]
        fn $name() {
            let recorder = <$recorder>::default();
            resumes_exactly(AdamWConfig::new().init::<B, Net<B>>(), |record| {
                let bytes = Recorder::<B>::record(&recorder, record, ()).unwrap();
                Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap()
            });
        }
    };
}

macro_rules! through_a_file {
    ($name:ident, $recorder:ty) => {
        #[test]
        fn $name() {
            let directory = directory(stringify!($name));
            let file = directory.join("optimizer");
            let recorder = <$recorder>::new();
            resumes_exactly(AdamConfig::new().init::<B, Net<B>>(), |record| {
                Recorder::<B>::record(&recorder, record, file.clone()).unwrap();
                Recorder::<B>::load(&recorder, file.clone(), &Default::default()).unwrap()
            });
            std::fs::remove_dir_all(directory).unwrap();
        }
    };
}

through_bytes!(named_mpk_bytes_resume_exactly, NamedMpkBytesRecorder<Full>);
through_bytes!(bincode_bytes_resume_exactly, BinBytesRecorder<Full>);
through_a_file!(named_mpk_files_resume_exactly, NamedMpkFileRecorder<Full>);
through_a_file!(
    named_mpk_gz_files_resume_exactly,
    NamedMpkGzFileRecorder<Full>
);
through_a_file!(json_files_resume_exactly, PrettyJsonFileRecorder<Full>);
through_a_file!(bincode_files_resume_exactly, BinFileRecorder<Full>);
through_a_file!(bincode_gz_files_resume_exactly, BinGzFileRecorder<Full>);

#[test]
fn an_optimizer_without_state_resumes_exactly() {
    let recorder = NamedMpkBytesRecorder::<Full>::default();
    resumes_exactly(SgdConfig::new().init::<B, Net<B>>(), |record| {
        let bytes = Recorder::<B>::record(&recorder, record, ()).unwrap();
        Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap()
    });
}

/// The record of an update without a scaler, which is loaded into one with it: the scale starts
/// anew, and the optimizer goes on.
#[test]
fn a_record_without_a_scale_starts_the_scale_anew() {
    for steps in [0, 5] {
        let mut plain = Update::new(AdamConfig::new().init::<B, Net<B>>());
        let mut net = net();
        for number in 0..steps {
            let gradients = gradients(&net, number, &[]);
            net = plain.step(0.05, net, gradients).unwrap();
        }
        let record = plain.record();

        let scaler = new_scaler();
        let mut update = scaled(&scaler, AdamConfig::new().init::<B, Net<B>>());
        // What the scaler did before belongs to another training.
        let _ = step(&mut update, net.clone(), 2);
        let error = update.clone().load(record.clone()).unwrap_err();
        assert!(error.to_string().contains("scale"), "{error}");
        let update = update.load(record.with_new("scale")).unwrap();
        assert_eq!(state(&update), state(&plain));
        assert_eq!(
            (scaler.scale(), scaler.steps(), scaler.skipped_steps()),
            (65536.0, 0, 0)
        );
    }
}

#[test]
fn a_disabled_scaler_saves_and_loads() {
    let mut disabled = scaled(&GradScaler::disabled(), AdamConfig::new().init());
    let net: Net<B> = net();
    let net = step(&mut disabled, net, 0);
    let record = disabled.record();
    assert!(!record.parts().contains(&"scale".to_owned()));

    let enabled = new_scaler();
    let update = scaled(&enabled, AdamConfig::new().init());
    let mut update = update.load(record.with_new("scale")).unwrap();
    assert_eq!(enabled.scale(), 65536.0);
    let _: Net<B> = step(&mut update, net, 2);

    let disabled = GradScaler::disabled();
    let _ = scaled(&disabled, AdamConfig::new().init::<B, Net<B>>())
        .load(update.record())
        .unwrap();
    assert_eq!(disabled.skipped_steps(), 0);
}

#[test]
fn a_fixed_scale_is_not_changed_by_a_record() {
    let dynamic = scaled(&new_scaler(), AdamConfig::new().init::<B, Net<B>>());
    let fixed = GradScaler::new(GradScalerConfig::fixed(128.0)).unwrap();
    let _ = scaled(&fixed, AdamConfig::new().init::<B, Net<B>>())
        .load(dynamic.record())
        .unwrap();
    assert_eq!(fixed.scale(), 128.0);
}

/// Two optimizers share the scaler; the record of one was saved without a scaler.
#[test]
fn a_record_without_a_scale_leaves_that_of_another_record() {
    let scaler = new_scaler();
    let mut update = scaled(&scaler, AdamConfig::new().init());
    let mut net: Net<B> = net();
    for number in 0..6 {
        net = step(&mut update, net, number);
    }
    let with_scale = update.record();
    let without = scaled(
        &GradScaler::disabled(),
        AdamConfig::new().init::<B, Net<B>>(),
    );
    let without = without.record().with_new("scale");

    for order in [
        [with_scale.clone(), without.clone()],
        [without.clone(), with_scale],
    ] {
        let resumed = new_scaler();
        let updates = [(); 2].map(|()| scaled(&resumed, AdamConfig::new().init()));
        let mut updates: [_; 2] =
            std::array::from_fn(|i| updates[i].clone().load(order[i].clone()).unwrap());
        assert_eq!((resumed.scale(), resumed.steps()), (scaler.scale(), 6));

        // After a step it starts a new training.
        net = step(&mut updates[0], net, 0);
        let _ = updates[0].clone().load(without.clone()).unwrap();
        assert_eq!((resumed.scale(), resumed.steps()), (65536.0, 0));
    }
}

#[test]
fn a_step_before_does_not_count_in_the_loaded_training() {
    let scaler = new_scaler();
    let mut update = scaled(&scaler, AdamConfig::new().init::<B, Net<B>>());
    let start = update.record();
    let before = state(&update);
    let _ = step(&mut update, net(), 2);
    let update = update.load(start).unwrap();
    assert_eq!(
        (
            scaler.steps(),
            scaler.skipped_steps(),
            scaler.last_overflow()
        ),
        (0, 0, None)
    );
    assert_eq!(state(&update), before);
}
