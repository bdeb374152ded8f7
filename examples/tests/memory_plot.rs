//! Pictures of a recorded step, and of traces made up by hand.

use std::time::Duration;

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn_backend::DeviceId;
use burn_checkpoint::trace::{Event, EventKind, Kind, Traced, record};
use burn_checkpoint::{Policy, Remat, RematStats, checkpoint_labelled};
use burn_flex::Flex;
use examples::memory_plot::MemoryPlot;

const MIB: u64 = 1 << 20;

/// Bytes as the pictures show them, with about three digits.
fn size(bytes: u64) -> String {
    let number = bytes as f64 / MIB as f64;
    let digits = if number < 10.0 { 2 } else { 1 };
    format!("{number:.digits$} MiB")
}

/// An event of the tensor with this number.
fn event(kind: fn(Traced) -> EventKind, node: u64, bytes: u64, live_bytes: u64) -> Event {
    let op = "float_matmul";
    Event {
        at: Duration::ZERO,
        kind: kind(Traced { op, node }),
        bytes,
        live_bytes,
        device: Some(DeviceId::new(0, 0)),
    }
}

fn alloc(traced: Traced) -> EventKind {
    EventKind::Alloc(traced, Kind::Activation)
}

/// The texts of a picture; checks that it is well-formed and has only finite numbers.
fn texts(svg: &str) -> Vec<String> {
    let document = roxmltree::Document::parse(svg).expect("well-formed XML");
    for attribute in document.descendants().flat_map(|node| node.attributes()) {
        let is_in = |bad: &str| attribute.value().contains(bad);
        assert!(!is_in("NaN") && !is_in("inf"), "{attribute:?}");
    }
    let texts = document
        .descendants()
        .filter(|node| node.has_tag_name("text"));
    let texts = texts.filter_map(|node| node.text());
    texts.map(|text| text.trim().to_owned()).collect()
}

/// A step that was recorded: its numbers are those of the counters.
#[test]
fn everything_has_its_label() {
    let x = Tensor::<Autodiff<Remat<Flex>>, 2>::ones([512, 512], &Default::default());
    let scope = |label, forward: &dyn Fn() -> _| {
        checkpoint_labelled::<Tensor<_, 2>>(label, Policy::Recompute, forward)
    };
    let recording = record();
    RematStats::reset_thread();
    let y = [0, 3].into_iter().fold(x.require_grad(), |x, first| {
        scope(format!("blocks {first}-{}", first + 2), &|| {
            (first..first + 3).fold(x.clone(), |x, block| {
                scope(format!("block {block}"), &|| x.clone().exp().sin().cos())
            })
        })
    });
    y.sum().backward();
    let (events, stats) = (recording.finish(), RematStats::of_thread());
    let peak_bytes = events.iter().map(|event| event.live_bytes).max();
    let peak = size(peak_bytes.expect("events"));
    let row = |name, tensors, bytes| format!("{name}: {tensors} tensors, {}", size(bytes));
    let plot = MemoryPlot::new(&events)
        .title("GPT, <every> block & more")
        .budget_bytes(12 * MIB);
    let texts = texts(&plot.svg());
    for expected in [
        format!("GPT, <every> block & more: peak {peak}"),
        format!("peak {peak}"),
        "live".into(),
        "budget 12.0 MiB".into(),
        "scope".into(),
        "scope replayed".into(),
        "MiB".into(),
        "events, in order".into(),
        "blocks 0-2".into(),
        "block 4".into(),
        row("evicted", stats.evicted_operations, stats.evicted_bytes),
        row("replayed", stats.replayed_operations, stats.replayed_bytes),
    ] {
        assert!(texts.contains(&expected), "{expected}: {texts:?}");
    }
    let moved = |text: &String| text.contains("offloaded") || text.contains("uploaded");
    assert!(!texts.iter().any(moved));
}

#[test]
fn nothing_recorded_is_an_empty_picture() {
    let none = texts(&MemoryPlot::new(&[]).svg());
    let is_empty = |text: &String| text.ends_with("peak 0.00 KiB");
    assert!(none.iter().any(is_empty), "{none:?}");
    texts(&MemoryPlot::new(&[event(alloc, 0, 10, 10)]).svg());
}

#[test]
fn a_long_trace_is_a_small_picture() {
    let events = (0..200_000).flat_map(|node| {
        let evict = event(EventKind::Evict, node, MIB, 0);
        [event(alloc, node, MIB, MIB), evict]
    });
    let svg = MemoryPlot::new(&events.collect::<Vec<_>>()).svg();
    assert!(svg.len() < 600_000, "{}", svg.len());
    assert!(texts(&svg).contains(&"peak 1.00 MiB".to_owned()));
}
