//! This rank's elements of a parameter.

use core::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Element, TensorData};
use burn_backend::tensor::Device;
use burn_decorator::shared;
use half::{bf16, f16};
use parking_lot::Mutex;

use crate::host::read;

/// This rank's elements of a parameter, in host memory: never written, as each update makes new
/// ones, so that versions of the model share those of parameters that do not change.
pub(crate) struct Shard {
    /// [elements], in the parameter's type.
    own: TensorData,
    /// The same, rounded to a lower type last.
    low: Mutex<Option<TensorData>>,
}

impl Shard {
    /// Of these elements, in the parameter's type.
    pub(crate) fn new(mut own: TensorData) -> Self {
        own.shape = [own.num_elements()].into();
        Self {
            own: shared(own),
            low: Mutex::default(),
        }
    }

    /// The elements of a whole parameter in these ranges.
    pub(crate) fn cut(whole: &TensorData, ranges: &[Range<usize>]) -> Self {
        Self::new(elements(whole, ranges))
    }

    /// Some of the elements.
    pub(crate) fn part(&self, range: Range<usize>) -> TensorData {
        elements(&self.own, &[range])
    }

    /// The elements, flat.
    pub(crate) fn own(&self) -> &TensorData {
        &self.own
    }

    /// The elements rounded to a lower type by the backend's own cast. They stay until another
    /// type is asked for, or [`forget_rounded`](Self::forget_rounded), so that a shard that does
    /// not change is rounded once.
    pub(super) fn rounded<I: Backend>(&self, low: DType, device: &Device<I>) -> TensorData {
        let mut known = self.low.lock();
        if let Some(rounded) = known.as_ref().filter(|known| known.dtype == low) {
            return rounded.clone();
        }
        let own = self.own.clone();
        let rounded = match own.num_elements() {
            0 => own.convert_dtype(low),
            _ => {
                let own = I::float_from_data(own, device);
                shared(read::<I>(I::float_cast(own, low.into())))
            }
        };
        known.insert(rounded).clone()
    }

    /// Frees what [`rounded`](Self::rounded) keeps, for a parameter that is gathered in its own
    /// type from now on.
    pub(super) fn forget_rounded(&self) {
        *self.low.lock() = None;
    }
}

/// The elements in these ranges of the flat tensor, flat.
fn elements(data: &TensorData, ranges: &[Range<usize>]) -> TensorData {
    fn of_type<E: Element>(data: &TensorData, ranges: &[Range<usize>]) -> TensorData {
        let all = data.as_slice::<E>().expect("its own type");
        let parts: Vec<&[E]> = ranges.iter().map(|range| &all[range.clone()]).collect();
        let found = parts.concat();
        let shape = [found.len()];
        TensorData::new(found, shape)
    }
    match data.dtype {
        DType::F32 => of_type::<f32>(data, ranges),
        DType::BF16 => of_type::<bf16>(data, ranges),
        DType::F16 => of_type::<f16>(data, ranges),
        other => unreachable!("{other:?} is not exchanged"),
    }
}
