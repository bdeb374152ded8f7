//! A record holds all parts, and training goes on from it bit for bit.

use burn::optim::{AdamWConfig, Optimizer};
use burn::record::{
    BinBytesRecorder, FullPrecisionSettings, HalfPrecisionSettings, NamedMpkBytesRecorder,
    PrettyJsonFileRecorder, Record, Recorder,
};
use burn::tensor::backend::AutodiffBackend;
use burn_accum::{AccumConfig, Accumulation, ClipByNorm, UpdateCounter};
use burn_amp::{GradScaler, GradScalerConfig};
use burn_update::{
    AverageConfig, Group, Groups, PartState, Paths, Update, UpdateError, UpdateRecord,
};

use crate::support::{F32, Half, LR, Net, adamw, bits, gradients, net};

/// An update with every part, and its handles.
struct Whole<B: AutodiffBackend> {
    update: Update<Net<B>, B>,
    scaler: GradScaler,
    counter: UpdateCounter,
}

fn whole<B: AutodiffBackend>() -> Whole<B> {
    let config = GradScalerConfig {
        growth_interval: 3,
        ..Default::default()
    };
    let scaler = GradScaler::new(config).unwrap();
    let windows = Accumulation::new(AccumConfig::mean(3)).unwrap();
    let counter = windows.updates();
    let no_decay = AdamWConfig::new().with_weight_decay(0.0);
    let groups = Groups::new(adamw::<B>()).with(
        "no decay",
        Group::new(Paths::glob("*.bias"), no_decay.init()),
    );
    let update = Update::of_groups(groups)
        .clip_norm(0.5)
        .unwrap()
        .accumulate(windows)
        .unwrap()
        .scale(scaler.clone())
        .unwrap()
        .average(AverageConfig::new(0.9))
        .unwrap();
    Whole {
        update,
        scaler,
        counter,
    }
}

impl<B: AutodiffBackend> Whole<B> {
    /// Trains `steps`, of which some overflow.
    fn train(&mut self, mut model: Net<B>, steps: core::ops::Range<usize>) -> Net<B> {
        for step in steps {
            let gradients = if step % 7 == 4 {
                gradients(&model, step, &[1])
            } else {
                self.update.backward(&model, model.loss(step, step + 3))
            };
            model = self.update.step(LR, model, gradients).unwrap();
        }
        model
    }

    fn progress(&self, model: &Net<B>) -> (Vec<Vec<u32>>, Vec<Vec<u32>>, [u64; 6]) {
        let averaged = self.update.averaged(model).unwrap();
        let counters = [
            self.update.updates(),
            self.counter.updates(),
            self.counter.micro_batches(),
            self.counter.micro_step(),
            u64::from(self.scaler.scale().to_bits()),
            u64::from(self.scaler.growth_tracker()),
        ];
        (bits(model), bits(&averaged), counters)
    }
}

type Round<B> = fn(UpdateRecord<B>) -> UpdateRecord<B>;

fn through_recorders<B: AutodiffBackend>() -> Vec<(&'static str, Round<B>)> {
    let full: Round<B> = |record| {
        let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
        let bytes = Recorder::<B>::record(&recorder, record, ()).unwrap();
        Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap()
    };
    let half: Round<B> = |record| {
        let recorder = NamedMpkBytesRecorder::<HalfPrecisionSettings>::default();
        let bytes = Recorder::<B>::record(&recorder, record, ()).unwrap();
        Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap()
    };
    let bincode: Round<B> = |record| {
        let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
        let bytes = Recorder::<B>::record(&recorder, record, ()).unwrap();
        Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap()
    };
    let json: Round<B> = |record| {
        let directory = tempfile::tempdir().unwrap();
        let recorder = PrettyJsonFileRecorder::<FullPrecisionSettings>::new();
        let path = directory.path().join("update");
        Recorder::<B>::record(&recorder, record, path.clone()).unwrap();
        Recorder::<B>::load(&recorder, path, &Default::default()).unwrap()
    };
    vec![
        ("in memory", |record| record),
        ("messagepack", full),
        ("half precision", half),
        ("bincode", bincode),
        ("json", json),
    ]
}

