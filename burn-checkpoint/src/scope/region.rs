//! A checkpoint scope as its tensors refer to it.

use std::sync::Arc;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::record::op::OpInfo;
use crate::scope::policy::Policy;
use crate::scope::units::UnitPass;

/// The code that runs in one checkpoint scope. Its tensors refer to it, also after its end.
pub(crate) struct Region {
    pub policy: Policy,
    /// The scope around it.
    pub parent: Option<Arc<Region>>,
    /// Of a scope that has begun by itself.
    pub unit: Option<UnitPass>,
    /// How often each operation was called, for policies that depend on it.
    calls: Mutex<FxHashMap<u64, u32>>,
}

impl Region {
    pub fn new(policy: Policy, parent: Option<Arc<Region>>, unit: Option<UnitPass>) -> Self {
        Self {
            policy,
            parent,
            unit,
            calls: Mutex::default(),
        }
    }

    /// Counts a call of an operation. Returns its number, from 0; in a unit's region that of any
    /// operation, from 1.
    pub fn call(&self, op: &OpInfo) -> u32 {
        if let Some(unit) = &self.unit {
            return unit.count(op);
        }
        if !self.policy.asks() {
            return 0;
        }
        let mut calls = self.calls.lock();
        let count = calls.entry(op.key).or_default();
        *count += 1;
        *count - 1
    }

    /// Whether this is `other` or inside of it.
    pub fn is_within(self: &Arc<Self>, other: &Arc<Self>) -> bool {
        let mut around = std::iter::successors(Some(self), |region| region.parent.as_ref());
        around.any(|region| Arc::ptr_eq(region, other))
    }
}
