//! A [`trace`](crate::trace) read as a snapshot: what holds the memory at its peak or at its end, and a file for Perfetto.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use burn_backend::DeviceId;
use serde_json::{Value, json};

use crate::error::size;
use crate::trace::{Event, EventKind};

/// What holds the memory of a device at one time of a trace. Displayed it is a table of the twenty largest holders.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::Tensor;
/// use burn_checkpoint::snapshot::Snapshot;
/// use burn_checkpoint::{MemoryBudget, Remat, trace};
/// use burn_flex::Flex;
///
/// // Under a budget all tensors are seen.
/// let _all = MemoryBudget::bytes(u64::MAX).install();
/// let recording = trace::record();
/// let x = Tensor::<Autodiff<Remat<Flex>>, 1>::ones([1024], &Default::default()).require_grad();
/// x.exp().log().sum().backward();
/// let snapshot = Snapshot::at_peak(&recording.finish()).expect("there were tensors");
/// println!("{snapshot}");
/// assert_eq!(snapshot.holders.iter().map(|holder| holder.bytes).sum::<u64>(), snapshot.live_bytes);
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
    /// The labels of the scopes that they were made in, outermost first, and the operation: `block 3/float_matmul`. What was there before the
    /// recording is `before`.
    pub owner: String,
    /// Bytes.
    pub bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
}

impl Snapshot {
    /// At the most live bytes of any device; `None` without events of tensors.
    pub fn at_peak(events: &[Event]) -> Option<Self> {
        let of_device = events.iter().enumerate().rev();
        let of_device = of_device.filter(|(_, event)| event.device.is_some());
        let (peak, _) = of_device.max_by_key(|(_, event)| event.live_bytes)?;
        Self::at(&events[..=peak])
    }

    /// At the last event of a tensor: where an operation did not fit or a budget was too small, what was alive then.
    pub fn at_end(events: &[Event]) -> Option<Self> {
        let last = events.iter().rposition(|event| event.device.is_some())?;
        Self::at(&events[..=last])
    }

    /// After these events, of which the last is of a tensor.
    fn at(events: &[Event]) -> Option<Self> {
        let last = events.last()?;
        let device = last.device?;
        let mut scopes: Vec<&str> = Vec::new();
        let mut homes: HashMap<u64, String> = HashMap::new();
        let mut held: HashMap<u64, u64> = HashMap::new();
        // Nodes that are gone, whose storage a view keeps.
        let mut viewed: Vec<u64> = Vec::new();
        let mut live_bytes = None;
        for event in events {
            match &event.kind {
                EventKind::ScopeBegin { label, .. } => scopes.push(label),
                EventKind::ScopeEnd { .. } => drop(scopes.pop()),
                EventKind::Alloc { op, node } => {
                    let path = scopes.iter().chain([op]).copied();
                    homes.insert(*node, path.collect::<Vec<_>>().join("/"));
                }
                _ => {}
            }
            if event.device != Some(device) {
                continue;
            }
            // A view changes nothing: its bytes are those of what it is of.
            let before = live_bytes.replace(event.live_bytes);
            let (op, node, is_there) = tensor(&event.kind)?;
            if is_there {
                homes.entry(node).or_insert_with(|| op.to_owned());
                let before = before.unwrap_or(event.live_bytes.saturating_sub(event.bytes));
                let added = event.live_bytes.saturating_sub(before);
                *held.entry(node).or_default() += added;
                continue;
            }
            let freed = event.bytes;
            match held.get(&node).copied().unwrap_or(0) {
                0 if freed == 0 => {}
                // The last view of a storage frees it.
                0 => {
                    let of_view = |node: &u64| held.get(node) == Some(&freed);
                    if let Some(last) = viewed.iter().rposition(of_view) {
                        held.remove(&viewed.remove(last));
                    }
                }
                _ if freed == 0 => viewed.push(node),
                _ => drop(held.remove(&node)),
            }
        }
        let known = held.values().sum::<u64>();
        let mut holders: HashMap<&str, (u64, usize)> = HashMap::new();
        for (node, bytes) in held.iter().filter(|(_, bytes)| **bytes > 0) {
            let holder = holders.entry(&homes[node]).or_default();
            *holder = (holder.0 + bytes, holder.1 + 1);
        }
        if let before @ 1.. = last.live_bytes.saturating_sub(known) {
            holders.insert("before", (before, 1));
        }
        let holder = |(owner, (bytes, tensors)): (&str, _)| Holder {
            owner: owner.to_owned(),
            bytes,
            tensors,
        };
        let mut holders: Vec<_> = holders.into_iter().map(holder).collect();
        holders.sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.owner.cmp(&b.owner)));
        Some(Self {
            device,
            at: last.at,
            live_bytes: last.live_bytes,
            holders,
        })
    }
}

