//! Flags that are read one step late. Until then the device decides: it undoes the step of an overflow by a select over
//! the parameters, and selects the next scale.

use std::{
    any::Any,
    collections::HashSet,
    sync::{Arc, OnceLock},
};

use burn::{
    module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamId},
    tensor::{
        Bool, DType, Device, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
        container::TensorContainer,
    },
};

use burn_decorator::non_finite::NonFiniteRead;

use super::{overflow::LossProbe, shared_scale::OptimizerId};

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
    /// The scale is on the device, f32 `[1]` each, because the outcome of the last step has not been read yet.
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

/// Whether a step overflowed; empty until that is known.
pub(super) type Verdict = Arc<OnceLock<bool>>;

/// A step whose outcome the host does not know yet.
pub(super) struct Pending {
    optimizer: OptimizerId,
    culprits: NonFiniteRead,
    losses: Vec<LossProbe>,
    verdict: Verdict,
    /// A [`NextScale`] of the training backend.
    next_scale: Box<dyn Any + Send>,
}

/// The scale after a pending step and its inverse, f32 `[1]` each.
struct NextScale<I: Backend> {
    scale: Tensor<I, 1>,
    inv: Tensor<I, 1>,
}

impl Pending {
    /// `found_inf` is the step's flag; one of `if_overflow` and `if_not` will be the next scale.
    pub(super) fn new<I: Backend>(
        optimizer: OptimizerId,
        culprits: NonFiniteRead,
        losses: Vec<LossProbe>,
        found_inf: Tensor<I, 1, Bool>,
        if_overflow: f32,
        if_not: f32,
    ) -> (Self, Verdict) {
        let verdict = Verdict::default();
        let next_scale = NextScale {
            scale: select(&found_inf, if_overflow, if_not),
            inv: select(&found_inf, inverse(if_overflow), inverse(if_not)),
        };
        let pending = Self {
            optimizer,
            culprits,
            losses,
            verdict: verdict.clone(),
            next_scale: Box::new(next_scale),
        };
        (pending, verdict)
    }

    /// The scale of the next loss, if `I` is the backend of the pending step.
    pub(super) fn next_scale<I: Backend>(&self, device: &Device<I>) -> Option<ActiveScale<I>> {
        let NextScale { scale, inv } = self.next_scale.downcast_ref::<NextScale<I>>()?;
        let here = |tensor: &Tensor<I, 1>| {
            if tensor.device() == *device {
                tensor.clone()
            } else {
                tensor.clone().to_device(device)
            }
        };
        Some(ActiveScale::Device {
            scale: here(scale),
            inv: here(inv),
        })
    }

    /// Waits for the outcome: the optimizer of the step, the parameters with non-finite gradients, the step's losses, and where to
    /// store the verdict.
    pub(super) fn wait(self) -> (OptimizerId, Vec<String>, Vec<LossProbe>, Verdict) {
        (
            self.optimizer,
            self.culprits.wait(),
            self.losses,
            self.verdict,
        )
    }
}

fn select<I: Backend>(flag: &Tensor<I, 1, Bool>, if_set: f32, if_not: f32) -> Tensor<I, 1> {
    let device = flag.device();
    // f32 whatever the device's default float is.
    let constant = |value: f32| Tensor::from_data(TensorData::from([value]), (&device, DType::F32));
    constant(if_not).mask_where(flag.clone(), constant(if_set))
}

/// The parameters as they were before a step, and the flag that says whether to go back to them.
pub(super) struct Undo<I: Backend> {
    older: TensorContainer<ParamId>,
    /// The flag, on each device where it was needed.
    found_inf: Vec<Tensor<I, 1, Bool>>,
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
            found_inf: vec![found_inf],
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

    fn found_inf_on(&mut self, device: &Device<I>) -> Tensor<I, 1, Bool> {
        if let Some(flag) = self.found_inf.iter().find(|flag| flag.device() == *device) {
            return flag.clone();
        }
        let flag = self.found_inf[0].clone().to_device(device);
        self.found_inf.push(flag.clone());
        flag
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
                let older = Tensor::from_primitive(older).to_device(&device);
                let found_inf = self.found_inf_on(&device).expand(tensor.dims());
                let tensor = Tensor::from_inner(tensor.inner().mask_where(found_inf, older));
                tensor.set_require_grad(is_require_grad)
            }
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}
