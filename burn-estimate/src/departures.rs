//! When gradients leave the device during backward, where they are sharded or in host memory.
//!
//! In a run on one device, the gradient of a weight that autocast has cast is in the low type until
//! the pass ends, where autodiff casts all of them. Where gradients leave, burn-zero has each cast
//! as soon as it is complete.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::classes::{Classes, Kind};
use crate::ledger::{Phase, Recording, Storage};
use crate::shares::Shares;

/// How gradients leave the device.
pub(crate) struct Departures {
    /// When storages were allocated, ascending.
    births: Vec<u64>,
    /// When a gradient in a low type is complete, by its allocation: only those that are cast to the
    /// gradient of a parameter.
    completed: BTreeMap<u64, u64>,
}

impl Departures {
    fn new(classes: &Classes<'_>) -> Self {
        let Recording { storages, .. } = classes.recording;
        let mut births: Vec<_> = storages.iter().map(|storage| storage.born).collect();
        births.sort_unstable();
        let mut this = Self {
            births,
            completed: BTreeMap::new(),
        };
        let in_backward = |storage: &&Storage| classes.phase(storage.born) == Phase::Backward;
        let gradients = storages
            .iter()
            .filter(|storage| in_backward(storage) && classes.kind(storage) == Kind::Gradient);
        let cast: BTreeSet<_> = gradients.filter_map(|storage| storage.cast_from).collect();
        for storage in storages.iter().filter(in_backward) {
            if cast.contains(&storage.born) {
                // Backward first makes what it goes on with.
                let made = this.end_of_operation(storage.born);
                let completed = this.end_of_operation(made + 1);
                this.completed.insert(storage.born, completed);
            }
        }
        this
    }

    /// The last moment before another storage is allocated after `at`: what the operation at that
    /// time has used for the last time is freed then.
    fn end_of_operation(&self, at: u64) -> u64 {
        let next = self.births.partition_point(|born| *born <= at);
        self.births.get(next).map_or(at, |next| (next - 1).max(at))
    }
}

impl Classes<'_> {
    fn departures(&self) -> &Departures {
        self.departures.get_or_init(|| Departures::new(self))
    }

    /// When a gradient of a backward pass, or what is cast to one, is whole on the device, if
    /// gradients leave it during backward. `None` for any other storage.
    pub fn until_departure(
        &self,
        storage: &Storage,
        kind: Kind,
        shares: &Shares,
    ) -> Option<Range<u64>> {
        if !shares.gradients_leave() || self.phase(storage.born) != Phase::Backward {
            return None;
        }
        let departures = self.departures();
        let completed = |born: u64| departures.completed.get(&born).copied();
        match kind {
            Kind::Gradient => {
                let completed = storage.cast_from.and_then(completed);
                let (from, to) = match completed {
                    Some(at) => (at, at),
                    None => {
                        // Where the end of backward is not noted, the optimizer's use would count.
                        let is_end_noted = self.end(storage.born) < self.update;
                        let last = if is_end_noted {
                            storage.last_used
                        } else {
                            storage.born
                        };
                        (storage.born, departures.end_of_operation(last))
                    }
                };
                Some(from..to + 1)
            }
            Kind::Temporary => completed(storage.born).map(|at| storage.born..at + 1),
            _ => None,
        }
    }
}
