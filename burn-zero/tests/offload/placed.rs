//! AdamW by a setting: each place is its optimizer, bit for bit, and records go from one to the
//! other.

use burn::optim::{AdamWConfig, Optimizer};
use burn::record::{
    FullPrecisionSettings, HalfPrecisionSettings, NamedMpkBytesRecorder, PrecisionSettings, Record,
    Recorder,
};
use burn::tensor::DType;
use burn_zero::{HostAdamWConfig, Memory, PlacedAdamW};

use super::support::*;

type Placed = PlacedAdamW<Net<B>, B>;

const PLACES: [Memory; 2] = [Memory::Device, Memory::Host];

fn placed(place: Memory) -> Placed {
    PlacedAdamW::new(config().adamw, place).unwrap()
}

/// Burn's AdamW with the same numbers.
fn burns() -> impl Optimizer<Net<B>, B> {
    AdamWConfig::new().with_weight_decay(0.125).init()
}

fn saved<S: PrecisionSettings, R: Record<B>>(record: R) -> Vec<u8> {
    let recorder = NamedMpkBytesRecorder::<S>::default();
    Recorder::<B>::record(&recorder, record, ()).unwrap()
}

fn loaded<S: PrecisionSettings, O: Optimizer<Net<B>, B>>(optimizer: O, bytes: Vec<u8>) -> O {
    let recorder = NamedMpkBytesRecorder::<S>::default();
    let record = Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap();
    optimizer.load_record(record)
}

/// The bits after five steps more.
fn goes_on(mut optimizer: impl Optimizer<Net<B>, B>, model: &Net<B>) -> Vec<Vec<u32>> {
    bits(&train(&mut optimizer, model.clone(), 7..12))
}

#[test]
fn each_place_is_its_optimizer_bit_for_bit() {
    let initial = Net::new(DType::F32);
    let on_device = goes_on(burns(), &initial);
    let on_host = goes_on(config().init().unwrap(), &initial);
    assert_ne!(on_device, on_host, "they round differently");
    for (place, expected) in PLACES.into_iter().zip([on_device, on_host]) {
        let optimizer = placed(place);
        assert_eq!(optimizer.place(), place);
        assert_eq!(goes_on(optimizer, &initial), expected, "{place:?}");
    }
}

#[test]
fn a_record_goes_on_in_either_place_bit_for_bit() {
    type Full = FullPrecisionSettings;
    for first in PLACES {
        let mut optimizer = placed(first);
        let model = train(&mut optimizer, Net::new(DType::F32), 0..7);
        let expected = goes_on(optimizer.clone(), &model);
        for then in PLACES {
            // In a file, and as the record that a clone of the training would get.
            let of_file = loaded::<Full, _>(
                placed(then),
                saved::<Full, _>(Optimizer::<Net<B>, B>::to_record(&optimizer)),
            );
            let direct = placed(then).load_record(optimizer.to_record());
            assert_eq!(
                goes_on(of_file.clone(), &model),
                goes_on(direct, &model),
                "{first:?}, {then:?}"
            );
            // To the other place and back no bit is lost.
            let back = loaded::<Full, _>(placed(first), saved::<Full, _>(of_file.to_record()));
            assert_eq!(goes_on(back, &model), expected, "{first:?}, {then:?}");
        }
    }
}

#[test]
fn burns_adamw_loads_its_records_and_is_loaded() {
    type Full = FullPrecisionSettings;
    let mut optimizer = burns();
    let model = train(&mut optimizer, Net::new(DType::F32), 0..7);
    let expected = goes_on(optimizer.clone(), &model);
    let mine = loaded::<Full, _>(
        placed(Memory::Device),
        saved::<Full, _>(optimizer.to_record()),
    );
    assert_eq!(goes_on(mine.clone(), &model), expected);
    let back = loaded::<Full, _>(burns(), saved::<Full, _>(mine.to_record()));
    assert_eq!(goes_on(back, &model), expected);
}

#[test]
fn no_recorder_rounds_its_moments() {
    type Half = HalfPrecisionSettings;
    for place in PLACES {
        let mut optimizer = placed(place);
        let model = train(&mut optimizer, Net::new(DType::F32), 0..7);
        let again = loaded::<Half, _>(placed(place), saved::<Half, _>(optimizer.to_record()));
        let [expected, found] = [optimizer, again].map(|optimizer| goes_on(optimizer, &model));
        assert_eq!(expected, found, "{place:?}");
    }
}

#[test]
fn a_number_that_cannot_work_is_refused_in_either_place() {
    for place in PLACES {
        let config = HostAdamWConfig {
            beta_2: 1.0,
            ..HostAdamWConfig::default()
        };
        let error = Placed::new(config, place).unwrap_err().to_string();
        assert!(error.contains("beta_2"), "{error}");
    }
}
