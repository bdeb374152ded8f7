//! The copy of a tensor in host memory. `prefetch.rs` keeps the order in which backward uses the copies.

use std::sync::mpsc::Receiver;

use burn_backend::Backend;
use burn_backend::tensor::Device;

use crate::download::{self, Read};
use crate::kind::{Upload, Value};
use crate::prefetch::Position;
use crate::verify;

/// The copy of a tensor in host memory, complete or under way.
///
/// It is read together with the other tensors that its scope moves (`download.rs`), which then frees the device's memory. The host waits
/// for the copy only when the tensor is used again.
pub(crate) struct HostCopy<B: Backend> {
    data: HostData,
    upload: Upload<B>,
    /// The tensor on the device, if it was uploaded before its use.
    ahead: Option<Value<B>>,
    /// The checksum of the tensor's elements, in verify mode.
    pub checksum: Option<u64>,
    /// Its position in the order in which backward uses host copies.
    pub position: Position,
}

enum HostData {
    Underway(Receiver<Read>),
    Read(Read),
}

impl<B: Backend> HostCopy<B> {
    /// Starts the copy, with the others of its scope; `None` if the value is not one tensor.
    pub fn start(value: &Value<B>, position: impl FnOnce() -> Position) -> Option<Self> {
        Some(Self {
            upload: value.upload()?,
            data: HostData::Underway(download::add(value)),
            ahead: None,
            checksum: verify::checksum(value),
            position: position(),
        })
    }

    /// Whether the data has arrived; does not wait for it.
    pub fn has_arrived(&mut self) -> bool {
        self.is_over() && matches!(self.data, HostData::Read(Ok(_)))
    }

    /// Whether the read is over, with the data or without; does not wait for it.
    pub fn is_over(&mut self) -> bool {
        self.data.poll();
        matches!(self.data, HostData::Read(_))
    }

    /// Whether it is on the device already.
    pub fn is_ahead(&self) -> bool {
        self.ahead.is_some()
    }

    /// Uploads it before its use, if its data has arrived. Returns whether it is on the device.
    pub fn prefetch(&mut self, device: &Device<B>) -> bool {
        if self.ahead.is_none() && self.has_arrived() {
            self.ahead = self.send(device).ok();
        }
        self.is_ahead()
    }

    /// The tensor on the device, waiting for its data if need be. The data stays, whatever happens meanwhile: a panic of the
    /// backend leaves the copy as it was.
    ///
    /// # Errors
    ///
    /// The reason, if the backend could not read the data.
    pub fn tensor(&mut self, device: &Device<B>) -> Result<Value<B>, String> {
        if self.ahead.is_none() {
            self.data.wait();
        }
        match &self.ahead {
            Some(value) => Ok(value.clone()),
            None => self.send(device),
        }
    }

    fn send(&self, device: &Device<B>) -> Result<Value<B>, String> {
        match &self.data {
            HostData::Read(Ok(data)) => Ok((self.upload)(data.clone(), device)),
            HostData::Read(Err(reason)) => Err(reason.clone()),
            HostData::Underway(_) => Err("it has not arrived".to_owned()),
        }
    }
}

impl HostData {
    /// Checks whether the read is over.
    fn poll(&mut self) {
        if let Self::Underway(arrival) = self
            && let Ok(read) = arrival.try_recv()
        {
            *self = Self::Read(read);
        }
    }

    /// Waits until the read is over.
    fn wait(&mut self) {
        if let Self::Underway(arrival) = self {
            download::start();
            let ended = |_| Err("the thread that reads it has ended".to_owned());
            *self = Self::Read(arrival.recv().unwrap_or_else(ended));
        }
    }
}
