//! Reads of tensors that are needed at once, and checks of the data.

use std::borrow::Cow;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Element, TensorData, read_sync};
use burn_decorator::ReadError;
use burn_decorator::simulated::values_are_simulated;
use burn_ranks::BufferDtype;
use half::{bf16, f16};
use rayon::prelude::*;

use crate::error::ZeroError;

/// The elements of a tensor, in their own type: waits for the device. What other work goes on
/// beside is a [`HostRead`](burn_decorator::HostRead).
pub(crate) fn read<B: Backend>(tensor: FloatTensor<B>) -> TensorData {
    read_sync(B::float_into_data(tensor)).expect("a tensor can be read from its device")
}

/// As [`read()`], in f32.
pub(crate) fn read_floats<B: Backend>(tensor: FloatTensor<B>) -> Vec<f32> {
    floats(read::<B>(tensor))
}

/// The error of a gradient or parameter that could not be read.
pub(crate) fn not_read(what: &str, path: &str, error: &ReadError) -> ZeroError {
    ZeroError::Read {
        what: format!("{what} of {path}"),
        reason: error.to_string(),
    }
}

/// Whether all elements of f32, bf16 or f16 are finite; true for other types, and where values are
/// simulated.
pub(crate) fn is_finite(data: &TensorData) -> bool {
    const CHUNK: usize = 1 << 16;
    if values_are_simulated() {
        return true;
    }
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

/// The type in which elements are sent as they are; `None` for types that are not exchanged, nor
/// updated on the host.
pub(crate) fn exchanged(dtype: DType) -> Option<BufferDtype> {
    match dtype {
        DType::F32 => Some(BufferDtype::F32),
        DType::BF16 => Some(BufferDtype::Bf16),
        DType::F16 => Some(BufferDtype::F16),
        _ => None,
    }
}

/// The elements in f32, borrowed if they are f32 already.
pub(crate) fn widened(data: &TensorData) -> Cow<'_, [f32]> {
    match data.dtype {
        DType::F32 => Cow::Borrowed(data.as_slice().expect("elements of f32 are aligned")),
        _ => Cow::Owned(floats(data.clone())),
    }
}

/// The elements in f32, without a conversion if they are f32 already.
pub(crate) fn floats(data: TensorData) -> Vec<f32> {
    let data = data.convert_dtype(DType::F32);
    data.into_vec().expect("the data was brought to f32")
}
