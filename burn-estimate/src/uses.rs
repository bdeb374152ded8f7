//! When a storage is on the device where [`Shares`] move some storages away, and what moves for
//! parameters that are on the device only while an operation uses them.

use std::collections::BTreeMap;
use std::ops::Range;

use burn_decorator::profile::LinkProfile;
use burn_decorator::repeated_block;

use crate::classes::{Classes, Kind};
use crate::ledger::{Storage, Use};
use crate::shares::Shares;

/// The parameters of a step, and what moves for those that are on the device only while an
/// operation uses them.
pub(crate) struct Uses {
    /// Of those that are trained.
    pub parameter_bytes: u64,
    /// Whether they were in host memory in the run.
    pub are_on_host: bool,
    /// Backward passes of the step.
    pub backwards: u64,
    /// Bytes of parameters to the device, when they are used.
    pub delivered_bytes: u64,
    /// Bytes of whole units that are gathered from all ranks.
    pub gathered_bytes: u64,
    /// Bytes of parameters that are gathered in a low type: in their own type, and in the low one.
    pub rounded_bytes: (u64, u64),
}

impl Uses {
    /// What moves in an update of this many backward passes.
    pub fn traffic(&self, shares: &Shares, backwards: u64) -> Traffic {
        let (ranks, parameter_bytes) = (shares.ranks.max(1), self.parameter_bytes);
        let others = |bytes: u64| bytes - bytes / ranks;
        // A window of micro-batches is reduced once, but for stage 2.
        let passes = if shares.gradients { backwards } else { 1 };
        let several = u64::from(ranks > 1);
        let owned = parameter_bytes / if shares.optimizer_state { ranks } else { 1 };
        // Shards of the state step on shards of gradients and parameters.
        let shards = if shares.optimizer_state { owned } else { 0 };
        let (downloaded_bytes, uploaded_bytes, host_bytes) = if shares.offload {
            // Gradient, master and moments are read, all but the gradient written.
            let uploaded_bytes = if self.are_on_host { 0 } else { parameter_bytes };
            (parameter_bytes * backwards, uploaded_bytes, 7 * owned)
        } else {
            (
                several * (parameter_bytes * passes + shards),
                several * (parameter_bytes + shards),
                0,
            )
        };
        let stage_2 = Traffic {
            sent_bytes: others(parameter_bytes) * (passes + 1),
            downloaded_bytes,
            uploaded_bytes,
            host_bytes,
        };
        if !shares.parameters {
            return stage_2;
        }
        let in_all = |bytes: u64| bytes * backwards / self.backwards.max(1);
        // With the optimizer's state on the device, an update reads parameters from the host and
        // writes them back.
        let stepped = if shares.offload { 0 } else { owned };
        let sent_bytes = others(parameter_bytes) * passes + others(in_all(self.gathered_bytes));
        if shares.keeps_parts() {
            // Reduced gradients come back for an update there, or new parameters from one on the
            // host; each gather reads this rank's part.
            return Traffic {
                sent_bytes,
                downloaded_bytes: downloaded_bytes - stepped + in_all(self.gathered_bytes) / ranks,
                uploaded_bytes: in_all(self.delivered_bytes) + owned,
                ..stage_2
            };
        }
        // A rank casts its shard once, after the update.
        let (rounded, low) = self.rounded_bytes;
        Traffic {
            sent_bytes,
            downloaded_bytes: downloaded_bytes + (1 - several) * stepped + low / ranks,
            uploaded_bytes: in_all(self.delivered_bytes)
                + stepped * (1 + several)
                + rounded / ranks,
            ..stage_2
        }
    }
}

/// Bytes that move.
#[derive(Default)]
pub(crate) struct Traffic {
    pub sent_bytes: u64,
    pub downloaded_bytes: u64,
    pub uploaded_bytes: u64,
    /// Read and written by the update in host memory.
    pub host_bytes: u64,
}

impl Traffic {
    /// The time of all of it, one after the other: what other ranks and the host's memory get and
    /// give moves at the speed of the slower direction.
    pub fn seconds(&self, link: &LinkProfile) -> f64 {
        let beside = (self.sent_bytes + self.host_bytes) as f64;
        link.seconds(self.uploaded_bytes as f64, self.downloaded_bytes as f64)
            + beside / link.slower_bytes_per_second()
    }
}

