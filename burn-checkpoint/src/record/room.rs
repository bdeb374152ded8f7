//! The room that a new tensor needs, known before the operation runs.

use std::sync::Arc;

use burn_backend::{DType, DeviceId, DeviceOps, Shape, TensorData};

use crate::budget::memory::MemoryStats;
use crate::record::context;
use crate::record::op::OpInfo;

/// The size of the result of an operation without operands, computed from its arguments.
#[derive(Default)]
pub(crate) struct Room {
    device: Option<DeviceId>,
    elements: u64,
    element_bytes: u64,
    /// Bytes of the data, which may be packed.
    data_bytes: u64,
}

impl Room {
    pub fn on<D: DeviceOps>(&mut self, device: &D) {
        self.device = Some(device.id());
    }

    pub fn shape(&mut self, shape: &Shape) {
        self.elements = shape.num_elements() as u64;
    }

    /// Adds the size of an element; with several types an element has one of each.
    pub fn dtype(&mut self, dtype: impl Into<DType>) {
        self.element_bytes += dtype.into().size() as u64;
    }

    pub fn data(&mut self, data: &TensorData) {
        self.elements = data.num_elements() as u64;
        self.data_bytes = data.as_bytes().len() as u64;
    }

    pub fn range(&mut self, range: &std::ops::Range<i64>) {
        self.elements = range.end.saturating_sub(range.start).max(0) as u64;
    }

    /// The step of a range.
    pub fn step(&mut self, step: usize) {
        self.elements = self.elements.div_ceil((step as u64).max(1));
    }

    pub fn bytes(&self) -> u64 {
        self.elements * self.element_bytes + self.data_bytes
    }

    pub fn elements(&self) -> u64 {
        self.elements
    }

    /// Makes this room, if an argument named the device. Returns its counters.
    pub fn make(&self, op: &'static OpInfo) -> Option<Arc<MemoryStats>> {
        let memory = context::memory_on(self.device?);
        memory.make_room(op.name, self.bytes());
        Some(memory)
    }
}