/// The operation and the node of an event of a tensor, and whether its storage is there after it.
fn tensor(kind: &EventKind) -> Option<(&'static str, u64, bool)> {
    Some(match kind {
        EventKind::Alloc { op, node }
        | EventKind::Replay { op, node, .. }
        | EventKind::Upload { op, node } => (op, *node, true),
        EventKind::Evict { op, node }
        | EventKind::Offload { op, node }
        | EventKind::Retire { op, node }
        | EventKind::Free { op, node } => (op, *node, false),
        EventKind::ScopeBegin { .. } | EventKind::ScopeEnd { .. } => return None,
    })
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = self.at.as_secs_f64() * 1e3;
        let live = size(self.live_bytes);
        write!(f, "{live} in use after {milliseconds:.1} ms:")?;
        for holder in self.holders.iter().take(20) {
            let (bytes, tensors) = (size(holder.bytes), holder.tensors);
            write!(f, "\n{bytes:>12}  {tensors:>5}  {}", holder.owner)?;
        }
        Ok(())
    }
}

/// The trace as JSON in Chrome's trace format, which <https://ui.perfetto.dev> and `chrome://tracing` open: scopes as slices, replays as
/// slices of their own track, operations, evictions and transfers as instants, and each device's bytes in use as a counter.
pub fn chrome_trace(events: &[Event]) -> String {
    let entries: Vec<_> = events.iter().flat_map(entries).collect();
    json!({"displayTimeUnit": "ms", "traceEvents": entries}).to_string()
}

/// The entries of an event.
fn entries(event: &Event) -> Vec<Value> {
    let microseconds = |time: Duration| time.as_nanos() as f64 / 1e3;
    let ts = microseconds(event.at);
    let slice = |label: &str, phase| json!({"name": label, "cat": "scope", "ph": phase, "ts": ts, "pid": 1, "tid": 1});
    let instant = json!({"ph": "i", "s": "t", "ts": ts});
    let (category, track, mut entry) = match &event.kind {
        EventKind::ScopeBegin { label, .. } => return vec![slice(label, "B")],
        EventKind::ScopeEnd { label, .. } => return vec![slice(label, "E")],
        EventKind::Alloc { .. } => ("operation", 1, instant),
        EventKind::Replay { time, .. } => {
            let start = microseconds(event.at.saturating_sub(*time));
            let span = json!({"ph": "X", "ts": start, "dur": microseconds(*time)});
            ("replay", 2, span)
        }
        EventKind::Evict { .. } => ("eviction", 2, instant),
        EventKind::Offload { .. } | EventKind::Upload { .. } => ("transfer", 3, instant),
        EventKind::Retire { .. } | EventKind::Free { .. } => ("free", 1, instant),
    };
    let (Some((op, node, _)), Some(DeviceId { type_id, index_id })) =
        (tensor(&event.kind), event.device)
    else {
        return Vec::new();
    };
    entry["name"] = op.into();
    entry["cat"] = category.into();
    entry["pid"] = 1.into();
    entry["tid"] = track.into();
    entry["args"] = json!({"node": node, "bytes": event.bytes});
    let counter = format!("bytes in use, device {type_id}.{index_id}");
    let in_use = json!({"bytes": event.live_bytes});
    let in_use = json!({"name": counter, "ph": "C", "ts": ts, "pid": 1, "args": in_use});
    vec![entry, in_use]
}

#[cfg(test)]
mod tests {
    use burn::backend::Autodiff;
    use burn::tensor::Tensor;
    use burn_flex::Flex;

    use super::*;
    use crate::{MemoryBudget, Remat, checkpoint_labelled, trace};

    type B = Autodiff<Remat<Flex>>;

    /// Two scopes, the second with a quote in its label, and a backward pass.
    fn events() -> Vec<Event> {
        let _all = MemoryBudget::bytes(u64::MAX).install();
        let recording = trace::record();
        let x = Tensor::<B, 1>::ones([4096], &Default::default()).require_grad();
        let block = |x: Tensor<B, 1>| x.exp().log().exp().log();
        let y = checkpoint_labelled("first", crate::Policy::Recompute, || block(x.clone()));
        let y = checkpoint_labelled("the \"second\"", crate::Policy::Recompute, || block(y));
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

    /// What a strict budget refuses is told with what was in its way.
    #[test]
    fn what_was_there_when_a_budget_was_too_small_is_known() {
        let recording = trace::record();
        let refused = std::panic::catch_unwind(|| {
            let _budget = MemoryBudget::bytes(3 * 4096).strict().install();
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
}