/// A use of a parameter that brings it to the device.
struct Delivery<'a> {
    at: u64,
    parameter: &'a str,
    /// Bytes of the parameter, in its own type and in the type in which it is delivered.
    bytes: (u64, u64),
    /// Whether the operation has no other operands, and does not cast it.
    is_alone: bool,
}

/// A use of a parameter that brings it to the device, in the order of uses.
pub(crate) struct Brought<'a> {
    at: u64,
    /// The unit of the parameter.
    unit: &'a str,
}

impl<'a> Classes<'a> {
    /// When a storage is on the device, and how many bytes of it.
    pub fn spans(&self, storage: &Storage, kind: Kind, shares: &Shares) -> Vec<(Range<u64>, u64)> {
        let life = storage.born..storage.died;
        if *shares == Shares::NONE {
            return vec![(life, storage.bytes)];
        }
        // What is computed from gradients before the optimizer steps is where they are.
        let born_in_update = storage.born >= self.update
            || (shares.gradients_leave() && self.is_of_update(storage.born));
        let (before, after) = shares.factors(kind, born_in_update);
        let bytes = |factor| (storage.bytes as f64 * factor) as u64;
        if let Some(whole) = self.until_departure(storage, kind, shares) {
            // This rank's shard comes back when the pass ends.
            let back = self.end(storage.born).max(whole.end);
            let mut spans = vec![(whole, storage.bytes)];
            if kind == Kind::Gradient {
                let update = self.update.clamp(back, life.end.max(back));
                spans.push((back..update, bytes(before)));
                spans.push((update..life.end, bytes(after)));
            }
            spans.retain(|(during, bytes)| !during.is_empty() && *bytes > 0);
            return spans;
        }
        if shares.parameters && self.comes_and_goes(storage) {
            let spans = self.in_use(storage).into_iter();
            let spans = spans.map(|during| match during.start < self.update {
                true => {
                    let start = self.upload_begins(storage, during.start, shares.ranks > 1);
                    (start..during.end, storage.bytes)
                }
                false => (during, bytes(after)),
            });
            return spans.collect();
        }
        if shares.replaces_parameters() && kind == Kind::Parameter && storage.died > self.update {
            // The old one is dropped before the new one is uploaded.
            let is_replaced = storage.born < self.update && storage.died != u64::MAX;
            let during = if is_replaced {
                storage.born..self.update
            } else {
                storage.born.min(self.update)..storage.died
            };
            return vec![(during, storage.bytes)];
        }
        match life.contains(&self.update) && !born_in_update {
            true => vec![
                (storage.born..self.update, bytes(before)),
                (self.update..storage.died, bytes(after)),
            ],
            false if born_in_update => vec![(life, bytes(after))],
            false => vec![(life, bytes(before))],
        }
    }

    /// When the upload for a use that begins at `used` begins: at the use before, if that has a
    /// parameter too which is in host memory then. Of ranks these are the parameters of one unit.
    fn upload_begins(&self, storage: &Storage, used: u64, in_ranks: bool) -> u64 {
        let brought = self.brought.get_or_init(|| self.all_brought());
        let own = brought.partition_point(|brought| brought.at < used);
        let is_brought = brought.get(own).is_some_and(|brought| brought.at == used);
        let before = own.checked_sub(1).map(|before| &brought[before]);
        match (before, unit_of(storage)) {
            (Some(before), Some(unit)) if is_brought && (!in_ranks || before.unit == unit) => {
                before.at
            }
            _ => used,
        }
    }

