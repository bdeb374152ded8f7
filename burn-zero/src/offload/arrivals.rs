//! The parameters and gradients that a step meets.

use std::collections::HashSet;

use burn::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn::optim::adaptor::GradAdaptor;
use burn::tensor::{DType, Tensor, TensorMetadata, backend::AutodiffBackend};
use burn_backend::Backend;
use burn_backend::tensor::{Device, FloatTensor};

use super::OffloadError;

/// A parameter, before the step.
pub(super) struct Arrival<I: Backend> {
    pub(super) id: ParamId,
    pub(super) path: String,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    pub(super) value: FloatTensor<I>,
    pub(super) gradient: Option<Gradient<I>>,
}

/// A gradient, and the device that the updated parameter belongs on.
pub(super) struct Gradient<I: Backend> {
    pub(super) tensor: FloatTensor<I>,
    pub(super) device: Device<I>,
}

impl<I: Backend> Arrival<I> {
    pub(super) fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// All parameters that require gradients or have some, in the order of the module. One that the module holds twice is one
/// parameter, under its first path.
///
/// # Errors
///
/// [`OffloadError::OtherShape`] for a gradient.
pub(super) fn arrivals<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    gradients: GradAdaptor,
) -> Result<Vec<Arrival<B::InnerBackend>>, OffloadError> {
    let mut collect = Collect::<B> {
        gradients,
        path: Vec::new(),
        seen: HashSet::new(),
        found: Vec::new(),
    };
    module.visit(&mut collect);
    for arrival in &collect.found {
        let Some(gradient) = &arrival.gradient else {
            continue;
        };
        let found = gradient.tensor.shape().to_vec();
        if found != arrival.shape {
            return Err(OffloadError::OtherShape {
                what: "the gradient",
                path: arrival.path.clone(),
                found,
                expected: arrival.shape.clone(),
            });
        }
    }
    Ok(collect.found)
}

struct Collect<B: AutodiffBackend> {
    gradients: GradAdaptor,
    path: Vec<String>,
    seen: HashSet<ParamId>,
    found: Vec<Arrival<B::InnerBackend>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Collect<B> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if self.seen.contains(&param.id) {
            return;
        }
        let tensor = param.val();
        let gradient = self.gradients.remove::<B::InnerBackend, D>(param.id);
        if gradient.is_none() && !tensor.is_require_grad() {
            return;
        }
        self.seen.insert(param.id);
        self.found.push(Arrival {
            id: param.id,
            path: self.path.join("."),
            shape: tensor.dims().to_vec(),
            dtype: tensor.dtype(),
            value: tensor.inner().into_primitive().tensor(),
            gradient: gradient.map(|(gradient, device)| Gradient {
                tensor: gradient.into_primitive().tensor(),
                device,
            }),
        });
    }
}