/// Wherever in a window it is saved: parameters, moments, average, window, scale and counters.
fn resumes_exactly<B: AutodiffBackend>() {
    for (name, round) in through_recorders::<B>() {
        for saved_at in [12, 13, 14] {
            let mut first = whole::<B>();
            let model = first.train(net(), 0..saved_at);
            let record = round(first.update.record());
            assert_eq!(
                record.parts(),
                ["accumulate", "average", "optimizer", "scale", "update"]
            );
            let mut second = whole::<B>();
            second.update = second.update.load(record).unwrap();
            assert_eq!(
                first.progress(&model),
                second.progress(&model),
                "{name}, {saved_at}"
            );

            let goes_on = first.train(model.clone(), saved_at..25);
            let resumed = second.train(model, saved_at..25);
            let expected = first.progress(&goes_on);
            assert_eq!(expected, second.progress(&resumed), "{name}, {saved_at}");
        }
    }
}

#[test]
fn training_resumes_in_the_middle_of_a_window_bit_for_bit() {
    resumes_exactly::<F32>();
    resumes_exactly::<Half>();
}

fn plain() -> Update<Net<F32>, F32> {
    Update::new(adamw())
}

#[test]
fn what_a_record_lacks_is_named() {
    let record = plain().record();
    let averaging = || plain().average(AverageConfig::new(0.9)).unwrap();
    let error = averaging().load(record.clone()).unwrap_err();
    let UpdateError::RecordLacks { part, has } = &error else {
        panic!("{error}");
    };
    assert_eq!(
        (part.as_str(), has.as_slice()),
        ("average", &["optimizer".to_owned()][..])
    );
    // The user says that it starts anew.
    assert!(averaging().load(record.with_new("average")).is_ok());
    // A part without a state needs no place in the record.
    assert!(
        plain()
            .clip_norm(1.0)
            .unwrap()
            .load(plain().record())
            .is_ok()
    );
}

#[test]
fn what_a_record_has_beyond_the_update_is_named() {
    let windows = plain().accumulate(AccumConfig::mean(2)).unwrap();
    let record = windows.record();
    let error = plain().load(record.clone()).unwrap_err();
    assert!(
        matches!(&error, UpdateError::RecordHas { part } if part == "accumulate"),
        "{error}"
    );
    assert!(plain().load(record.without("accumulate")).is_ok());
}

#[test]
fn the_state_of_another_optimizer_is_refused() {
    let groups = |names: &[&str]| {
        let groups = names.iter().fold(Groups::new(adamw()), |groups, name| {
            groups.with(*name, Group::new(Paths::glob(*name), adamw()))
        });
        Update::of_groups(groups)
    };
    // A group that the record lacks, and one that it has beyond the update's.
    let error = groups(&["first.*"]).load(groups(&[]).record()).unwrap_err();
    assert!(
        matches!(&error, UpdateError::ValueMissing { part, value } if part == "optimizer" && value == "first.*"),
        "{error}"
    );
    let error = groups(&[]).load(groups(&["first.*"]).record()).unwrap_err();
    assert!(
        matches!(&error, UpdateError::RecordHas { part } if part == "optimizer.first.*"),
        "{error}"
    );
    let error = groups(&[]).load(plain().record()).unwrap_err();
    assert!(matches!(error, UpdateError::ValueMissing { .. }), "{error}");

    // Adam's moments are no SGD momentum.
    let mut update = plain();
    let model = net();
    let gradients = gradients(&model, 0, &[]);
    let _ = update.step(LR, model, gradients).unwrap();
    let momentum = burn::optim::momentum::MomentumConfig::new();
    let sgd = burn::optim::SgdConfig::new().with_momentum(Some(momentum));
    let error = Update::<Net<F32>, F32>::new(sgd.init()).load(update.record());
    let error = error.unwrap_err();
    assert!(
        matches!(&error, UpdateError::Unreadable { part, .. } if part == "optimizer"),
        "{error}"
    );
}

/// Burn's Learner loads records by the trait.
#[test]
fn burns_trait_saves_and_loads_the_same_record() {
    let mut first = whole::<F32>();
    let model = first.train(net(), 0..10);
    let record = Optimizer::<Net<F32>, F32>::to_record(&first.update);
    let mut second = whole::<F32>();
    second.update = second.update.load_record(record);
    assert_eq!(first.progress(&model), second.progress(&model));
}

