//! What a rank has sent.

use std::collections::BTreeMap;

use super::Operation;

/// What a rank has sent to others in one kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Completed calls.
    pub calls: u64,
    /// Elements of buffers; what a rank keeps for itself does not count.
    pub elements: u64,
    /// These elements in bytes.
    pub data_bytes: u64,
    /// Bytes of the messages that start each call.
    pub header_bytes: u64,
}

impl Sent {
    pub(crate) fn add(&mut self, other: Self) {
        self.calls += other.calls;
        self.elements += other.elements;
        self.data_bytes += other.data_bytes;
        self.header_bytes += other.header_bytes;
    }
}

/// What a rank has sent, by operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    operations: BTreeMap<Operation, Sent>,
}

impl Traffic {
    /// What was sent in one operation. An all-reduce counts as such, although it is a reduce-scatter and an all-gather.
    pub fn of(&self, operation: Operation) -> Sent {
        self.operations.get(&operation).copied().unwrap_or_default()
    }

    /// What was sent in all operations.
    pub fn total(&self) -> Sent {
        let mut total = Sent::default();
        self.operations.values().for_each(|sent| total.add(*sent));
        total
    }

    pub(crate) fn record(&mut self, operation: Operation, sent: Sent) {
        self.operations
            .entry(operation)
            .or_default()
            .add(Sent { calls: 1, ..sent });
    }
}
