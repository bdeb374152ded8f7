//! The copy of a tensor in host memory. `prefetch.rs` has the order in which they are asked for.

use burn_backend::tensor::Device;
use burn_backend::{Backend, Bytes, TensorData, read_sync};

use crate::kind::{Download, Upload, Value};
use crate::prefetch::Position;
use crate::verify;

/// Estimated nanoseconds to bring a byte back: pageable memory over PCIe 4 goes at about 10 GB/s. Only its ratio to the costs of
/// operations matters.
pub(crate) const UPLOAD_NS_PER_BYTE: f32 = 0.1;

/// The copy of a tensor in host memory, complete or under way.
///
/// The read is queued on the device before the tensor is released, so the device's memory is free as soon as the copy is
/// done. The host waits for the copy only when the tensor is used again.
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
    Underway(Download),
    There(TensorData),
    /// It could not be read: why.
    Lost(String),
}

impl<B: Backend> HostCopy<B> {
    /// Starts the copy of a result of `op`; `None` for what is not one tensor or cannot be read.
    pub fn start(value: &Value<B>, op: &str, position: impl FnOnce() -> Position) -> Option<Self> {
        let (download, upload) = value.clone().download()?;
        let mut data = HostData::Underway(download);
        data.poll();
        if let HostData::Lost(reason) = &data {
            log::warn!("the result of `{op}` cannot be moved to the host: {reason}");
            return None;
        }
        Some(Self {
            data,
            upload,
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
        self.advance(|mut download| {
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            match download.as_mut().poll(&mut context) {
                std::task::Poll::Ready(data) => Ok(data),
                std::task::Poll::Pending => Err(download),
            }
        });
    }

    /// Waits for the data.
    fn wait(&mut self) {
        self.advance(|download| Ok(read_sync(download)));
    }

    /// Goes on with the copy; `step` gives it back if it is not done.
    fn advance(
        &mut self,
        step: impl FnOnce(
            Download,
        ) -> Result<Result<TensorData, burn_backend::ExecutionError>, Download>,
    ) {
        if !matches!(self, Self::Underway(_)) {
            return;
        }
        // What stays if the backend panics: such a future must not be asked again.
        let lost = Self::Lost("the backend panicked".to_owned());
        let Self::Underway(download) = std::mem::replace(self, lost) else {
            return;
        };
        *self = match step(download) {
            Ok(Ok(data)) => Self::There(shared(data)),
            Ok(Err(error)) => Self::Lost(error.to_string()),
            Err(download) => Self::Underway(download),
        };
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
