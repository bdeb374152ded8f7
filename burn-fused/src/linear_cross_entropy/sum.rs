//! The weight's gradient, added up by parts of its rows.

use std::ops::{AddAssign, Range};

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Device, Element, Tensor, TensorData};

/// A sum of matrices `[rows, columns]` of one type, added in parts of whole rows: one part is in
/// memory beside it.
pub(super) enum Sum<B: Backend> {
    /// Added in place by `slice_assign`.
    Tensor(Tensor<B, 2>),
    /// burn-flex 0.21's `slice_assign` copies the whole tensor. Its tensors are made from host
    /// data, and read, without a copy, so the sum is host data until it is complete.
    Host(TensorData, Device<B>),
}

impl<B: Backend> Sum<B> {
    /// The sum of no parts.
    pub fn zeros([rows, columns]: [usize; 2], dtype: DType, device: &Device<B>) -> Self {
        if !B::name(device).contains("flex") {
            return Self::Tensor(Tensor::zeros([rows, columns], (device, dtype)));
        }
        let shape = [rows, columns];
        let data = match dtype {
            DType::F64 => TensorData::new(vec![0f64; rows * columns], shape),
            _ => TensorData::new(vec![0f32; rows * columns], shape),
        };
        Self::Host(data, device.clone())
    }

    /// Adds `part` to these rows.
    pub fn add(self, rows: Range<usize>, part: Tensor<B, 2>) -> Self {
        match self {
            Self::Tensor(sum) => {
                let place = [rows, 0..part.dims()[1]];
                let part = part + sum.clone().slice(place.clone());
                // In place, where the backend can: nothing else holds the sum.
                Self::Tensor(sum.slice_assign(place, part))
            }
            Self::Host(mut data, device) => {
                let part = part.into_data();
                match data.dtype {
                    DType::F64 => add_rows::<f64>(&mut data, rows, &part),
                    _ => add_rows::<f32>(&mut data, rows, &part),
                }
                Self::Host(data, device)
            }
        }
    }

    pub fn finish(self) -> Tensor<B, 2> {
        match self {
            Self::Tensor(sum) => sum,
            Self::Host(data, device) => {
                let dtype = data.dtype;
                Tensor::from_data(data, (&device, dtype))
            }
        }
    }
}

fn add_rows<E: Element + AddAssign>(sum: &mut TensorData, rows: Range<usize>, part: &TensorData) {
    let columns = sum.shape[1];
    let sum = sum.as_mut_slice::<E>().expect("made of this type");
    let part = part.as_slice::<E>().expect("of the sum's type");
    for (sum, part) in sum[rows.start * columns..].iter_mut().zip(part) {
        *sum += *part;
    }
}
