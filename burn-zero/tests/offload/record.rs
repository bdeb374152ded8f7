//! Records go on bit for bit, at any ratio, and are Burn's.

use burn::optim::{AdamWConfig, Optimizer};
use burn::record::{
    BinBytesRecorder, FullPrecisionSettings, NamedMpkBytesRecorder, Record, Recorder,
};
use burn::tensor::DType;
use burn_zero::{OffloadRecord, OffloadedAdamW};

use super::support::*;

type Bytes = Vec<u8>;

fn named<R: Record<B>>(record: R) -> Bytes {
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
    Recorder::<B>::record(&recorder, record, ()).unwrap()
}

fn read<R: Record<B>>(bytes: Bytes) -> R {
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
    Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap()
}

fn to_record(optimizer: &OffloadedAdamW<B>) -> OffloadRecord<burn_flex::Flex> {
    Optimizer::<Net<B>, B>::to_record(optimizer)
}

fn load(ratio: f64, bytes: Bytes) -> OffloadedAdamW<B> {
    let fresh = config(ratio).init().unwrap();
    Optimizer::<Net<B>, B>::load_record(fresh, read(bytes))
}

#[test]
fn a_resumed_training_is_the_uninterrupted_one_bit_for_bit() {
    for low in [DType::F32, DType::BF16, DType::F16] {
        for ratio in [0.0, 0.2, 0.8, 1.0] {
            let initial = Net::new(low);
            let mut optimizer = config(ratio).init().unwrap();
            let model = train(&mut optimizer, initial, 0..7);
            let bytes = named(to_record(&optimizer));
            let on = train(&mut optimizer, model.clone(), 7..12);

            let mut resumed = load(ratio, bytes.clone());
            let again = train(&mut resumed, model.clone(), 7..12);
            assert_eq!(bits(&on), bits(&again), "{low:?} at {ratio}");

            // Loaded and saved before a step, nothing is lost.
            let unused = named(to_record(&load(1.0 - ratio, bytes)));
            let mut resumed = load(ratio, unused);
            let again = train(&mut resumed, model, 7..12);
            assert_eq!(bits(&on), bits(&again), "{low:?} at {ratio}, saved unused");
        }
    }
}

#[test]
fn a_record_loads_at_another_ratio_and_into_a_bincode_file() {
    let mut optimizer = config(1.0).init().unwrap();
    let model = train(&mut optimizer, Net::new(DType::F32), 0..7);
    let expected = parameters(&train(&mut optimizer.clone(), model.clone(), 7..12));
    for ratio in [0.0, 0.5] {
        let bytes = named(to_record(&optimizer));
        let other = train(&mut load(ratio, bytes), model.clone(), 7..12);
        let pairs = expected.iter().flatten();
        let pairs = pairs.zip(parameters(&other).into_iter().flatten());
        assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-6));
    }
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let bytes = Recorder::<B>::record(&recorder, to_record(&optimizer), ()).unwrap();
    let record = Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap();
    let fresh = config(1.0).init().unwrap();
    let mut resumed = Optimizer::<Net<B>, B>::load_record(fresh, record);
    let again = parameters(&train(&mut resumed, model, 7..12));
    assert_eq!(expected, again);
}

#[test]
fn burns_adamw_goes_on_from_it_and_back() {
    let burns = AdamWConfig::new().with_weight_decay(0.125);
    let mut optimizer = burns.init::<B, Net<B>>();
    let model = train(&mut optimizer, Net::new(DType::F32), 0..7);
    // All of it on the device is Burn's own, so the way through the record must be exact.
    let mut offloaded = load(0.0, named(optimizer.to_record()));
    let expected = train(&mut optimizer, model.clone(), 7..12);
    let model = train(&mut offloaded, model, 7..12);
    assert_eq!(bits(&expected), bits(&model));

    let mut back = burns.init::<B, Net<B>>();
    back = back.load_record(read(named(to_record(&offloaded))));
    let expected = train(&mut optimizer, model.clone(), 12..15);
    assert_eq!(
        bits(&expected),
        bits(&train(&mut back, model.clone(), 12..15))
    );

    // From the host too, and with masters that Burn does not know.
    let mut on_host = config(1.0).init().unwrap();
    train(&mut on_host, Net::new(DType::BF16), 0..3);
    let back = burns.init::<B, Net<B>>();
    let back = back.load_record(read(named(to_record(&on_host))));
    assert_eq!(back.to_record().len(), 3);
}

#[test]
fn a_record_is_of_its_moment() {
    let mut optimizer = config(1.0).init().unwrap();
    let model = train(&mut optimizer, Net::new(DType::BF16), 0..3);
    let record = to_record(&optimizer);
    let before = named(record.clone());
    train(&mut optimizer, model.clone(), 3..6);
    let (a, b) = (
        load(1.0, before),
        Optimizer::<Net<B>, B>::load_record(optimizer, record),
    );
    let [a, b] = [a, b].map(|mut optimizer| bits(&train(&mut optimizer, model.clone(), 3..6)));
    assert_eq!(a, b);
}

#[test]
#[should_panic(expected = "AMSGrad")]
fn amsgrad_is_refused() {
    let burns = AdamWConfig::new().with_amsgrad(true);
    let mut optimizer = burns.init::<B, Net<B>>();
    train(&mut optimizer, Net::new(DType::F32), 0..1);
    load(1.0, named(optimizer.to_record()));
}
