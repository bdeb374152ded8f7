//! Updated parameters becoming the module's.

use std::collections::HashMap;

use burn::module::{Param, ParamId};
use burn::tensor::{Tensor, TensorData, TensorPrimitive, backend::AutodiffBackend};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{Device, FloatTensor};

use super::marks::Mark;
use super::uploads::{keep, will_be_gathered};

/// The new leaves of a step. One that the module holds twice stays one leaf.
pub(super) struct Leaves<B: AutodiffBackend> {
    made: HashMap<ParamId, FloatTensor<B>>,
}

impl<B: AutodiffBackend> Default for Leaves<B> {
    fn default() -> Self {
        Self {
            made: HashMap::new(),
        }
    }
}

impl<B: AutodiffBackend> Leaves<B> {
    /// The parameter with the value that `update` makes of the old one, on the inner backend. The old one is given away, so
    /// that its memory can be free before the new one comes.
    pub(super) fn replace<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D>>,
        update: impl FnOnce(Tensor<B::InnerBackend, D>) -> Tensor<B::InnerBackend, D>,
    ) -> Param<Tensor<B, D>> {
        let (id, old, mapper) = param.consume();
        if let Some(made) = self.made.get(&id) {
            let leaf = Tensor::from_primitive(TensorPrimitive::Float(made.clone()));
            return Param::from_mapped_value(id, leaf, mapper);
        }
        let requires_grad = old.is_require_grad();
        let new = Tensor::<B, D>::from_inner(update(old.inner())).set_require_grad(requires_grad);
        self.made.insert(id, new.clone().into_primitive().tensor());
        Param::from_mapped_value(id, new, mapper)
    }

    /// The parameter with an updated value, and the mark of it: on the device now, or where ranks
    /// [gather](super::uploads) it, once they have.
    pub(super) fn renew<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D>>,
        value: TensorData,
        device: &Device<B>,
    ) -> (Param<Tensor<B, D>>, Mark<B::InnerBackend>) {
        if will_be_gathered() {
            // Each piece has an id of its own.
            let (id, old, _) = param.consume();
            return keep(id, value, device, old.is_require_grad());
        }
        let mut mark = Mark::later();
        let param = self.replace(param, |old| {
            drop(old);
            let value = B::InnerBackend::float_from_data(value, device);
            mark = Mark::of(value.clone());
            Tensor::from_primitive(TensorPrimitive::Float(value))
        });
        (param, mark)
    }

    /// Whether this parameter was met before.
    pub(super) fn has(&self, id: ParamId) -> bool {
        self.made.contains_key(&id)
    }
}
