//! The parameters of a step, and the leaves that it makes.
//!
//! As long as only the optimizer changes a parameter, the host's copy differs from the device's in precision only. Loaded, clamped or
//! averaged weights are another leaf: a parameter whose leaf is not the one that the optimizer made is downloaded.

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, OnceLock};

use burn::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::adaptor::GradAdaptor;
use burn::tensor::{
    DType, Tensor, TensorData, TensorMetadata, TensorPrimitive, backend::AutodiffBackend,
};
use burn_autodiff::Autodiff;
use burn_backend::Backend;
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{Device, FloatTensor};

use super::OffloadError;
use super::shards::{are_stepped, leave_on_host, node_of_shard};
use crate::backend::node_behind;

/// A parameter with a gradient, before the step.
pub(super) struct StepParameter<I: Backend> {
    pub(super) id: ParamId,
    pub(super) path: String,
    pub(super) value: FloatTensor<I>,
    /// The node of its leaf, if the backend exposes it.
    node: Option<u64>,
    pub(super) gradient: Option<FloatTensor<I>>,
    /// The device of the updated parameter.
    pub(super) device: Device<I>,
}

impl<I: Backend> StepParameter<I> {
    pub(super) fn shape(&self) -> Vec<usize> {
        self.value.shape().to_vec()
    }

    pub(super) fn dtype(&self) -> DType {
        self.value.dtype()
    }

    /// Whether it is the leaf that the optimizer made.
    pub(super) fn is(&self, leaf: &Leaf) -> bool {
        self.node.is_some() && self.node == leaf.0.get().copied()
    }
}

/// The leaf that an optimizer made of a parameter; set when it is on the device. Clones of the optimizer share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Leaf(Arc<OnceLock<u64>>);

impl Leaf {
    pub(super) fn set(&self, node: Option<u64>) {
        if let Some(node) = node {
            // An update makes one leaf.
            let _ = self.0.set(node);
        }
    }
}

/// The number of a tensor's node in the autodiff graph. Two tensors with one number have the same elements. `None` if the backend does
/// not expose it: it is neither `Autodiff` nor has [`Sharded`](crate::Sharded) in it.
pub(crate) fn leaf_node<B: AutodiffBackend>(tensor: &FloatTensor<B>) -> Option<u64> {
    let shown = node_behind(|| {
        B::float_is_require_grad(tensor);
    });
    shown.or_else(|| {
        let tensor: &dyn Any = tensor;
        let tensor = tensor.downcast_ref::<FloatTensor<Autodiff<B::InnerBackend>>>()?;
        Some(tensor.node.id.value)
    })
}

/// All parameters that require or have gradients, in the order of the module. A tensor that the module holds twice is one
/// parameter, under its first path.
///
/// # Errors
///
/// [`OffloadError::OtherShape`] for a gradient.
pub(super) fn parameters<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    gradients: GradAdaptor,
) -> Result<Vec<StepParameter<B::InnerBackend>>, OffloadError> {
    let mut collect = Collect::<B> {
        gradients,
        path: Vec::new(),
        seen: HashSet::new(),
        found: Vec::new(),
    };
    module.visit(&mut collect);
    for parameter in &collect.found {
        let Some(gradient) = &parameter.gradient else {
            continue;
        };
        check_shape("the gradient", parameter, gradient.shape().to_vec())?;
    }
    Ok(collect.found)
}

/// # Errors
///
/// [`OffloadError::OtherShape`] unless `found` is the parameter's.
pub(super) fn check_shape<I: Backend>(
    what: &'static str,
    parameter: &StepParameter<I>,
    found: Vec<usize>,
) -> Result<(), OffloadError> {
    let expected = parameter.shape();
    if found == expected {
        return Ok(());
    }
    Err(OffloadError::OtherShape {
        what,
        path: parameter.path.clone(),
        found,
        expected,
    })
}

struct Collect<B: AutodiffBackend> {
    gradients: GradAdaptor,
    path: Vec<String>,
    seen: HashSet<ParamId>,
    found: Vec<StepParameter<B::InnerBackend>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Collect<B> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let id = param.id;
        if self.seen.contains(&id) {
            return;
        }
        let tensor = param.val();
        let gradient = self.gradients.remove::<B::InnerBackend, D>(id);
        if gradient.is_none() && !tensor.is_require_grad() {
            return;
        }
        self.seen.insert(id);
        let (gradient, device) = match gradient {
            Some((gradient, device)) => (Some(gradient.into_primitive().tensor()), device),
            None => (None, tensor.device()),
        };
        self.found.push(StepParameter {
            id,
            path: self.path.join("."),
            node: node_of_shard(id)
                .unwrap_or_else(|| leaf_node::<B>(&tensor.clone().into_primitive().tensor())),
            value: tensor.inner().into_primitive().tensor(),
            gradient,
            device,
        });
    }
}

/// The new value of a parameter.
pub(super) enum NewValue<I: Backend> {
    Host(TensorData),
    Device(FloatTensor<I>),
}

/// The module with new values. `update` returns the value of each parameter with a device in `devices`, given its id, its old value
/// (dropped as early as possible to free its memory), the device, and the leaf that will be made of the new value. A parameter that the
/// module holds twice stays one leaf.
pub(super) fn update_module<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
    devices: HashMap<ParamId, Device<B>>,
    update: impl FnMut(
        ParamId,
        FloatTensor<B::InnerBackend>,
        &Device<B>,
        Leaf,
    ) -> NewValue<B::InnerBackend>,
) -> M {
    module.map(&mut UpdateMapper::<B, _> {
        devices,
        update,
        made: HashMap::new(),
    })
}

struct UpdateMapper<B: AutodiffBackend, F> {
    devices: HashMap<ParamId, Device<B>>,
    update: F,
    made: HashMap<ParamId, FloatTensor<B>>,
}

impl<B, F> ModuleMapper<B> for UpdateMapper<B, F>
where
    B: AutodiffBackend,
    F: FnMut(ParamId, FloatTensor<B::InnerBackend>, &Device<B>, Leaf) -> NewValue<B::InnerBackend>,
{
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if let Some(made) = self.made.get(&param.id) {
            let (id, _, mapper) = param.consume();
            let leaf = Tensor::from_primitive(TensorPrimitive::Float(made.clone()));
            return Param::from_mapped_value(id, leaf, mapper);
        }
        let Some(device) = self.devices.remove(&param.id) else {
            return param;
        };
        let (id, old, mapper) = param.consume();
        let requires_grad = old.is_require_grad();
        let old = old.inner().into_primitive().tensor();
        let leaf = Leaf::default();
        let new = match (self.update)(id, old, &device, leaf.clone()) {
            NewValue::Host(data) if are_stepped() => {
                return leave_on_host(id, data, &device, requires_grad, leaf);
            }
            NewValue::Host(data) => B::InnerBackend::float_from_data(data, &device),
            NewValue::Device(value) => value,
        };
        let new = Tensor::from_primitive(TensorPrimitive::Float(new));
        let new = Tensor::<B, D>::from_inner(new).set_require_grad(requires_grad);
        let primitive = new.clone().into_primitive().tensor();
        leaf.set(leaf_node::<B>(&primitive));
        self.made.insert(id, primitive);
        Param::from_mapped_value(id, new, mapper)
    }
}
