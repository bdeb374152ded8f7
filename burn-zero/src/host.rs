//! Asynchronous copies of tensors to the host, and checks of the copied data.

use core::{
    future::{Future, ready},
    pin::Pin,
    task::{Context, Poll, Waker},
};

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Element, ExecutionError, TensorData, read_sync};
use half::{bf16, f16};
use rayon::prelude::*;

use crate::group::BufferDtype;

type Data = Result<TensorData, ExecutionError>;

/// A copy to the host that has been started.
pub(crate) struct HostRead(Pin<Box<dyn Future<Output = Data> + Send>>);

impl HostRead {
    /// Starts the copy. A future does nothing until it is polled: one poll enqueues the copy behind the kernels that it depends on.
    pub(crate) fn start<B: Backend>(tensor: FloatTensor<B>) -> Self {
        let mut read = Box::pin(B::float_into_data(tensor));
        match read.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(data) => Self(Box::pin(ready(data))),
            Poll::Pending => Self(read),
        }
    }

    /// Waits for the copy.
    pub(crate) fn arrived(self) -> Self {
        Self(Box::pin(ready(Ok(self.data()))))
    }

    /// Waits for the elements, in f32.
    pub(crate) fn wait(self) -> Vec<f32> {
        floats(self.data())
    }

    /// Waits for the elements, in their own type.
    pub(crate) fn data(self) -> TensorData {
        read_sync(self.0).expect("a tensor can be read from its device")
    }
}

/// Whether all elements of f32, bf16 or f16 are finite; true for other types.
pub(crate) fn is_finite(data: &TensorData) -> bool {
    const CHUNK: usize = 1 << 16;
    fn all<E: Element + Sync>(data: &TensorData, finite: impl Fn(&E) -> bool + Sync) -> bool {
        // Without a branch for each element, so that the loop is vectorized.
        let chunk = |values: &[E]| values.iter().fold(true, |all, value| all & finite(value));
        let values = data
            .as_slice::<E>()
            .expect("elements of the type that the data says");
        values.par_chunks(CHUNK).all(chunk)
    }
    match data.dtype {
        DType::F32 => all(data, |value: &f32| value.is_finite()),
        DType::BF16 => all(data, |value: &bf16| value.is_finite()),
        DType::F16 => all(data, |value: &f16| value.is_finite()),
        _ => true,
    }
}

/// The type in which elements are sent as they are; `None` for types that are not exchanged, nor updated on the host.
pub(crate) fn exchanged(dtype: DType) -> Option<BufferDtype> {
    match dtype {
        DType::F32 => Some(BufferDtype::F32),
        DType::BF16 => Some(BufferDtype::Bf16),
        DType::F16 => Some(BufferDtype::F16),
        _ => None,
    }
}

/// The elements in f32, without a conversion if they are f32 already.
pub(crate) fn floats(data: TensorData) -> Vec<f32> {
    let data = data.convert_dtype(DType::F32);
    data.into_vec().expect("the data was brought to f32")
}
