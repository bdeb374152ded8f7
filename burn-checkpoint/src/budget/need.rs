//! What has to be resident at one time: the least limit that a step can keep.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::error::{Need, RematError};
use crate::node::entry::{AnyEntry, Origin};
use crate::record::flags;
use crate::record::step::Lineage;
use crate::record::work::Work;

/// A need that is larger than another one by more than this part of it is clearly larger.
const CLEARLY: u64 = 16;

/// The need of an unconstrained step is computed anew after `tensors / LOOKS` operations.
const LOOKS: u64 = 32;

impl Need {
    /// The need of the operation under way, which is about to make `result_bytes`, without
    /// gradients and constants that are no nodes.
    pub(super) fn of_nodes(
        alive: &[Arc<dyn AnyEntry>],
        op: &'static str,
        result_bytes: u64,
    ) -> Self {
        let now = flags::now();
        // Of the reasons why the views of a storage stay, the strongest counts.
        let mut storages: FxHashMap<usize, Stays> = FxHashMap::default();
        for node in alive {
            let info = node.info();
            if !info.resident || info.retired {
                continue;
            }
            let why = match info.origin {
                _ if info.locked || info.last_used == now => Why::InUse,
                Origin::Recorded | Origin::Delivered | Origin::Hosted => Why::Evictable,
                Origin::Kept if info.lineage != Lineage::Activation => Why::Gradient,
                Origin::Kept if matches!(info.op.work, Work::New | Work::Fixed) => Why::Random,
                Origin::Kept => Why::Kept,
            };
            let bytes = info.owner_bytes;
            let storage = storages.entry(info.owner).or_insert(Stays { why, bytes });
            storage.why = storage.why.max(why);
        }
        let of = |why| {
            let same = storages.values().filter(|storage| storage.why == why);
            same.map(|storage| storage.bytes).sum()
        };
        Self {
            op,
            result_bytes,
            kept_bytes: of(Why::Kept),
            random_bytes: of(Why::Random),
            gradients_bytes: of(Why::Gradient),
            in_use_bytes: of(Why::InUse),
        }
    }

    pub(super) fn error(self, budget_bytes: u64) -> RematError {
        RematError::BudgetTooSmall {
            budget_bytes,
            need: self,
        }
    }
}

/// A storage that stays.
struct Stays {
    why: Why,
    bytes: u64,
}

/// Why a storage stays.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Why {
    Evictable,
    Kept,
    Random,
    Gradient,
    InUse,
}

/// The largest need so far, and the largest that was logged.
#[derive(Default)]
pub(super) struct Needs {
    largest: Mutex<Need>,
    /// 0 if nothing was logged yet.
    pub said_bytes: AtomicU64,
    /// Operations until the need of an unconstrained step is computed again.
    until_look: AtomicU64,
}

impl Needs {
    /// Whether a need of so many bytes is clearly larger than the largest known one.
    pub fn is_clearly_larger(&self, bytes: u64) -> bool {
        clearly(bytes, self.largest().bytes())
    }

    /// Whether it is time to compute the need of an unconstrained step; counts one operation.
    pub fn is_time(&self) -> bool {
        let left = self.until_look.load(Ordering::Relaxed);
        self.until_look
            .store(left.saturating_sub(1), Ordering::Relaxed);
        left == 0
    }

    /// Adds what an operation of an unconstrained step needs, computed from so many tensors: the
    /// more there are, the less often.
    pub fn look(&self, tensors: usize, need: Need) {
        let next = tensors as u64 / LOOKS;
        self.until_look.store(next, Ordering::Relaxed);
        self.keep(need);
    }

    /// Remembers a need if it is the largest.
    pub fn keep(&self, need: Need) {
        let mut largest = self.largest.lock();
        if need.bytes() > largest.bytes() {
            *largest = need;
        }
    }

    pub fn largest(&self) -> Need {
        *self.largest.lock()
    }

    /// Logs that a limit is too small for the largest need, unless a need almost as large was
    /// logged before.
    pub fn say(&self, limit: u64) {
        let largest = self.largest();
        let bytes = largest.bytes();
        if bytes > limit && clearly(bytes, self.said_bytes.load(Ordering::Relaxed)) {
            self.said_bytes.store(bytes, Ordering::Relaxed);
            burn_decorator::warn_user!("{}; going on above it", largest.error(limit));
        }
    }
}

fn clearly(bytes: u64, than: u64) -> bool {
    bytes > than + than / CLEARLY
}
