//! Copies of tensors to the host that go on while the device computes.

use core::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, ExecutionError, TensorData, read_sync};

type Data = Result<TensorData, ExecutionError>;

/// A copy to the host that has been started.
pub(crate) enum HostRead {
    Arrived(Data),
    Underway(Pin<Box<dyn Future<Output = Data> + Send>>),
}

impl HostRead {
    /// Futures do nothing until they are polled: one poll enqueues the copy right behind the kernels that it waits for.
    pub(crate) fn start<B: Backend>(tensor: FloatTensor<B>) -> Self {
        let mut data: Pin<Box<dyn Future<Output = Data> + Send>> =
            Box::pin(B::float_into_data(tensor));
        match data.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(data) => Self::Arrived(data),
            Poll::Pending => Self::Underway(data),
        }
    }

    /// Waits for the elements, in f32.
    pub(crate) fn wait(self) -> Vec<f32> {
        floats(self.data())
    }

    /// Waits for the elements, as they are.
    pub(crate) fn data(self) -> TensorData {
        let data = match self {
            Self::Arrived(data) => data,
            Self::Underway(data) => read_sync(data),
        };
        data.expect("a tensor can be read from its device")
    }
}

/// The elements in f32; those that are f32 are not converted.
pub(crate) fn floats(data: TensorData) -> Vec<f32> {
    let data = if data.dtype == DType::F32 {
        data
    } else {
        data.convert_dtype(DType::F32)
    };
    data.into_vec().expect("the data was brought to f32")
}