    fn all_brought(&self) -> Vec<Brought<'a>> {
        let storages = self.recording.storages.iter();
        let brought = storages.flat_map(|storage| {
            let uses = self.bringing(storage);
            uses.filter_map(|used| {
                Some(Brought {
                    at: used.during.start,
                    unit: unit_of(storage)?,
                })
            })
        });
        let mut brought: Vec<_> = brought.collect();
        brought.sort_unstable_by_key(|brought| brought.at);
        brought
    }

    /// The uses of a storage before the update that bring its parameter to the device.
    fn bringing(&self, storage: &'a Storage) -> impl Iterator<Item = &'a Use> {
        let (born, update) = (self.phase(storage.born), self.update);
        storage.uses.iter().filter(move |used| {
            // What is computed from a parameter is still on the device in the phase that has
            // computed it.
            used.during.start < update && (storage.parameter.is_some() || used.phase != born)
        })
    }

    /// Whether the storage is a parameter, or is computed from a single parameter before the
    /// update.
    fn comes_and_goes(&self, storage: &Storage) -> bool {
        storage.parameter.is_some() || (storage.source.is_some() && storage.born < self.update)
    }

    /// When operations use the storage. What is computed from a parameter stays until its first
    /// use, if that is in the same phase.
    fn in_use(&self, storage: &Storage) -> Vec<Range<u64>> {
        let mut spans: Vec<_> = storage
            .uses
            .iter()
            .map(|used| used.during.clone())
            .collect();
        if storage.born > self.recording.start {
            let phase = self.phase(storage.born);
            match storage.uses.first().filter(|used| used.phase == phase) {
                Some(_) => spans[0].start = storage.born,
                None => spans.push(storage.born..storage.born + 1),
            }
        }
        spans
    }

    /// Bytes of a rank's parts of the parameters that stay on the device: in their own type, and in
    /// the low one in which they are gathered.
    pub fn kept_parts(&self, shares: &Shares) -> u64 {
        if !shares.keeps_parts() {
            return 0;
        }
        let (_, low) = self.uses(shares).rounded_bytes;
        (self.trained_bytes().max(self.parameter_bytes()) + low) / shares.ranks
    }

    /// What a step moves of parameters.
    pub fn uses(&self, shares: &Shares) -> Uses {
        let storages = self.recording.storages.iter();
        let storages = storages.filter(|_| shares.parameters);
        let deliveries = storages.flat_map(|storage| self.deliveries(storage, shares.ranks > 1));
        let mut deliveries: Vec<_> = deliveries.collect();
        deliveries.sort_unstable_by_key(|delivery| delivery.at);
        // An optimizer may decay its first parameter before it computes any state.
        deliveries.pop_if(|last| last.is_alone);
        let mut parameters: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for delivery in &deliveries {
            let (own, gathered) = parameters.entry(delivery.parameter).or_default();
            *own = delivery.bytes.0;
            *gathered = delivery.bytes.1.max(*gathered);
        }
        let mut of_unit: BTreeMap<&str, u64> = BTreeMap::new();
        for (parameter, (_, gathered)) in &parameters {
            *of_unit.entry(repeated_block(parameter)).or_default() += gathered;
        }
        let units = deliveries
            .iter()
            .map(|delivery| repeated_block(delivery.parameter));
        let mut units: Vec<_> = units.collect();
        units.dedup();
        let rounded = parameters.values().filter(|(own, gathered)| gathered < own);
        Uses {
            parameter_bytes: self.trained_bytes(),
            are_on_host: self.has_parameters_on_host(),
            backwards: self.backwards(),
            delivered_bytes: deliveries.iter().map(|delivery| delivery.bytes.1).sum(),
            gathered_bytes: units.iter().map(|unit| of_unit[unit]).sum(),
            rounded_bytes: rounded.fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1)),
        }
    }

    /// The uses of a storage before the update that deliver its parameter. A parameter that is cast
    /// is gathered from ranks in the type of the cast.
    fn deliveries(
        &self,
        storage: &'a Storage,
        in_ranks: bool,
    ) -> impl Iterator<Item = Delivery<'a>> {
        self.bringing(storage).filter_map(move |used: &Use| {
            let (parameter, own, cast) = match (&storage.parameter, &storage.source) {
                (Some(parameter), _) => (parameter, storage.bytes, used.cast_bytes),
                (None, Some(source)) => (&source.parameter, source.bytes, source.cast_bytes),
                (None, None) => return None,
            };
            Some(Delivery {
                at: used.during.start,
                parameter,
                bytes: (own, cast.filter(|_| in_ranks).unwrap_or(own)),
                is_alone: used.is_alone && used.cast_bytes.is_none(),
            })
        })
    }
}

/// The unit of the parameter that a storage is, or is computed from.
fn unit_of(storage: &Storage) -> Option<&str> {
    let parameter = match (&storage.parameter, &storage.source) {
        (Some(parameter), _) => parameter,
        (None, source) => &source.as_ref()?.parameter,
    };
    Some(repeated_block(parameter))
}
