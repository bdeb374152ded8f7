//! Whether anyone else has changed a parameter since the last step.
//!
//! The host's copy of a parameter is ahead of the device's in nothing but precision, as long as only the optimizer changes it.
//! Loaded weights, a clamp, an average of weights put in its place would be lost without a sign if the host did not follow.
//! So a sum of each parameter is kept on the device, one number, and compared at the next step.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, FloatDType};

use crate::host::HostRead;

/// The sum of a tensor's elements, f32 `[1]`.
#[derive(Debug)]
pub(super) struct Mark<I: Backend>(FloatTensor<I>);

impl<I: Backend> Clone for Mark<I> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<I: Backend> Mark<I> {
    pub(super) fn of(tensor: FloatTensor<I>) -> Self {
        Self(I::float_sum(I::float_cast(tensor, FloatDType::F32)))
    }
}

/// For each pair of marks whether they differ. One read of the host.
pub(super) fn differ<I: Backend>(pairs: Vec<(Mark<I>, Mark<I>)>) -> Vec<bool> {
    let Some((first, _)) = pairs.first() else {
        return Vec::new();
    };
    let device = I::float_device(&first.0);
    let here = |mark: Mark<I>| match I::float_device(&mark.0) == device {
        true => mark.0,
        false => I::float_to_device(mark.0, &device),
    };
    let flat = pairs.into_iter().flat_map(|(then, now)| [then, now]);
    let all = I::float_cat(flat.map(here).collect(), 0);
    let all = HostRead::start::<I>(all).wait();
    all.chunks(2)
        .map(|pair| pair[0].to_bits() != pair[1].to_bits())
        .collect()
}
