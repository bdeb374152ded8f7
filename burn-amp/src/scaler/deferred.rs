//! Flags that are read late. Until then the device decides: it selects the next scale, and undoes the step of an overflow by a
//! select over the parameters.

use std::{collections::HashSet, sync::Arc};

use burn::{
    module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamId},
    tensor::{
        Bool, DType, Device, Int, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
        container::TensorContainer,
    },
};

use burn_decorator::non_finite::{Outcome, on};

use super::{
    overflow::LossProbe,
    shared_scale::{OptimizerId, SharedScale},
};

/// The factor for a loss, and its inverse for the gradients, on the backend `I` without autodiff.
pub(crate) enum ActiveScale<I: Backend> {
    /// Losses are not scaled.
    None,
    /// The host knows the scale.
    Host {
        /// The loss is multiplied with this.
        scale: f32,
        /// The gradients are multiplied with this.
        inv: f32,
    },
    /// The scale is on the device, f32 `[1]` each, because the outcome of a step has not been read yet.
    Device {
        /// The loss is multiplied with this.
        scale: Tensor<I, 1>,
        /// The gradients are multiplied with this.
        inv: Tensor<I, 1>,
    },
}

/// Rounded once, from f64, as PyTorch's `scale.double().reciprocal().float()`.
pub(super) fn inverse(scale: f32) -> f32 {
    (1.0 / f64::from(scale)) as f32
}

/// A step whose outcome the host may not know yet.
pub(super) struct Pending {
    pub(super) optimizer: OptimizerId,
    pub(super) outcome: Arc<dyn Outcome>,
    pub(super) losses: Vec<LossProbe>,
}

/// The scale while steps are pending: the host knows every state that it may be in, the device which of them it is.
pub(super) struct Possible<I: Backend> {
    states: Vec<SharedScale>,
    /// Int `[1]`
    index: Tensor<I, 1, Int>,
    /// The scale and its inverse, f32 `[1]` each
    scale: Tensor<I, 1>,
    inv: Tensor<I, 1>,
}

impl<I: Backend> Possible<I> {
    /// After a step of `optimizer` at the scale `before`, with its flag `found_inf`.
    pub(super) fn new(
        before: &SharedScale,
        optimizer: &OptimizerId,
        found_inf: &Tensor<I, 1, Bool>,
    ) -> Self {
        let before = std::slice::from_ref(before);
        Self::from_code(before, optimizer, found_inf.clone().int())
    }

    /// After a further step.
    pub(super) fn next(&self, optimizer: &OptimizerId, found_inf: &Tensor<I, 1, Bool>) -> Self {
        let found_inf = found_inf.clone().int();
        let index = on(self.index.clone(), &found_inf.device());
        let code = index.mul_scalar(2) + found_inf;
        Self::from_code(&self.states, optimizer, code)
    }

    /// `code` is twice the index of the state before, plus 1 if the step overflowed.
    fn from_code(before: &[SharedScale], optimizer: &OptimizerId, code: Tensor<I, 1, Int>) -> Self {
        let mut states: Vec<SharedScale> = Vec::new();
        let mut index_after = Vec::new();
        for state in before {
            for found_inf in [false, true] {
                let mut after = state.clone();
                after.step(optimizer, found_inf);
                let known = states.iter().position(|other| other.is_as(&after));
                index_after.push(known.unwrap_or(states.len()));
                if known.is_none() {
                    states.push(after);
                }
            }
        }
        // One table and one selection: where a kernel has several, Burn's Fusion 0.21 selects wrong elements. The table is f32, whatever the
        // device's default float is.
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

    /// The scale of the next loss.
    pub(super) fn active(&self, device: &Device<I>) -> ActiveScale<I> {
        ActiveScale::Device {
            scale: on(self.scale.clone(), device),
            inv: on(self.inv.clone(), device),
        }
    }
}

/// The parameters as they were before a step, and the flag that says whether to go back to them.
pub(super) struct Undo<I: Backend> {
    older: TensorContainer<ParamId>,
    found_inf: Tensor<I, 1, Bool>,
}

impl<I: Backend> Undo<I> {
    /// Remembers the parameters of `module` that are among `ids`.
    pub(super) fn remember<B, M>(
        module: &M,
        ids: &HashSet<ParamId>,
        found_inf: Tensor<I, 1, Bool>,
    ) -> Self
    where
        B: AutodiffBackend<InnerBackend = I>,
        M: AutodiffModule<B>,
    {
        let mut collector = Collector {
            ids,
            older: TensorContainer::new(),
        };
        module.visit(&mut collector);
        Self {
            older: collector.older,
            found_inf,
        }
    }

    /// `module` if the flag is not set, its older parameters if it is.
    pub(super) fn apply<B, M>(mut self, module: M) -> M
    where
        B: AutodiffBackend<InnerBackend = I>,
        M: AutodiffModule<B>,
    {
        module.map(&mut self)
    }
}

struct Collector<'a> {
    ids: &'a HashSet<ParamId>,
    older: TensorContainer<ParamId>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Collector<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        // Optimizers update the first occurrence of a shared parameter.
        let is_known = self.older.get::<B::InnerBackend>(&param.id).is_some();
        if self.ids.contains(&param.id) && !is_known {
            self.older
                .register::<B::InnerBackend>(param.id, param.val().inner().into_primitive());
        }
    }
}

impl<B: AutodiffBackend> ModuleMapper<B> for Undo<B::InnerBackend> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let tensor = match self.older.remove::<B::InnerBackend>(&id) {
            None => tensor,
            Some(older) => {
                let is_require_grad = tensor.is_require_grad();
                let device = tensor.device();
                let older = on(Tensor::from_primitive(older), &device);
                let found_inf = on(self.found_inf.clone(), &device).expand(tensor.dims());
                let tensor = Tensor::from_inner(tensor.inner().mask_where(found_inf, older));
                tensor.set_require_grad(is_require_grad)
            }
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}
