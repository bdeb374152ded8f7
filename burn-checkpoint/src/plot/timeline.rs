//! The parts of a trace that are drawn, as numbers.

use std::collections::HashMap;

use burn_backend::DeviceId;

use crate::trace::{Event, EventKind};

/// A trace as curves, bands and marks. Positions are numbers of events.
#[derive(Debug, Default)]
pub(super) struct Timeline {
    /// Live bytes of each device that was used, at every event.
    pub curves: Vec<Curve>,
    /// Scopes, and where they were replayed: outermost first, each in the order of begin.
    pub bands: Vec<Band>,
    /// What moved, a row for each kind that occurs.
    pub rows: Vec<Row>,
    /// Where the axis ends.
    pub end: f64,
}

#[derive(Debug)]
pub(super) struct Curve {
    pub device: DeviceId,
    pub points: Vec<(f64, u64)>,
}

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

/// What happens to a tensor between its first computation and its end, in the order of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
}

/// The highest point of the curves.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Peak {
    pub at: f64,
    pub bytes: u64,
}

impl Timeline {
    pub fn new(events: &[Event]) -> Self {
        let mut reader = Reader::default();
        for (number, event) in events.iter().enumerate() {
            reader.read(event, number as f64);
        }
        reader.finish()
    }

    pub fn peak(&self) -> Peak {
        let points = self.curves.iter().flat_map(|curve| &curve.points);
        let peaks = points.map(|&(at, bytes)| Peak { at, bytes });
        peaks.fold(Peak::default(), |peak, point| {
            match point.bytes > peak.bytes {
                true => point,
                false => peak,
            }
        })
    }

    /// Number of rows that the bands take.
    pub fn depth(&self) -> usize {
        let depths = self.bands.iter().map(|band| band.depth + 1);
        depths.max().unwrap_or(0)
    }
}

#[derive(Default)]
struct Reader {
    timeline: Timeline,
    scopes: HashMap<u64, Seen>,
    /// Open scopes, outermost first.
    open: Vec<u64>,
    /// The scope that a node was made in.
    home: HashMap<u64, u64>,
    /// By depth, the last band that is a replay.
    replays: Vec<Option<usize>>,
}

struct Seen {
    label: String,
    parent: Option<u64>,
    /// Index of its band.
    band: usize,
}

impl Reader {
    fn read(&mut self, event: &Event, at: f64) {
        self.timeline.end = self.timeline.end.max(at);
        match &event.kind {
            EventKind::ScopeBegin { scope, label } => self.begin(*scope, label, at),
            EventKind::ScopeEnd { scope, .. } => self.end(*scope, at),
            EventKind::Alloc(traced, _) => {
                if let Some(scope) = self.open.last() {
                    self.home.insert(traced.node, *scope);
                }
            }
            EventKind::Replay(traced, _) => self.replay(traced.node, at),
            _ => {}
        }
        if let Some(device) = event.device {
            self.live(device, at, event.live_bytes);
        }
        if let Some(movement) = Movement::of(&event.kind) {
            self.movement(movement, at, event.bytes);
        }
    }

    fn begin(&mut self, scope: u64, label: &str, at: f64) {
        let bands = &mut self.timeline.bands;
        let seen = Seen {
            label: label.to_owned(),
            parent: self.open.last().copied(),
            band: bands.len(),
        };
        bands.push(Band {
            depth: self.open.len(),
            scope,
            label: label.to_owned(),
            begin: at,
            end: at,
            pass: Pass::Forward,
        });
        self.scopes.insert(scope, seen);
        self.open.push(scope);
    }

    fn end(&mut self, scope: u64, at: f64) {
        // A panic may have left inner scopes open.
        while let Some(open) = self.open.pop() {
            self.timeline.bands[self.scopes[&open].band].end = at;
            if open == scope {
                break;
            }
        }
    }

    /// Extends the bands of all scopes that the node was made in.
    fn replay(&mut self, node: u64, at: f64) {
        let mut path = Vec::new();
        let mut scope = self.home.get(&node).copied();
        while let Some(number) = scope {
            path.push(number);
            scope = self.scopes[&number].parent;
        }
        path.reverse();
        self.replays
            .resize(self.replays.len().max(path.len()), None);
        for (depth, last) in self.replays.iter_mut().enumerate() {
            let bands = &mut self.timeline.bands;
            match (path.get(depth), *last) {
                (None, _) => *last = None,
                (Some(scope), Some(band)) if bands[band].scope == *scope => bands[band].end = at,
                (Some(scope), _) => {
                    *last = Some(bands.len());
                    bands.push(Band {
                        depth,
                        scope: *scope,
                        label: self.scopes[scope].label.clone(),
                        begin: at,
                        end: at,
                        pass: Pass::Replay,
                    });
                }
            }
        }
    }

    fn live(&mut self, device: DeviceId, at: f64, live_bytes: u64) {
        let curves = &mut self.timeline.curves;
        let known = curves.iter().position(|curve| curve.device == device);
        let known = known.unwrap_or_else(|| {
            curves.push(Curve {
                device,
                points: Vec::new(),
            });
            curves.len() - 1
        });
        curves[known].points.push((at, live_bytes));
    }

    fn movement(&mut self, movement: Movement, at: f64, bytes: u64) {
        let rows = &mut self.timeline.rows;
        let row = rows.iter().position(|row| row.movement == movement);
        let row = row.unwrap_or_else(|| {
            rows.push(Row {
                movement,
                bytes: 0,
                at: Vec::new(),
            });
            rows.len() - 1
        });
        rows[row].bytes += bytes;
        rows[row].at.push(at);
    }

    fn finish(mut self) -> Timeline {
        let end = self.timeline.end;
        for open in self.open {
            self.timeline.bands[self.scopes[&open].band].end = end;
        }
        self.timeline.rows.sort_by_key(|row| row.movement);
        self.timeline
    }
}
