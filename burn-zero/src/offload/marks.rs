//! Whether anyone else has changed a parameter since the last step.
//!
//! The host's copy of a parameter is ahead of the device's in nothing but precision, as long as only the optimizer changes it.
//! Loaded weights, a clamp, an average of weights put in its place would be lost without a sign if the host did not follow.
//! So a sum of each parameter is kept on the device, one number, and compared at the next step.

use std::sync::{Arc, OnceLock};

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, FloatDType, TensorMetadata};

use super::arrivals::Arrival;
use crate::host::HostRead;

/// The sum of a tensor's elements, f32 `[1]`: of one that is on the device, or will be.
#[derive(Debug)]
pub(super) struct Mark<I: Backend>(Arc<OnceLock<FloatTensor<I>>>);

impl<I: Backend> Clone for Mark<I> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<I: Backend> Mark<I> {
    /// Of a tensor on the device.
    pub(super) fn of(tensor: FloatTensor<I>) -> Self {
        Self(Arc::new(OnceLock::from(sum::<I>(tensor))))
    }

    /// Of a tensor that is not on the device yet. Clones know it as soon as one does.
    pub(super) fn later() -> Self {
        Self(Arc::default())
    }

    /// The tensor is there.
    pub(super) fn set(&self, tensor: FloatTensor<I>) {
        // A tensor comes once.
        let _ = self.0.set(sum::<I>(tensor));
    }
}

fn sum<I: Backend>(tensor: FloatTensor<I>) -> FloatTensor<I> {
    // Some backends copy to cast to the same type.
    let tensor = match tensor.dtype() {
        DType::F32 => tensor,
        _ => I::float_cast(tensor, FloatDType::F32),
    };
    I::float_sum(tensor)
}

/// Whether the host must see each parameter: where it has no mark of it, and where the mark is another now. One read of the
/// host.
pub(super) fn differ<I: Backend>(
    arrivals: &[Arrival<I>],
    marks: impl Iterator<Item = Option<Mark<I>>>,
) -> Vec<bool> {
    let mut changed = Vec::new();
    let mut pairs = Vec::new();
    for (index, (arrival, mark)) in arrivals.iter().zip(marks).enumerate() {
        let then = mark.and_then(|mark| mark.0.get().cloned());
        changed.push(then.is_none());
        if let Some(then) = then {
            pairs.push((index, [then, sum::<I>(arrival.value.clone())]));
        }
    }
    let Some((_, [first, _])) = pairs.first() else {
        return changed;
    };
    let device = I::float_device(first);
    let here = |sum: &FloatTensor<I>| match I::float_device(sum) == device {
        true => sum.clone(),
        false => I::float_to_device(sum.clone(), &device),
    };
    let all = pairs.iter().flat_map(|(_, pair)| pair.iter().map(here));
    let all = HostRead::start::<I>(I::float_cat(all.collect(), 0)).wait();
    for ((index, _), sums) in pairs.iter().zip(all.chunks(2)) {
        changed[*index] = sums[0].to_bits() != sums[1].to_bits();
    }
    changed
}
