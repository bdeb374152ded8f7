//! The parts of a trace that are drawn, as numbers.

use std::collections::{BTreeMap, HashMap};

use burn_backend::DeviceId;
use plotters::style::RGBColor;

use crate::trace::{Event, EventKind};

/// A trace as curves, bands and marks. Positions are numbers of events.
#[derive(Debug)]
pub(super) struct Timeline {
    /// Live bytes of each device that was used, at every event of it.
    pub curves: BTreeMap<DeviceId, Vec<Point>>,
    /// Scopes, and where they were replayed: outermost first, each in the order of begin.
    pub bands: Vec<Band>,
    /// What moved, a row for each kind that occurs.
    pub rows: Vec<Row>,
    /// Where the axis ends.
    pub end: f64,
}

/// A position and the bytes that are live there.
pub(super) type Point = (f64, u64);

#[derive(Debug, PartialEq)]
pub(super) struct Band {
    /// How many scopes are around it.
    pub depth: usize,
    /// The index of the scope's band in forward.
    pub scope: usize,
    pub label: String,
    pub begin: f64,
    pub end: f64,
    pub pass: Pass,
}

/// Why a scope's operations run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    Replay,
}

#[derive(Debug)]
pub(super) struct Row {
    /// What happened to the tensors.
    pub name: &'static str,
    pub color: RGBColor,
    pub bytes: u64,
    pub at: Vec<f64>,
}

type IsOfRow = fn(&EventKind) -> bool;

/// What happens to a tensor between its first computation and its end.
const ROWS: [(&str, RGBColor, IsOfRow); 4] = [
    ("evicted", RGBColor(210, 120, 30), |kind| {
        matches!(kind, EventKind::Evict(..))
    }),
    ("replayed", RGBColor(40, 140, 80), |kind| {
        matches!(kind, EventKind::Replay(..))
    }),
    ("offloaded", RGBColor(130, 80, 170), |kind| {
        matches!(kind, EventKind::Offload(..))
    }),
    ("uploaded", RGBColor(30, 130, 170), |kind| {
        matches!(kind, EventKind::Upload(..))
    }),
];

/// The row of the events for which `is_of_row` is true.
fn row(events: &[Event], (name, color, is_of_row): (&'static str, RGBColor, IsOfRow)) -> Row {
    let events = events.iter().enumerate();
    let events = events.filter(|(_, event)| is_of_row(&event.kind));
    let (at, bytes): (_, Vec<u64>) = events
        .map(|(number, event)| (number as f64, event.bytes))
        .unzip();
    Row {
        name,
        color,
        bytes: bytes.into_iter().sum(),
        at,
    }
}

impl Timeline {
    pub fn new(events: &[Event]) -> Self {
        let mut curves = BTreeMap::<_, Vec<_>>::new();
        let mut scopes = Scopes::default();
        for (number, event) in events.iter().enumerate() {
            let at = number as f64;
            scopes.read(&event.kind, at);
            if let Some(device) = event.device {
                let points = curves.entry(device).or_default();
                points.push((at, event.live_bytes));
            }
        }
        let end = events.len().saturating_sub(1) as f64;
        let rows = ROWS.map(|of| row(events, of)).into_iter();
        Self {
            curves,
            bands: scopes.finish(end),
            rows: rows.filter(|row| !row.at.is_empty()).collect(),
            end,
        }
    }

    /// The highest point of the curves.
    pub fn peak(&self) -> Point {
        let points = self.curves.values().flatten().rev();
        let peak = points.max_by_key(|(_, bytes)| *bytes);
        peak.copied().unwrap_or_default()
    }

    /// Number of rows that the bands take.
    pub fn depth(&self) -> usize {
        let depths = self.bands.iter().map(|band| band.depth + 1);
        depths.max().unwrap_or(0)
    }
}

/// The bands so far.
#[derive(Default)]
struct Scopes {
    bands: Vec<Band>,
    /// Open scopes, outermost first.
    open: Vec<usize>,
    /// The scopes that a node was made in, outermost first.
    made_in: HashMap<u64, Vec<usize>>,
    /// By depth, the last band that is a replay.
    replays: Vec<Option<usize>>,
}

impl Scopes {
    fn read(&mut self, kind: &EventKind, at: f64) {
        match kind {
            EventKind::ScopeBegin { label } => {
                let (depth, scope, label) = (self.open.len(), self.bands.len(), label.clone());
                self.open.push(scope);
                self.bands.push(Band {
                    depth,
                    scope,
                    label,
                    begin: at,
                    end: at,
                    pass: Pass::Forward,
                });
            }
            EventKind::ScopeEnd => {
                if let Some(open) = self.open.pop() {
                    self.bands[open].end = at;
                }
            }
            EventKind::Alloc(traced, _) if !self.open.is_empty() => {
                self.made_in.insert(traced.node, self.open.clone());
            }
            EventKind::Replay(traced, _) => self.replay(traced.node, at),
            _ => {}
        }
    }

    /// Extends the bands of all scopes that the node was made in.
    fn replay(&mut self, node: u64, at: f64) {
        let Self { bands, replays, .. } = self;
        let path = self.made_in.get(&node).map_or(&[][..], Vec::as_slice);
        replays.resize(replays.len().max(path.len()), None);
        for (depth, last) in replays.iter_mut().enumerate() {
            let Some(&scope) = path.get(depth) else {
                *last = None;
                continue;
            };
            match *last {
                Some(band) if bands[band].scope == scope => bands[band].end = at,
                _ => {
                    *last = Some(bands.len());
                    bands.push(Band {
                        depth,
                        scope,
                        label: bands[scope].label.clone(),
                        begin: at,
                        end: at,
                        pass: Pass::Replay,
                    });
                }
            }
        }
    }

    /// The bands, those of open scopes up to `end`.
    fn finish(mut self, end: f64) -> Vec<Band> {
        for open in self.open {
            self.bands[open].end = end;
        }
        self.bands
    }
}
