//! The copy of a tensor in host memory. `prefetch.rs` keeps the order in which backward uses the copies.

use std::any::Any;
use std::panic::resume_unwind;
use std::sync::mpsc::Receiver;

use burn_backend::tensor::Device;
use burn_backend::{Backend, Bytes, TensorData};

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
    There(TensorData),
    /// The backend's panic, which the next wait resumes.
    Panicked(Box<dyn Any + Send>),
    /// The reason why it could not be read.
    Lost(String),
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
        self.data.poll();
        matches!(self.data, HostData::There(_))
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

    /// Takes out what [`Self::prefetch`] uploaded.
    pub fn drop_prefetched(&mut self) -> Option<Value<B>> {
        self.ahead.take()
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
            HostData::There(data) => Ok((self.upload)(data.clone(), device)),
            HostData::Lost(reason) => Err(reason.clone()),
            HostData::Underway(_) | HostData::Panicked(_) => Err("it has not arrived".to_owned()),
        }
    }
}

impl HostData {
    /// Checks whether the data has arrived.
    fn poll(&mut self) {
        if let Self::Underway(read) = self
            && let Ok(read) = read.try_recv()
        {
            *self = Self::of(read);
        }
    }

    /// Waits for the data.
    ///
    /// # Panics
    ///
    /// With the backend's panic, once.
    fn wait(&mut self) {
        if let Self::Underway(read) = self {
            download::start();
            *self = match read.recv() {
                Ok(read) => Self::of(read),
                Err(_) => Self::Lost("the thread that reads it has ended".to_owned()),
            };
        }
        if let Self::Panicked(_) = self {
            let lost = Self::Lost("the backend panicked".to_owned());
            if let Self::Panicked(panic) = std::mem::replace(self, lost) {
                resume_unwind(panic);
            }
        }
    }

    fn of(read: Read) -> Self {
        match read {
            Ok(Ok(data)) => Self::There(shared(data)),
            Ok(Err(reason)) => Self::Lost(reason),
            Err(panic) => Self::Panicked(panic),
        }
    }
}

/// The same data, with clones that share one allocation: an upload consumes its data, and the copy must outlive a failed upload.
fn shared(data: TensorData) -> TensorData {
    struct Owner(Bytes);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    let (shape, dtype) = burn_decorator::shape_and_dtype!(data);
    let bytes = data.into_bytes();
    let property = bytes.property();
    let bytes = bytes::Bytes::from_owner(Owner(bytes));
    TensorData::from_bytes(Bytes::from_shared(bytes, property), shape, dtype)
}
