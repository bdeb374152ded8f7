//! Checkpoints: a window that is interrupted anywhere continues exactly.

use std::path::PathBuf;

use burn::{
    module::Param,
    nn::{Linear, LinearConfig},
    optim::{AdamWConfig, GradientsParams, MuonConfig, Optimizer, SgdConfig},
    prelude::*,
    record::{
        BinBytesRecorder, BinGzFileRecorder, FullPrecisionSettings, HalfPrecisionSettings,
        NamedMpkBytesRecorder, PrettyJsonFileRecorder, Recorder,
    },
};
use burn_accum::{AccumConfig, Counted};
use burn_amp::{Autocast, Bf16};
use burn_update::{Update, UpdateRecord};

use crate::support::{B, Batch, Net, Windows, gradients, json, net, values};

type Full = FullPrecisionSettings;

fn step(optimizer: &mut Windows, net: Net<B>, number: usize) -> Net<B> {
    let batch = Batch::rows(number * 3, number * 4 + 1);
    let mut loss = net.loss(&batch);
    if number % 5 == 3 {
        loss = loss * f32::NAN;
    }
    let gradients = Counted::mean(loss, batch.len()).backward(&net);
    optimizer.step(0.05, net, gradients)
}

/// Some micro-steps, a round trip of the record, some more: the same as without a stop, wherever it
/// is.
fn resumes_everywhere(
    inner: impl Optimizer<Net<B>, B> + 'static,
    round_trip: impl Fn(UpdateRecord<B>) -> UpdateRecord<B>,
) {
    let new = || Windows::new(inner.clone(), AccumConfig::tokens(4));
    for stop in 0..=8 {
        let mut one = new();
        let mut net_one = net();
        for number in 1..=stop {
            net_one = step(&mut one, net_one, number);
        }
        let mut other = new().load(round_trip(one.update.record()));
        let mut net_other = net_one.clone();
        for number in stop + 1..=stop + 9 {
            net_one = step(&mut one, net_one, number);
            net_other = step(&mut other, net_other, number);
            assert_eq!(values(&net_one), values(&net_other), "stopped after {stop}");
        }
        let (seen, expected) = (other.updates(), one.updates());
        assert_eq!(seen.updates(), expected.updates());
        assert_eq!(seen.micro_step(), expected.micro_step());
        assert_eq!(seen.dropped(), expected.dropped());
        assert_eq!(json(one.update.record()), json(other.update.record()));
    }
}

fn directory(name: &str) -> PathBuf {
    let directory = std::env::temp_dir().join(format!("burn-accum-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

macro_rules! through_bytes {
    ($name:ident, $recorder:ty) => {
        #[test]
        fn $name() {
            let recorder = <$recorder>::default();
            resumes_everywhere(AdamWConfig::new().init::<B, Net<B>>(), |record| {
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
            resumes_everywhere(AdamWConfig::new().init::<B, Net<B>>(), |record| {
                Recorder::<B>::record(&recorder, record, file.clone()).unwrap();
                Recorder::<B>::load(&recorder, file.clone(), &Default::default()).unwrap()
            });
            std::fs::remove_dir_all(directory).unwrap();
        }
    };
}

through_bytes!(
    named_mpk_bytes_resume_everywhere,
    NamedMpkBytesRecorder<Full>
);
through_bytes!(bincode_bytes_resume_everywhere, BinBytesRecorder<Full>);
through_a_file!(json_files_resume_everywhere, PrettyJsonFileRecorder<Full>);
through_a_file!(bincode_gz_files_resume_everywhere, BinGzFileRecorder<Full>);

/// The accumulators are f32 in any file: f16 would overflow at loss sums of 65504.
#[test]
fn half_precision_recorders_keep_the_sums() {
    let recorder = NamedMpkBytesRecorder::<HalfPrecisionSettings>::default();
    resumes_everywhere(SgdConfig::new().init::<B, Net<B>>(), |record| {
        let bytes = Recorder::<B>::record(&recorder, record, ()).unwrap();
        Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap()
    });
}

/// The sums that are loaded are gradients: under autocast the optimizer's products of them stay
/// f32, as without a stop.
#[test]
fn sums_of_a_loaded_window_are_gradients() {
    type Mixed = Autocast<B, Bf16>;
    let run = |stops: bool| {
        let device = Default::default();
        let weight = Tensor::<Mixed, 1, Int>::arange(0..16, &device)
            .float()
            .sin();
        let mut layer = LinearConfig::new(4, 4)
            .with_bias(false)
            .init::<Mixed>(&device);
        layer.weight = Param::from_tensor(weight.reshape([4, 4]));
        let muon = || Update::new(MuonConfig::new().init::<Mixed, Linear<Mixed>>());
        let new = || muon().accumulate(AccumConfig::mean(4)).unwrap();
        let mut windows = new();
        for at in 0..2 {
            let x = Tensor::<Mixed, 2>::full([1, 4], 1.0 + at as f32, &device);
            let loss = layer.forward(x).square().mean();
            let gradients = GradientsParams::from_grads(loss.backward(), &layer);
            layer = windows.step(0.1, layer, gradients).unwrap();
        }
        if stops {
            let recorder = NamedMpkBytesRecorder::<Full>::default();
            let record = windows.record();
            let bytes = Recorder::<Mixed>::record(&recorder, record, ()).unwrap();
            let record = Recorder::<Mixed>::load(&recorder, bytes, &device).unwrap();
            windows = new().load(record).unwrap();
        }
        let layer = windows.flush(0.1, layer).unwrap();
        layer.weight.val().into_data()
    };
    assert_eq!(run(true), run(false));
}

/// The partial window is kept, and ends when the new length is reached or at the next micro-step if
/// it is exceeded.
#[test]
fn a_record_loads_under_another_window_length() {
    let sgd = || SgdConfig::new().init::<B, Net<B>>();
    let start = net();
    let mut five = Windows::new(sgd(), AccumConfig::mean(5));
    let mut net = start.clone();
    for number in 0..3 {
        net = five.step(0.1, net, gradients(&start, number, &[], &[]));
    }
    for (steps, expected) in [(2, 4), (3, 4), (4, 4), (6, 6)] {
        let mut other = Windows::new(sgd(), AccumConfig::mean(steps));
        other = other.load(five.update.record());
        let mut trained = net.clone();
        let mut number = 3;
        while other.updates().updates() == 0 {
            trained = other.step(0.1, trained, gradients(&start, number, &[], &[]));
            number += 1;
        }
        assert_eq!(number, expected, "micro-batches in a window of {steps}");

        let mut whole = Windows::new(sgd(), AccumConfig::mean(expected));
        let mut net = start.clone();
        for number in 0..expected {
            net = whole.step(0.1, net, gradients(&start, number, &[], &[]));
        }
        assert_eq!(values(&trained), values(&net));
    }
}
