//! The parts of a trace that are drawn, as numbers.

use std::collections::{BTreeMap, HashMap};

use burn_backend::DeviceId;
use plotters::style::RGBColor;

use burn_checkpoint::trace::{Event, EventKind};

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

#[derive(Clone, Debug, PartialEq)]
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

impl Timeline {
    pub fn new(events: &[Event]) -> Self {
        // What happens to a tensor between its first computation and its end.
        let mut rows = [
            ("evicted", RGBColor(210, 120, 30)),
            ("replayed", RGBColor(40, 140, 80)),
            ("offloaded", RGBColor(130, 80, 170)),
            ("uploaded", RGBColor(30, 130, 170)),
        ]
        .map(|(name, color)| Row {
            name,
            color,
            bytes: 0,
            at: Vec::new(),
        });
        let mut curves = BTreeMap::<_, Vec<_>>::new();
        let mut scopes = Scopes::default();
        for (number, event) in events.iter().enumerate() {
            let at = number as f64;
            scopes.read(&event.kind, at);
            if let Some(device) = event.device {
                let points = curves.entry(device).or_default();
                points.push((at, event.live_bytes));
            }
            let row = match event.kind {
                EventKind::Evict(_) => &mut rows[0],
                EventKind::Replay(..) => &mut rows[1],
                EventKind::Offload(_) => &mut rows[2],
                EventKind::Upload(_) => &mut rows[3],
                _ => continue,
            };
            row.bytes += event.bytes;
            row.at.push(at);
        }
        let end = events.len().saturating_sub(1) as f64;
        for open in scopes.open {
            scopes.bands[open].end = end;
        }
        Self {
            curves,
            bands: scopes.bands,
            rows: rows.into_iter().filter(|row| !row.at.is_empty()).collect(),
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
    /// The bands of the scopes that are replayed, outermost first.
    replays: Vec<usize>,
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
        let same = |&(&band, &scope): &(&usize, &usize)| bands[band].scope == scope;
        replays.truncate(replays.iter().zip(path).take_while(same).count());
        for &band in &*replays {
            bands[band].end = at;
        }
        for &scope in &path[replays.len()..] {
            replays.push(bands.len());
            bands.push(Band {
                begin: at,
                end: at,
                pass: Pass::Replay,
                ..bands[scope].clone()
            });
        }
    }
}
