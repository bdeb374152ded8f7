//! Snapshots of what holds the memory, and traces for Perfetto.

use std::time::Duration;

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn_checkpoint::snapshot::{Holder, Snapshot, chrome_trace};
use burn_checkpoint::trace::{self, Event, EventKind, Kind};
use burn_checkpoint::{
    MemoryBudget, Policy, Recorder, Remat, checkpoint_labelled, name_parameters, record_all,
    recorder,
};
use burn_flex::Flex;
use serde_json::Value;

use crate::apart::{InstallApart, keep_apart};

type B = Autodiff<Remat<Flex>>;

/// Two scopes, the second with a quote in its label, and a backward pass.
fn events() -> Vec<Event> {
    keep_apart();
    let recording = record_all();
    let x = Tensor::<B, 1>::ones([4096], &Default::default()).require_grad();
    let block = |x: Tensor<B, 1>| x.exp().log().exp().log();
    let y = checkpoint_labelled("first", Policy::Recompute, || block(x.clone()));
    let y = checkpoint_labelled("the \"second\"", Policy::Recompute, || block(y));
    drop(y.sum().backward());
    recording.finish()
}

#[test]
fn holders_are_all_that_is_in_use() {
    let events = events();
    let snapshot = Snapshot::at_peak(&events).expect("there were tensors");
    let live = |event: &Event| event.device.map(|_| event.live_bytes);
    assert_eq!(
        events.iter().filter_map(live).max(),
        Some(snapshot.live_bytes)
    );
    let held = snapshot.holders.iter().map(|holder| holder.bytes);
    assert_eq!(held.sum::<u64>(), snapshot.live_bytes, "{snapshot}");
    let owners = snapshot.holders.iter().map(|holder| &*holder.owner);
    let owners: Vec<_> = owners.collect();
    assert!(
        owners.iter().any(|owner| owner.starts_with("first/float_")),
        "{owners:?}"
    );
    assert!(!owners.contains(&"before"), "{owners:?}");
    assert!(snapshot.to_string().contains("KiB"));
}

/// No scope, and no budget of the program's own.
#[test]
fn a_full_recording_sees_tensors_of_no_scope() {
    let step = || {
        let x = Tensor::<B, 1>::ones([4096], &Default::default()).require_grad();
        drop(x.exp().log().sum().backward());
    };
    let scopes_only = trace::record();
    step();
    // Another test's tensors, which a panic left, may go meanwhile.
    let is_made = |event: &Event| matches!(event.kind, EventKind::Alloc(..));
    assert!(!scopes_only.finish().iter().any(is_made));

    keep_apart();
    let recording = record_all();
    step();
    let snapshot = Snapshot::at_peak(&recording.finish()).expect("there were tensors");
    // The input, its exponentials, and the gradients of both.
    assert!(snapshot.live_bytes >= 4 * 4096 * 3, "{snapshot}");
    assert_eq!(recorder(), Recorder::None, "it is over");

    // A budget that is in force stays so.
    let budget = MemoryBudget::bytes(2 * 4 * 4096).strict().install_apart();
    let recording = record_all();
    let refused = std::panic::catch_unwind(step);
    assert!(refused.is_err() && recording.take().iter().any(is_made));
    drop((recording, budget));
}

/// The module that holds the memory, and what it is for.
#[test]
fn holders_tell_the_parameter_in_use_and_the_kind() {
    use burn::nn::LinearConfig;
    let device = Default::default();
    let model = vec![
        LinearConfig::new(64, 64).init::<B>(&device),
        LinearConfig::new(64, 64).init(&device),
    ];
    let before = model[1].weight.val().into_data();
    let model = name_parameters::<B, _>(model);
    assert_eq!(model[1].weight.val().into_data(), before);
    assert!(model[1].weight.val().is_require_grad());
    keep_apart();
    let recording = record_all();
    let x = Tensor::<B, 2>::ones([256, 64], &device);
    let y = model[0].forward(x).exp();
    let y = model[1].forward(y).exp();
    drop(y.sum().backward());
    let snapshot = Snapshot::at_peak(&recording.finish()).expect("there were tensors");
    let held = |owner: &str, kind| {
        let is = |holder: &&Holder| holder.owner == owner && holder.kind == kind;
        let bytes = snapshot.holders.iter().find(is).map(|holder| holder.bytes);
        assert_eq!(bytes, Some(256 * 64 * 4), "{owner}: {snapshot}");
    };
    held("float_exp after 0.bias", Kind::Activation);
    held("linear after 1.bias", Kind::Activation);
    let gradient = |holder: &Holder| holder.kind == Kind::Gradient;
    assert!(snapshot.holders.iter().any(gradient), "{snapshot}");
}

