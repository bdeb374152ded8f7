//! A [`trace`](crate::trace) read as a snapshot, best one by [`record_all`](crate::record_all()),
//! which sees every tensor: what holds the memory at its peak or at its end, and a file for
//! Perfetto.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use burn_backend::DeviceId;
use serde_json::{Value, json};

use crate::error::size;
use crate::observe::trace::{Event, EventKind, Kind, Traced};

/// What holds the memory of a device at one time of a trace. Displayed it is a table of the twenty
/// largest holders.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::Tensor;
/// use burn_checkpoint::snapshot::Snapshot;
/// use burn_checkpoint::{Remat, record_all};
/// use burn_flex::Flex;
///
/// let recording = record_all();
/// let x = Tensor::<Autodiff<Remat<Flex>>, 1>::ones([1024], &Default::default()).require_grad();
/// x.exp().log().sum().backward();
/// let snapshot = Snapshot::at_peak(&recording.finish()).expect("there were tensors");
/// println!("{snapshot}");
/// let of_holders = snapshot.holders.iter().map(|holder| holder.bytes);
/// assert_eq!(of_holders.sum::<u64>(), snapshot.live_bytes);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// The device.
    pub device: DeviceId,
    /// Time since the recording began.
    pub at: Duration,
    /// Bytes that managed tensors of the device occupy then.
    pub live_bytes: u64,
    /// What holds them, the largest first.
    pub holders: Vec<Holder>,
}

/// Tensors of one operation in one scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The labels of the scopes that they were made in, outermost first, and the operation:
    /// `block 3/float_matmul`; then `after` and the parameter in use, if
    /// [`name_parameters`](crate::name_parameters) has named it. `before` for tensors made before
    /// the recording.
    pub owner: String,
    /// What they are for.
    pub kind: Kind,
    /// Bytes.
    pub bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
}

/// The tensors in use after the events that were added.
#[derive(Default)]
pub(crate) struct InUse {
    /// The labels of open scopes, each with a slash.
    scopes: Vec<String>,
    /// The parameter in use, as an owner ends with it.
    after: String,
    /// One entry for each tensor.
    nodes: HashMap<(DeviceId, u64), Holder>,
    /// Dropped nodes whose storage a view keeps.
    viewed: Vec<(DeviceId, u64)>,
    live_bytes: HashMap<DeviceId, u64>,
}

/// The number of nodes above which those without storage are forgotten.
const MANY: usize = 1 << 16;

impl InUse {
    /// Adds these events. Returns the tensors in use at the event with the most live bytes, if any
    /// is of a tensor.
    pub fn follow(&mut self, events: &[Event]) -> Option<Snapshot> {
        let indexed = events.iter().enumerate().rev();
        let of_tensors = indexed.filter(|(_, event)| event.device.is_some());
        let peak = of_tensors.max_by_key(|(_, event)| event.live_bytes);
        let (before, after) = events.split_at(peak.map_or(0, |(index, _)| index + 1));
        before.iter().for_each(|event| self.add(event));
        let snapshot = before.last().and_then(|event| self.snapshot(event));
        after.iter().for_each(|event| self.add(event));
        if self.nodes.len() > MANY {
            // Most were evicted and are gone by now.
            self.nodes.retain(|_, held| held.bytes > 0);
        }
        snapshot
    }

    fn add(&mut self, event: &Event) {
        let (&Traced { op, node }, is_there) = match &event.kind {
            EventKind::ScopeBegin { label } => return self.scopes.push(format!("{label}/")),
            EventKind::ScopeEnd => return drop(self.scopes.pop()),
            EventKind::Parameter { path } => return self.after = format!(" after {path}"),
            EventKind::Collective { .. } => return,
            EventKind::Alloc(traced, _)
            | EventKind::Replay(traced, _)
            | EventKind::Upload(traced) => (traced, true),
            EventKind::Evict(traced)
            | EventKind::Offload(traced)
            | EventKind::Retire(traced)
            | EventKind::Free(traced) => (traced, false),
        };
        let Some(device) = event.device else { return };
        // A view changes nothing: its bytes are those of the tensor it is a view of.
        let before = self.live_bytes.insert(device, event.live_bytes);
        let key = (device, node);
        if is_there {
            let (owner, kind) = match event.kind {
                EventKind::Alloc(_, kind) => (self.scopes.concat() + op + &self.after, kind),
                _ => (op.to_owned(), Kind::Before),
            };
            let before = before.unwrap_or(event.live_bytes.saturating_sub(event.bytes));
            let held = self.nodes.entry(key).or_insert(Holder {
                owner,
                kind,
                bytes: 0,
                tensors: 1,
            });
            held.bytes += event.live_bytes.saturating_sub(before);
            return;
        }
        let bytes = |key: &(DeviceId, u64)| self.nodes.get(key).map_or(0, |held| held.bytes);
        match (bytes(&key), event.bytes) {
            (0, 0) => {}
            // The last view of a storage frees it.
            (0, freed) => {
                if let Some(last) = self.viewed.iter().rposition(|key| bytes(key) == freed) {
                    self.nodes.remove(&self.viewed.remove(last));
                }
            }
            (_, 0) => self.viewed.push(key),
            // It may come back: the owner stays.
            (..) if !matches!(event.kind, EventKind::Free { .. }) => {
                let held = self.nodes.get_mut(&key);
                held.into_iter().for_each(|held| held.bytes = 0);
            }
            (..) => drop(self.nodes.remove(&key)),
        }
    }

