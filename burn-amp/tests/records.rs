//! Checkpoints: the scaler's state travels with the optimizer's, and files of the optimizer alone
//! load too.

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
use burn_amp::{Detection, GradScaler, GradScalerConfig, ScaledOptimizer};
use support::{B, Net, gradients, json, net, state, values};

type Full = FullPrecisionSettings;

fn new_scaler(detection: Detection) -> GradScaler {
    let config = GradScalerConfig {
        growth_interval: 4,
        hysteresis: 3,
        ..Default::default()
    };
    GradScaler::new(&config).unwrap().with_detection(detection)
}

fn step<O: Optimizer<Net<B>, B>>(optimizer: &mut O, net: Net<B>, number: usize) -> Net<B> {
    let overflowing: &[usize] = if number % 3 == 2 { &[4] } else { &[] };
    let gradients = gradients(&net, number, overflowing);
    optimizer.step(0.05, net, gradients)
}

/// Six steps, a round trip of the record, six more: the same as twelve.
fn resumes_exactly<O, F>(optimizer: O, round_trip: F)
where
    O: Optimizer<Net<B>, B>,
    F: Fn(
        <ScaledOptimizer<O> as Optimizer<Net<B>, B>>::Record,
    ) -> <ScaledOptimizer<O> as Optimizer<Net<B>, B>>::Record,
{
    for detection in [Detection::Sync, Detection::Deferred] {
        let scaler = new_scaler(detection);
        let mut optimizer_a = scaler.wrap(optimizer.clone());
        let mut net_a = net();
        for number in 0..6 {
            net_a = step(&mut optimizer_a, net_a, number);
        }

        let resumed = new_scaler(detection);
        let record = round_trip(optimizer_a.to_record());
        let mut optimizer_b = resumed.wrap(optimizer.clone()).load_record(record);
        let mut net_b = net_a.clone();
        for number in 6..12 {
            net_a = step(&mut optimizer_a, net_a, number);
            net_b = step(&mut optimizer_b, net_b, number);
            assert_eq!(values(&net_a), values(&net_b));
            assert_eq!(scaler.scale(), resumed.scale());
            assert_eq!(scaler.growth_tracker(), resumed.growth_tracker());
            assert_eq!(scaler.skipped_steps(), resumed.skipped_steps());
        }
        assert_eq!(json(optimizer_a.to_record()), json(optimizer_b.to_record()));
        assert_eq!(scaler.last_overflow(), resumed.last_overflow());
    }
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

/// Trains without a scaler, saves, and loads into a wrapped optimizer.
fn loads_the_inner_record<R: burn::record::FileRecorder<B>>(name: &str, recorder: R, steps: usize) {
    let directory = directory(name);
    let file = directory.join("optimizer");
    let mut plain = AdamConfig::new().init::<B, Net<B>>();
    let mut net = net();
    for number in 0..steps {
        let gradients = gradients(&net, number, &[]);
        net = plain.step(0.05, net, gradients);
    }
    recorder.record(plain.to_record(), file.clone()).unwrap();

    let scaler = new_scaler(Detection::Sync);
    let mut scaled = scaler.wrap(AdamConfig::new().init::<B, Net<B>>());
    // What the scaler did before belongs to another training.
    let _ = step(&mut scaled, net.clone(), 2);
    let scaled = scaled.load_record(recorder.load(file, &Default::default()).unwrap());
    assert_eq!(state(scaled.inner()), state(&plain));
    assert_eq!(
        (scaler.scale(), scaler.steps(), scaler.skipped_steps()),
        (65536.0, 0, 0)
    );
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn records_of_the_inner_optimizer_alone_load() {
    loads_the_inner_record("inner-mpk", NamedMpkFileRecorder::<Full>::new(), 5);
    loads_the_inner_record("inner-gz", NamedMpkGzFileRecorder::<Full>::new(), 5);
    loads_the_inner_record("inner-json", PrettyJsonFileRecorder::<Full>::new(), 5);
}

#[test]
fn empty_records_of_the_inner_optimizer_load() {
    loads_the_inner_record("empty-mpk", NamedMpkFileRecorder::<Full>::new(), 0);
    loads_the_inner_record("empty-json", PrettyJsonFileRecorder::<Full>::new(), 0);
}

#[test]
fn a_disabled_scaler_saves_and_loads() {
    let mut disabled = GradScaler::disabled().wrap(AdamConfig::new().init());
    let net: Net<B> = net();
    let net = step(&mut disabled, net, 0);
    let record = disabled.to_record();
    assert!(record.scaler.is_none());

    let enabled = new_scaler(Detection::Sync);
    let mut optimizer = enabled.wrap(AdamConfig::new().init()).load_record(record);
    assert_eq!(enabled.scale(), 65536.0);
    let _: Net<B> = step(&mut optimizer, net, 2);

    let disabled = GradScaler::disabled();
    let _ = disabled
        .wrap(AdamConfig::new().init::<B, Net<B>>())
        .load_record(optimizer.to_record());
    assert_eq!(disabled.skipped_steps(), 0);
}

#[test]
fn a_fixed_scale_is_not_changed_by_a_record() {
    let dynamic = new_scaler(Detection::Sync).wrap(AdamConfig::new().init::<B, Net<B>>());
    let fixed = GradScaler::new(GradScalerConfig::fixed(128.0)).unwrap();
    let _ = fixed
        .wrap(AdamConfig::new().init::<B, Net<B>>())
        .load_record(dynamic.to_record());
    assert_eq!(fixed.scale(), 128.0);
}

/// Two optimizers share the scaler; the record of one was saved without a scaler.
#[test]
fn a_record_without_a_scale_leaves_that_of_another_record() {
    let scaler = new_scaler(Detection::Sync);
    let mut optimizer = scaler.wrap(AdamConfig::new().init());
    let mut net: Net<B> = net();
    for number in 0..6 {
        net = step(&mut optimizer, net, number);
    }
    let with_scale = optimizer.to_record();
    let without = GradScaler::disabled()
        .wrap(AdamConfig::new().init::<B, Net<B>>())
        .to_record();

    for order in [
        [with_scale.clone(), without.clone()],
        [without.clone(), with_scale],
    ] {
        let resumed = new_scaler(Detection::Sync);
        let mut optimizers = [(); 2].map(|()| resumed.wrap(AdamConfig::new().init()));
        optimizers = std::array::from_fn(|i| optimizers[i].clone().load_record(order[i].clone()));
        assert_eq!((resumed.scale(), resumed.steps()), (scaler.scale(), 6));

        // After a step it starts a new training.
        net = step(&mut optimizers[0], net, 0);
        let _ = optimizers[0].clone().load_record(without.clone());
        assert_eq!((resumed.scale(), resumed.steps()), (65536.0, 0));
    }
}

#[test]
fn a_pending_step_does_not_count_in_the_loaded_training() {
    let scaler = new_scaler(Detection::Deferred);
    let mut optimizer = scaler.wrap(AdamConfig::new().init::<B, Net<B>>());
    let start = optimizer.to_record();
    let _ = step(&mut optimizer, net(), 2);
    let optimizer = optimizer.load_record(start);
    assert_eq!(
        (
            scaler.steps(),
            scaler.skipped_steps(),
            scaler.last_overflow()
        ),
        (0, 0, None)
    );
    assert_eq!(state(optimizer.inner()), serde_json::json!({}));
}
