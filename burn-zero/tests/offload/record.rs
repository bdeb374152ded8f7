//! Records go on bit for bit, and are Burn's.

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

fn to_record(optimizer: &OffloadedAdamW) -> OffloadRecord {
    Optimizer::<Net<B>, B>::to_record(optimizer)
}

fn load(bytes: Bytes) -> OffloadedAdamW {
    let fresh = config().init().unwrap();
    Optimizer::<Net<B>, B>::load_record(fresh, read(bytes))
}

#[test]
fn a_resumed_training_is_the_uninterrupted_one_bit_for_bit() {
    for low in [DType::F32, DType::BF16, DType::F16] {
        let initial = Net::new(low);
        let mut optimizer = config().init().unwrap();
        let model = train(&mut optimizer, initial, 0..7);
        let bytes = named(to_record(&optimizer));
        let on = train(&mut optimizer, model.clone(), 7..12);

        let mut resumed = load(bytes.clone());
        let again = train(&mut resumed, model.clone(), 7..12);
        assert_eq!(bits(&on), bits(&again), "{low:?}");

        // Loaded and saved before a step, nothing is lost.
        let unused = named(to_record(&load(bytes)));
        let mut resumed = load(unused);
        let again = train(&mut resumed, model, 7..12);
        assert_eq!(bits(&on), bits(&again), "{low:?}, saved unused");
    }
}

#[test]
fn a_record_goes_into_a_bincode_file() {
    let mut optimizer = config().init().unwrap();
    let model = train(&mut optimizer, Net::new(DType::F32), 0..7);
    let expected = parameters(&train(&mut optimizer.clone(), model.clone(), 7..12));
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let bytes = Recorder::<B>::record(&recorder, to_record(&optimizer), ()).unwrap();
    let record = Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap();
    let fresh = config().init().unwrap();
    let mut resumed = Optimizer::<Net<B>, B>::load_record(fresh, record);
    let again = parameters(&train(&mut resumed, model, 7..12));
    assert_eq!(expected, again);
}

#[test]
fn burns_adamw_goes_on_from_it_and_back() {
    let burns = AdamWConfig::new().with_weight_decay(0.125);
    let mut optimizer = burns.init::<B, Net<B>>();
    let model = train(&mut optimizer, Net::new(DType::F32), 0..7);
    let offloaded = load(named(optimizer.to_record()));
    let expected = train(&mut optimizer.clone(), model.clone(), 7..12);
    let found = train(&mut offloaded.clone(), model.clone(), 7..12);
    let pairs = parameters(&expected).into_iter().flatten();
    let mut pairs = pairs.zip(parameters(&found).into_iter().flatten());
    assert!(pairs.all(|(a, b)| (a - b).abs() < 1e-6));

    // The way through the record is exact.
    let mut back = burns.init::<B, Net<B>>();
    back = back.load_record(read(named(to_record(&offloaded))));
    let expected = train(&mut optimizer, model.clone(), 7..12);
    assert_eq!(bits(&expected), bits(&train(&mut back, model, 7..12)));

    // With masters that Burn does not know, too.
    let mut on_host = config().init().unwrap();
    train(&mut on_host, Net::new(DType::BF16), 0..3);
    let back = burns.init::<B, Net<B>>();
    let back = back.load_record(read(named(to_record(&on_host))));
    assert_eq!(back.to_record().len(), 3);
}

#[test]
fn a_record_is_of_its_moment() {
    let mut optimizer = config().init().unwrap();
    let model = train(&mut optimizer, Net::new(DType::BF16), 0..3);
    let record = to_record(&optimizer);
    let before = named(record.clone());
    train(&mut optimizer, model.clone(), 3..6);
    let (a, b) = (
        load(before),
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
    load(named(optimizer.to_record()));
}