    /// The snapshot after `last`, the last event of a tensor.
    fn snapshot(&self, last: &Event) -> Option<Snapshot> {
        let (device, live_bytes) = (last.device?, last.live_bytes);
        let of_device = self.nodes.iter().filter(|((of, _), _)| *of == device);
        let known = of_device
            .map(|(_, held)| held)
            .filter(|held| held.bytes > 0)
            .map(|held| (&*held.owner, held.kind, held.bytes));
        let known_bytes = known.clone().map(|(.., bytes)| bytes).sum();
        let before_bytes = live_bytes.saturating_sub(known_bytes);
        let before = (before_bytes > 0).then_some(("before", Kind::Before, before_bytes));
        let all = known.chain(before);
        Some(Snapshot::new(device, last.at, live_bytes, all))
    }
}

impl Snapshot {
    /// At the most live bytes of any device; `None` without events of tensors.
    pub fn at_peak(events: &[Event]) -> Option<Self> {
        InUse::default().follow(events)
    }

    /// At the last event of a tensor: shows what was alive when an operation did not fit or a
    /// budget was too small.
    pub fn at_end(events: &[Event]) -> Option<Self> {
        let mut in_use = InUse::default();
        events.iter().for_each(|event| in_use.add(event));
        let last = events.iter().rfind(|event| event.device.is_some())?;
        in_use.snapshot(last)
    }

    /// A snapshot of tensors, given by owner, kind and bytes.
    pub(crate) fn new<'a>(
        device: DeviceId,
        at: Duration,
        live_bytes: u64,
        tensors: impl IntoIterator<Item = (&'a str, Kind, u64)>,
    ) -> Self {
        let mut alike: HashMap<_, Holder> = HashMap::new();
        for (owner, kind, bytes) in tensors {
            let holder = alike.entry((owner, kind)).or_insert_with(|| Holder {
                owner: owner.to_owned(),
                kind,
                bytes: 0,
                tensors: 0,
            });
            holder.bytes += bytes;
            holder.tensors += 1;
        }
        let mut holders: Vec<_> = alike.into_values().collect();
        holders.sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.owner.cmp(&b.owner)));
        Self {
            device,
            at,
            live_bytes,
            holders,
        }
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = self.at.as_secs_f64() * 1e3;
        let live = size(self.live_bytes);
        write!(f, "{live} in use after {milliseconds:.1} ms:")?;
        for holder in self.holders.iter().take(20) {
            let (bytes, tensors) = (size(holder.bytes), holder.tensors);
            let (kind, owner) = (format!("{:?}", holder.kind), &holder.owner);
            write!(f, "\n{bytes:>12}  {tensors:>5}  {kind:10}  {owner}")?;
        }
        Ok(())
    }
}

/// The trace as JSON in Chrome's trace format, which <https://ui.perfetto.dev> and
/// `chrome://tracing` open: scopes as slices, replays and collectives as slices of their own
/// tracks, operations, evictions and transfers as instants, and each device's bytes in use as a
/// counter.
pub fn chrome_trace(events: &[Event]) -> String {
    let entries: Vec<_> = events.iter().flat_map(entries).collect();
    json!({"displayTimeUnit": "ms", "traceEvents": entries}).to_string()
}

fn entries(event: &Event) -> Vec<Value> {
    let microseconds = |time: Duration| time.as_nanos() as f64 / 1e3;
    let ts = microseconds(event.at);
    let scope = |label: &str, phase: &str| {
        vec![json!({"name": label, "cat": "scope", "ph": phase, "ts": ts, "pid": 1, "tid": 1})]
    };
    let of = |traced: &Traced, category, track| (traced.op, Some(traced.node), category, track);
    let (name, node, category, track) = match &event.kind {
        EventKind::ScopeBegin { label } => return scope(label, "B"),
        EventKind::ScopeEnd => return scope("", "E"),
        EventKind::Parameter { .. } => return Vec::new(),
        EventKind::Alloc(traced, _) => of(traced, "operation", 1),
        EventKind::Replay(traced, _) => of(traced, "replay", 2),
        EventKind::Evict(traced) => of(traced, "eviction", 2),
        EventKind::Offload(traced) | EventKind::Upload(traced) => of(traced, "transfer", 3),
        EventKind::Retire(traced) | EventKind::Free(traced) => of(traced, "free", 1),
        EventKind::Collective { op, .. } => (*op, None, "collective", 4),
    };
    let args = json!({"node": node, "bytes": event.bytes});
    let mut entry = json!({"name": name, "cat": category, "pid": 1, "tid": track, "args": args});
    if let EventKind::Replay(_, time) | EventKind::Collective { time, .. } = event.kind {
        entry["ph"] = "X".into();
        entry["ts"] = microseconds(event.at.saturating_sub(time)).into();
        entry["dur"] = microseconds(time).into();
    } else {
        entry["ph"] = "i".into();
        entry["s"] = "t".into();
        entry["ts"] = ts.into();
    }
    let mut entries = vec![entry];
    if let Some(DeviceId { type_id, index_id }) = event.device {
        let name = format!("bytes in use, device {type_id}.{index_id}");
        let args = json!({"bytes": event.live_bytes});
        entries.push(json!({"name": name, "ph": "C", "ts": ts, "pid": 1, "args": args}));
    }
    entries
}
