//! A limit on the bytes of managed tensors.

use std::sync::{Arc, Weak};

use burn_backend::{DeviceId, Shape};

use crate::ledger::Ledger;
use crate::node::AnyEntry;
use crate::op::OpInfo;

pub(crate) struct Budget {}

impl Budget {
    pub fn on(&self, _device: DeviceId) -> Arc<Budget> {
        Arc::new(Budget {})
    }
    pub fn add(&self, _bytes: u64) {}
    pub fn remove(&self, _bytes: u64) {}
    pub fn replayed(&self, _cost_ns: f32) {}
    pub fn thrashing_steps(&self) -> u64 {
        0
    }
    pub fn register(&self, _node: Weak<dyn AnyEntry>) {}
}

pub(crate) fn make_room(_ledger: &Ledger, _bytes: u64) {}

pub(crate) struct OpCost {}

impl OpCost {
    pub fn new(_op: &OpInfo) -> Self {
        Self {}
    }
    pub fn operand(&mut self, _shape: &dyn Fn() -> Shape) {}
    pub fn ns(&self) -> f32 {
        0.0
    }
}
