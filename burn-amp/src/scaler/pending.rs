//! Steps whose outcome only the device knows: the micro-batches of a window, whose flags the host
//! reads together at its end. Until then the device selects the scale of the next loss.

use std::sync::Arc;

use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData, backend::Backend};
use burn_decorator::non_finite::{Outcome, on};

use super::{
    overflow::LossProbe,
    shared_scale::{SharedScale, Step},
};

/// What a loss or its gradients are multiplied with, `T` being a tensor of one f32 on the backend
/// without autodiff.
#[derive(Clone)]
pub(crate) enum Factor<T> {
    /// Losses are not scaled.
    None,
    /// The host knows the scale.
    Host(f32),
    /// Only the device knows it, because the outcome of a step has not been read yet.
    Device(T),
}

impl<T> Factor<T> {
    pub(crate) fn map<U>(self, f: impl FnOnce(T) -> U) -> Factor<U> {
        match self {
            Self::None => Factor::None,
            Self::Host(factor) => Factor::Host(factor),
            Self::Device(factor) => Factor::Device(f(factor)),
        }
    }
}

/// Rounded once, from f64, as PyTorch's `scale.double().reciprocal().float()`.
pub(super) fn inverse(scale: f32) -> f32 {
    (1.0 / f64::from(scale)) as f32
}

/// A step whose outcome the host may not know yet.
pub(super) struct Pending {
    pub(super) step: Step,
    pub(super) outcome: Arc<dyn Outcome>,
    pub(super) losses: Vec<LossProbe>,
}

/// The scale while steps are pending: the host knows every state that it may be in, the device
/// which of them it is.
pub(super) struct Possible<I: Backend> {
    states: Vec<SharedScale>,
    /// Int `[1]`
    index: Tensor<I, 1, Int>,
    /// The scale and its inverse, f32 `[1]` each
    scale: Tensor<I, 1>,
    inv: Tensor<I, 1>,
}

impl<I: Backend> Possible<I> {
    /// After a step at the scale `before`, with its flag `found_inf`.
    pub(super) fn new(before: &SharedScale, step: &Step, found_inf: &Tensor<I, 1, Bool>) -> Self {
        let before = std::slice::from_ref(before);
        Self::from_code(before, step, found_inf.clone().int())
    }

    /// After a further step.
    pub(super) fn next(&self, step: &Step, found_inf: &Tensor<I, 1, Bool>) -> Self {
        let found_inf = found_inf.clone().int();
        let index = on(self.index.clone(), &found_inf.device());
        let code = index.mul_scalar(2) + found_inf;
        Self::from_code(&self.states, step, code)
    }

    /// `code` is twice the index of the state before, plus 1 if the step overflowed.
    fn from_code(before: &[SharedScale], step: &Step, code: Tensor<I, 1, Int>) -> Self {
        let mut states: Vec<SharedScale> = Vec::new();
        let mut index_after = Vec::new();
        for state in before {
            for found_inf in [false, true] {
                let mut after = state.clone();
                after.step(step, found_inf);
                let known = states.iter().position(|other| other.is_as(&after));
                index_after.push(known.unwrap_or(states.len()));
                if known.is_none() {
                    states.push(after);
                }
            }
        }
        // One table and one selection: where a kernel has several, Burn's Fusion 0.21 selects wrong
        // elements. The table is f32, whatever the device's default float is.
        let scales = || {
            index_after
                .iter()
                .map(|&index| states[index].loss_scale.scale())
        };
        let rows = scales()
            .chain(scales().map(inverse))
            .chain(index_after.iter().map(|&index| index as f32));
        let table = TensorData::new(rows.collect::<Vec<f32>>(), [3, index_after.len()]);
        let device = code.device();
        let table = Tensor::<I, 2>::from_data(table, (&device, DType::F32));
        let after = table.select(1, code);
        let row = |row: usize| after.clone().narrow(0, row, 1).reshape([1]);
        Self {
            scale: row(0),
            inv: row(1),
            index: row(2).int(),
            states,
        }
    }

    /// How many states the scale may be in.
    pub(super) fn states(&self) -> usize {
        self.states.len()
    }

    /// The scale of the next loss, and its inverse.
    pub(super) fn active(&self, device: &Device<I>) -> [Factor<Tensor<I, 1>>; 2] {
        [&self.scale, &self.inv].map(|factor| Factor::Device(on(factor.clone(), device)))
    }
}