/// Before they could be cut over ranks, updates kept an optimizer's record as the bytes of one of
/// Burn's recorders.
#[test]
fn records_with_an_optimizers_record_as_bytes_load_bit_for_bit() {
    let (mut update, mut alone) = (plain(), adamw::<F32>());
    let mut model = net::<F32>();
    for step in 0..3 {
        let _ = alone.step(LR, model.clone(), gradients(&model, step, &[]));
        let gradients = gradients(&model, step, &[]);
        model = update.step(LR, model, gradients).unwrap();
    }
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
    let bytes = Recorder::<F32>::record(&recorder, alone.to_record(), ()).unwrap();
    let mut state = PartState::default();
    state.put_bytes("record", bytes);
    let item = update.record().into_item::<FullPrecisionSettings>();
    let mut item = serde_json::to_value(item).unwrap();
    item["parts"]["optimizer"] = serde_json::to_value(state).unwrap();
    let item = serde_json::from_value(item).unwrap();
    let record = UpdateRecord::<F32>::from_item::<FullPrecisionSettings>(item, &Default::default());

    let mut resumed = plain().load(record).unwrap();
    let step = |update: &mut Update<_, _>| {
        let gradients = gradients(&model, 3, &[]);
        update.step(LR, model.clone(), gradients).unwrap()
    };
    assert_eq!(bits(&step(&mut resumed)), bits(&step(&mut update)));
    assert_eq!(resumed.updates(), 4);
}

/// The files of AdamW that has made so many steps: with named fields, as JSON, and as it would be
/// in the wrapper of before; and the net after them.
fn foreign(steps: usize) -> (Net<F32>, Vec<u8>, Vec<serde_json::Value>) {
    let (mut optimizer, mut model) = (adamw::<F32>(), net());
    for step in 0..steps {
        let gradients = gradients(&model, step, &[]);
        model = optimizer.step(LR, model, gradients);
    }
    let named = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
    let named = Recorder::<F32>::record(&named, optimizer.to_record(), ()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let recorder = PrettyJsonFileRecorder::<FullPrecisionSettings>::new();
    let path = directory.path().join("optimizer");
    Recorder::<F32>::record(&recorder, optimizer.to_record(), path.clone()).unwrap();
    let file = std::fs::read(path.with_extension("json")).unwrap();
    let alone: serde_json::Value = serde_json::from_slice(&file).unwrap();
    let mut wrapped = alone.clone();
    wrapped["item"] = serde_json::json!({ "accumulated": null, "optimizer": alone["item"] });
    (model, named, vec![alone, wrapped])
}

#[test]
fn the_file_of_an_optimizer_alone_or_in_a_wrapper_says_what_to_do() {
    for steps in [0, 3] {
        let (_, named, files) = foreign(steps);
        let mut errors = Vec::new();
        let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
        let loaded: Result<UpdateRecord<F32>, _> =
            Recorder::<F32>::load(&recorder, named, &Default::default());
        errors.push(loaded.unwrap_err().to_string());
        for file in files {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("optimizer");
            std::fs::write(path.with_extension("json"), file.to_string()).unwrap();
            let recorder = PrettyJsonFileRecorder::<FullPrecisionSettings>::new();
            let loaded: Result<UpdateRecord<F32>, _> =
                Recorder::<F32>::load(&recorder, path, &Default::default());
            errors.push(loaded.unwrap_err().to_string());
        }
        for error in errors {
            assert!(error.contains("no record of an `Update`"), "{error}");
            assert!(
                error.contains("Update::new(optimizer.load_record(record))"),
                "{error}"
            );
        }
    }
}

/// As that error says.
#[test]
fn an_update_of_an_optimizer_with_its_record_goes_on_bit_for_bit() {
    let (model, named, _) = foreign(3);
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
    let load = || {
        let record = Recorder::<F32>::load(&recorder, named.clone(), &Default::default());
        adamw::<F32>().load_record(record.unwrap())
    };
    let (mut alone, mut update) = (load(), Update::new(load()));
    let expected = alone.step(LR, model.clone(), gradients(&model, 3, &[]));
    let found = update
        .step(LR, model.clone(), gradients(&model, 3, &[]))
        .unwrap();
    assert_eq!(bits(&found), bits(&expected));
    let fresh = adamw().step(LR, model.clone(), gradients(&model, 3, &[]));
    assert_ne!(bits(&found), bits(&fresh));
}
