//! The copy of a tensor in host memory. `prefetch.rs` has the order in which they are asked for.

use std::sync::Arc;

use burn_backend::tensor::Device;
use burn_backend::{Backend, Bytes, TensorData};

use crate::download::{self, Arrival};
use crate::kind::{Upload, Value};
use crate::prefetch::Position;
use crate::verify;

/// The copy of a tensor in host memory, complete or under way.
///
/// It is read with all else that its scope moves (`download.rs`), and the device's memory is free once that is done. The host waits for
/// the copy only when the tensor is used again.
pub(crate) struct HostCopy<B: Backend> {
    data: HostData,
    upload: Upload<B>,
    /// Uploaded before it was asked for.
    ahead: Option<Value<B>>,
    /// Of what the tensor held, in verify mode.
    pub checksum: Option<u64>,
    /// Its position in the order of what backward will ask for.
    pub position: Position,
}

enum HostData {
    Underway(Arc<Arrival>),
    There(TensorData),
    /// It could not be read: why.
    Lost(String),
}

impl<B: Backend> HostCopy<B> {
    /// Starts the copy, with the others of its scope; `None` for what is not one tensor.
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

    /// Uploads it if its data is there, before it is asked for.
    pub fn prefetch(&mut self, device: &Device<B>) -> bool {
        if self.ahead.is_none() && self.has_arrived() {
            self.ahead = self.send(device).ok();
        }
        self.is_ahead()
    }

    /// Gives up what was uploaded before it was asked for.
    pub fn drop_prefetched(&mut self) -> Option<Value<B>> {
        self.ahead.take()
    }

    /// The tensor on the device, waiting for its data if need be. The data stays, whatever happens meanwhile: a panic of the
    /// backend leaves the copy as it was.
    ///
    /// # Errors
    ///
    /// Why the data cannot be had, if the backend could not read it.
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
            HostData::Underway(_) => Err("it has not arrived".to_owned()),
        }
    }
}

impl HostData {
    /// Looks whether the data has arrived.
    fn poll(&mut self) {
        if let Self::Underway(arrival) = self
            && let Some(data) = arrival.poll()
        {
            *self = Self::of(data);
        }
    }

    /// Waits for the data.
    fn wait(&mut self) {
        if let Self::Underway(arrival) = self {
            let arrival = arrival.clone();
            // What stays if the backend panicked.
            *self = Self::Lost("the backend panicked".to_owned());
            *self = Self::of(arrival.wait());
        }
    }

    fn of(data: Result<TensorData, String>) -> Self {
        match data {
            Ok(data) => Self::There(shared(data)),
            Err(reason) => Self::Lost(reason),
        }
    }
}

/// The same data where clones share one allocation: an upload consumes its data, and the copy must outlive a failed one.
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
