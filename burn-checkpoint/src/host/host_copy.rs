//! The copy of a tensor in host memory: `download.rs` reads it, `prefetch.rs` keeps the order in
//! which backward uses the copies.

use std::sync::mpsc::Receiver;

use burn_backend::Backend;
use burn_backend::tensor::Device;
use burn_decorator::ReadError;

use crate::host::download::{self, Read};
use crate::node::kind::{Upload, Value};

/// The copy of a tensor in host memory, complete or under way. Device memory is free once it has
/// been read.
pub(crate) struct HostCopy<B: Backend> {
    /// Gives the data once.
    arrival: Receiver<Read>,
    read: Option<Read>,
    upload: Upload<B>,
    /// The tensor on the device, if it was uploaded before its use.
    pub ahead: Option<Value<B>>,
}

impl<B: Backend> HostCopy<B> {
    /// Starts the copy, with the others of its scope; `None` if the value is not one tensor.
    pub fn start(value: &Value<B>) -> Option<Self> {
        Some(Self {
            upload: value.upload()?,
            arrival: download::add(value),
            read: None,
            ahead: None,
        })
    }

    /// What the read gave, once it is over; does not wait for it.
    pub fn arrived(&mut self) -> Option<&Read> {
        if self.read.is_none() {
            self.read = self.arrival.try_recv().ok();
        }
        self.read.as_ref()
    }

    /// Uploads it before its use, if its data has arrived. Returns whether it is on the device.
    pub fn prefetch(&mut self, device: &Device<B>) -> bool {
        let upload = self.upload;
        if let Some(Ok(data)) = self.arrived() {
            self.ahead = Some(upload(data.clone(), device));
        }
        self.ahead.is_some()
    }

    /// The tensor on the device, waiting for its data if need be, or why that could not be read.
    /// The copy stays if the backend panics.
    pub fn tensor(&mut self, device: &Device<B>) -> Result<Value<B>, ReadError> {
        if let Some(value) = &self.ahead {
            return Ok(value.clone());
        }
        if self.arrived().is_none() {
            download::start();
            self.read = Some(self.arrival.recv().unwrap_or(Err(ReadError::Ended)));
        }
        let upload = self.upload;
        let data = self.arrived().expect("it was waited for").clone()?;
        Ok(upload(data, device))
    }
}
