//! The parts of a trace that are drawn, as numbers.

use std::collections::{BTreeMap, HashMap};

use burn_backend::DeviceId;

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
    /// Number of the scope.
    pub scope: u64,
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
    pub movement: Movement,
    pub bytes: u64,
    pub at: Vec<f64>,
}

/// What happens to a tensor between its first computation and its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Movement {
    Evicted,
    Replayed,
    Offloaded,
    Uploaded,
}

impl Movement {
    fn of(kind: &EventKind) -> Option<Self> {
        match kind {
            EventKind::Evict { .. } => Some(Self::Evicted),
            EventKind::Replay { .. } => Some(Self::Replayed),
            EventKind::Offload { .. } => Some(Self::Offloaded),
            EventKind::Upload { .. } => Some(Self::Uploaded),
            _ => None,
        }
    }

    /// The row of all such events.
    fn row(self, events: &[Event]) -> Row {
        let moved = events.iter().enumerate();
        let moved = moved.filter(|(_, event)| Self::of(&event.kind) == Some(self));
        let mut row = Row {
            movement: self,
            bytes: 0,
            at: Vec::new(),
        };
        for (number, event) in moved {
            row.bytes += event.bytes;
            row.at.push(number as f64);
        }
        row
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
        let rows = [
            Movement::Evicted,
            Movement::Replayed,
            Movement::Offloaded,
            Movement::Uploaded,
        ];
        let rows = rows.map(|movement| movement.row(events)).into_iter();
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

/// The bands so far. A scope is known by the index of its band in forward.
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
            EventKind::ScopeBegin { scope, label } => {
                let (depth, label) = (self.open.len(), label.clone());
                self.open.push(self.bands.len());
                self.bands.push(Band {
                    depth,
                    scope: *scope,
                    label,
                    begin: at,
                    end: at,
                    pass: Pass::Forward,
                });
            }
            EventKind::ScopeEnd { scope, .. } => {
                // A panic may have left inner scopes open.
                while let Some(open) = self.open.pop() {
                    self.bands[open].end = at;
                    if self.bands[open].scope == *scope {
                        break;
                    }
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
            let Some(forward) = path.get(depth) else {
                *last = None;
                continue;
            };
            let scope = bands[*forward].scope;
            match *last {
                Some(band) if bands[band].scope == scope => bands[band].end = at,
                _ => {
                    *last = Some(bands.len());
                    bands.push(Band {
                        depth,
                        scope,
                        label: bands[*forward].label.clone(),
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
