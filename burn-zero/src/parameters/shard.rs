//! This rank's elements of a parameter.

use core::ops::Range;
use std::sync::OnceLock;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Element, TensorData};
use burn_backend::tensor::Device;
use burn_decorator::shared;
use half::{bf16, f16};

use crate::host::read;

/// This rank's elements of a parameter, in host memory: never written, as each update makes new
/// ones, so that versions of the model share those of parameters that do not change.
pub(crate) struct Shard {
    /// [elements], in the parameter's type.
    own: TensorData,
    /// The same, rounded to the type in which the parameter is gathered where a cast uses it.
    low: OnceLock<TensorData>,
}

impl Shard {
    /// Of these elements, in the parameter's type.
    pub(crate) fn new(mut own: TensorData) -> Self {
        own.shape = [own.num_elements()].into();
        Self {
            own: shared(own),
            low: OnceLock::new(),
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

    /// The elements rounded to a lower type, once [`round`](Self::round) has made them.
    pub(super) fn low(&self) -> Option<&TensorData> {
        self.low.get()
    }

    /// Rounds the elements by the backend's own cast, unless that is done.
    pub(super) fn round<I: Backend>(&self, low: DType, device: &Device<I>) {
        self.low.get_or_init(|| {
            let own = self.own.clone();
            if own.num_elements() == 0 {
                return own.convert_dtype(low);
            }
            let own = I::float_from_data(own, device);
            shared(read::<I>(I::float_cast(own, low.into())))
        });
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
