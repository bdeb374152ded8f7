//! A tensor in host memory.

use std::sync::{Arc, Weak};

use burn::tensor::read_sync;
use burn_backend::tensor::Device;
use burn_backend::{Backend, TensorData};

use crate::kind::{Download, Upload, Value};
use crate::node::AnyEntry;

/// The copy of a tensor in host memory, or on its way there.
///
/// The read is queued on the device before the tensor is released, so the device's memory is free as soon as the copy is
/// done; nobody waits for it before the tensor is used again.
pub(crate) struct HostCopy<B: Backend> {
    data: HostData,
    upload: Upload<B>,
    /// What backward will ask for after this one.
    next: Option<Weak<dyn AnyEntry>>,
}

enum HostData {
    Underway(Download),
    There(TensorData),
    Gone,
}

impl<B: Backend> HostCopy<B> {
    /// Starts the copy; `None` for what is not one tensor.
    pub fn start(value: Value<B>, next: Option<Weak<dyn AnyEntry>>) -> Option<Self> {
        let (download, upload) = value.download()?;
        let mut data = HostData::Underway(download);
        data.poll();
        Some(Self { data, upload, next })
    }

    /// Uploads the tensor if its data is there.
    pub fn upload(&mut self, device: &Device<B>) -> Option<Value<B>> {
        self.data.poll();
        match std::mem::replace(&mut self.data, HostData::Gone) {
            HostData::There(data) => Some((self.upload)(data, device)),
            other => {
                self.data = other;
                None
            }
        }
    }

    /// Uploads the tensor, waiting for its data if need be.
    pub fn wait(&mut self, device: &Device<B>) -> Value<B> {
        let data = match std::mem::replace(&mut self.data, HostData::Gone) {
            HostData::There(data) => data,
            HostData::Underway(download) => read_sync(download)
                .unwrap_or_else(|error| panic!("reading an offloaded tensor failed: {error}")),
            HostData::Gone => unreachable!("a host copy is replaced by the tensor it becomes"),
        };
        (self.upload)(data, device)
    }

    /// What is to be uploaded next.
    pub fn next(&self) -> Option<Arc<dyn AnyEntry>> {
        self.next.as_ref().and_then(Weak::upgrade)
    }
}

impl HostData {
    /// Looks whether the data has arrived.
    fn poll(&mut self) {
        let Self::Underway(download) = self else {
            return;
        };
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        if let std::task::Poll::Ready(data) = download.as_mut().poll(&mut context) {
            match data {
                Ok(data) => *self = Self::There(data),
                Err(error) => panic!("offloading a tensor failed: {error}"),
            }
        }
    }
}
