//! Without the feature `fusion` no device has a queue.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::device::MetaDevice;
use crate::ledger::{Call, Ledger};

#[derive(Clone)]
pub(crate) enum Queue {}

impl Queue {
    pub fn new(_: &MetaDevice) -> Self {
        unreachable!("`MetaDevice::fused` is of the feature `fusion`")
    }

    pub fn push(&self, _: &Arc<Mutex<Ledger>>, _: Call) {
        match *self {}
    }

    pub fn drain(&self) {
        match *self {}
    }

    pub fn settle(&self) {
        match *self {}
    }
}
