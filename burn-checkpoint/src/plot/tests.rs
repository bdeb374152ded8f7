//! Pictures of a recorded step, and of traces made up by hand.

use std::time::Duration;

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn_backend::DeviceId;
use burn_flex::Flex;

use super::MemoryPlot;
use super::timeline::{Band, Pass, Timeline};
use super::unit::Unit;
use crate::trace::{Event, EventKind, Kind, Traced, record};
use crate::{Policy, Remat, RematStats, checkpoint_labelled};

const MIB: u64 = 1 << 20;

fn svg(events: &[Event]) -> String {
    MemoryPlot::new(events).svg()
}

fn traced(node: u64) -> Traced {
    let op = "float_matmul";
    Traced { op, node }
}

/// A trace that is written like the program it comes from.
#[derive(Default)]
struct Program {
    events: Vec<Event>,
    live_bytes: u64,
    nodes: u64,
}

impl Program {
    fn push(&mut self, kind: EventKind, bytes: u64) {
        let device = !matches!(kind, EventKind::ScopeBegin { .. } | EventKind::ScopeEnd);
        self.events.push(Event {
            at: Duration::from_micros(250 * self.events.len() as u64),
            kind,
            bytes,
            live_bytes: self.live_bytes,
            device: device.then(|| DeviceId::new(0, 0)),
        });
    }

    fn alloc(&mut self, bytes: u64) -> u64 {
        let node = self.nodes;
        self.nodes += 1;
        self.live_bytes += bytes;
        self.push(EventKind::Alloc(traced(node), Kind::Activation), bytes);
        node
    }

    fn evict(&mut self, node: u64, bytes: u64) {
        self.live_bytes -= bytes;
        self.push(EventKind::Evict(traced(node)), bytes);
    }

    fn free(&mut self, node: u64, bytes: u64) {
        self.live_bytes -= bytes;
        self.push(EventKind::Free(traced(node)), bytes);
    }

    fn replay(&mut self, node: u64, bytes: u64) {
        self.live_bytes += bytes;
        self.push(EventKind::Replay(traced(node), Duration::ZERO), bytes);
    }

    fn begin(&mut self, label: &str) {
        let label = label.to_owned();
        self.push(EventKind::ScopeBegin { label }, 0);
    }

    fn end(&mut self) {
        self.push(EventKind::ScopeEnd, 0);
    }
}

/// The texts of a picture; checks that it is well-formed and has only finite numbers.
fn texts(svg: &str) -> Vec<String> {
    let document = roxmltree::Document::parse(svg).expect("well-formed XML");
    for node in document.descendants().filter(|node| node.is_element()) {
        for attribute in node.attributes() {
            let value = attribute.value();
            assert!(
                !["NaN", "inf"].iter().any(|bad| value.contains(bad)),
                "{}={value}",
                attribute.name()
            );
        }
    }
    let texts = document
        .descendants()
        .filter(|node| node.has_tag_name("text"));
    texts
        .filter_map(|node| node.text())
        .map(|text| text.trim().to_owned())
        .collect()
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
    let (_, peak_bytes) = Timeline::new(&events).peak();
    let size = |bytes| Unit::for_axis(12 * MIB).text(bytes);
    let plot = MemoryPlot::new(&events)
        .title("GPT, <every> block & more")
        .budget_bytes(12 * MIB);
    let texts = texts(&plot.svg());
    for expected in [
        format!("GPT, <every> block & more: peak {}", size(peak_bytes)),
        format!("peak {}", size(peak_bytes)),
        "live".into(),
        "budget 12.0 MiB".into(),
        "scope".into(),
        "scope replayed".into(),
        "MiB".into(),
        "events, in order".into(),
        "blocks 0-2".into(),
        "block 4".into(),
        format!(
            "evicted: {} tensors, {}",
            stats.evicted_operations,
            size(stats.evicted_bytes)
        ),
        format!(
            "replayed: {} tensors, {}",
            stats.replayed_operations,
            size(stats.replayed_bytes)
        ),
    ] {
        assert!(texts.contains(&expected), "{expected}: {texts:?}");
    }
    let none = ["offloaded", "uploaded"];
    assert!(
        !texts
            .iter()
            .any(|text| none.iter().any(|none| text.contains(none)))
    );
}

#[test]
fn nothing_recorded_is_an_empty_picture() {
    let none = texts(&svg(&[]));
    assert!(
        none.iter().any(|text| text.ends_with("peak 0.00 KiB")),
        "{none:?}"
    );
    let mut one = Program::default();
    one.alloc(10);
    texts(&svg(&one.events));
}

#[test]
fn scopes_are_bands_forward_and_where_they_are_replayed() {
    let mut program = Program::default();
    program.begin("outer");
    program.begin("inner");
    let inner = program.alloc(5);
    program.evict(inner, 5);
    program.end();
    let outer = program.alloc(3);
    program.evict(outer, 3);
    program.end();
    program.replay(outer, 3);
    program.replay(inner, 5);
    program.free(inner, 5);

    let timeline = Timeline::new(&program.events);
    let band = |depth, scope, label: &str, begin, end, pass| Band {
        depth,
        scope,
        label: label.into(),
        begin,
        end,
        pass,
    };
    let expected = [
        band(0, 0, "outer", 0.0, 7.0, Pass::Forward),
        band(1, 1, "inner", 1.0, 4.0, Pass::Forward),
        band(0, 0, "outer", 8.0, 9.0, Pass::Replay),
        band(1, 1, "inner", 9.0, 9.0, Pass::Replay),
    ];
    assert_eq!(timeline.bands, expected);
    assert_eq!(timeline.depth(), 2);
    assert_eq!(timeline.peak(), (9.0, 8));
    let movements: Vec<_> = timeline
        .rows
        .iter()
        .map(|row| (row.name, row.bytes, row.at.len()))
        .collect();
    assert_eq!(movements, [("evicted", 8, 2), ("replayed", 8, 2)]);
}

#[test]
fn a_long_trace_is_a_small_picture() {
    let mut program = Program::default();
    for _ in 0..200_000 {
        let node = program.alloc(MIB);
        program.evict(node, MIB);
    }
    let svg = svg(&program.events);
    assert!(svg.len() < 600_000, "{}", svg.len());
    assert!(texts(&svg).contains(&"peak 1.00 MiB".to_owned()));
}