#[test]
fn collectives_are_slices() {
    let recording = trace::record();
    trace::collective("all_reduce", Duration::from_millis(3), 8);
    let json = chrome_trace(&recording.finish());
    let json: Value = serde_json::from_str(&json).expect("JSON");
    let slice = &json["traceEvents"][0];
    assert_eq!((&slice["ph"], &slice["dur"]), (&"X".into(), &3000.0.into()));
    assert_eq!(
        (&slice["name"], &slice["args"]["bytes"]),
        (&"all_reduce".into(), &8.into())
    );
}

/// What a strict budget refuses is told with what was in its way.
#[test]
fn what_was_there_when_a_budget_was_too_small_is_known() {
    let recording = trace::record();
    let refused = std::panic::catch_unwind(|| {
        let _budget = MemoryBudget::bytes(3 * 4096).strict().install_apart();
        let numbers = burn::tensor::Distribution::Default;
        let random = |_| Tensor::<B, 1>::random([1024], numbers, &Default::default());
        (0..4).map(random).collect::<Vec<_>>().len()
    });
    assert!(refused.is_err());
    let events = recording.finish();
    let snapshot = Snapshot::at_peak(&events).expect("there were tensors");
    assert_eq!(snapshot.live_bytes, 3 * 4096);
    assert_eq!(snapshot.holders[0].owner, "float_random");
}

/// The same of a program that goes on, whose tensors did not go with the panic.
#[test]
fn what_is_left_after_it_is_known() {
    let recording = trace::record();
    let mut kept = Vec::new();
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _budget = MemoryBudget::bytes(3 * 4096).strict().install_apart();
        for _ in 0..4 {
            let numbers = burn::tensor::Distribution::Default;
            kept.push(Tensor::<B, 1>::random([1024], numbers, &Default::default()));
        }
    }));
    assert!(refused.is_err());
    kept.pop();
    let snapshot = Snapshot::at_end(&recording.finish()).expect("there were tensors");
    assert_eq!(snapshot.live_bytes, 2 * 4096);
    assert_eq!(snapshot.holders[0].owner, "float_random");
}

#[test]
fn a_trace_is_json_whose_slices_are_nested() {
    let events = events();
    let json: Value = serde_json::from_str(&chrome_trace(&events)).expect("JSON");
    let entries = json["traceEvents"].as_array().expect("a list");
    let of = |phase: &str| entries.iter().filter(|entry| entry["ph"] == phase).count();
    assert_eq!((of("B"), of("E")), (2, 2));
    let replays = |event: &&Event| matches!(event.kind, EventKind::Replay { .. });
    assert_eq!(of("X"), events.iter().filter(replays).count());
    assert!(of("X") > 0);
    assert_eq!(
        of("C"),
        events.iter().filter(|event| event.device.is_some()).count()
    );
    let labels = entries.iter().filter(|entry| entry["ph"] == "B");
    let labels: Vec<_> = labels.filter_map(|entry| entry["name"].as_str()).collect();
    assert_eq!(labels, ["first", "the \"second\""]);
}

/// A scope that a panic leaves is over in its trace too.
#[test]
fn a_scope_that_panicked_is_not_around_what_follows() {
    let recording = trace::record();
    let x = Tensor::<B, 1>::ones([1024], &Default::default());
    let fails = || checkpoint_labelled::<()>("first", Policy::Keep, || panic!("in a scope"));
    assert!(std::panic::catch_unwind(fails).is_err());
    let y = checkpoint_labelled("second", Policy::Keep, || x.exp());
    let events = recording.finish();
    let snapshot = Snapshot::at_end(&events).expect("there were tensors");
    assert_eq!(snapshot.holders[0].owner, "second/float_exp");
    let json: Value = serde_json::from_str(&chrome_trace(&events)).expect("JSON");
    let entries = json["traceEvents"].as_array().expect("a list");
    let of = |phase: &str| entries.iter().filter(|entry| entry["ph"] == phase).count();
    assert_eq!((of("B"), of("E")), (2, 2));
    drop(y);
}

/// One of several results of an operation goes alone.
#[test]
fn results_of_one_operation_are_held_apart() {
    use burn::tensor::module::max_pool2d_with_indices;
    keep_apart();
    let recording = record_all();
    let x = Tensor::<B, 4>::ones([1, 1, 32, 32], &Default::default());
    let (y, indices) = max_pool2d_with_indices(x, [2, 2], [2, 2], [0, 0], [1, 1], false);
    drop(indices);
    let snapshot = Snapshot::at_end(&recording.finish()).expect("there were tensors");
    let held = snapshot
        .holders
        .iter()
        .map(|held| (&*held.owner, held.bytes));
    let held: Vec<_> = held.collect();
    assert_eq!(
        held,
        [("max_pool2d_with_indices", 16 * 16 * 4)],
        "{snapshot}"
    );
    drop(y);
}
