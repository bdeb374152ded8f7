//! A module with other values in its tensors.

use std::collections::HashMap;

use burn::module::{AutodiffModule, ModuleMapper, Param, ParamId};
use burn::tensor::{Bool, Int, Tensor, TensorData, TensorPrimitive, backend::AutodiffBackend};
use burn_backend::tensor::FloatTensor;

/// The module with the data that `replace` has for its tensors, as leaves of this thread: it is asked in their order, frozen
/// ones and buffers included, by path, with the tensor's own data at hand. A tensor for which it has none stays.
///
/// A trained tensor that the module holds at several paths under one id is asked for once, by its first path, and is one leaf
/// afterwards, even where it was several before: Burn's `fork` and `load_record` make a leaf of each path, of whose gradients
/// `GradientsParams` keeps the last only. Frozen ones may have an id in common and differ, such as clones with older weights.
pub(crate) fn replace_tensors<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
    replace: &mut Replacement<'_>,
) -> M {
    let mut mapper = Replace::<B> {
        replace,
        path: Vec::new(),
        made: HashMap::new(),
    };
    module.map(&mut mapper)
}

/// New data for the tensor of a path; the second argument reads what is there. It must not wait for another rank at a running
/// statistic, whose lock is held, unless the module shares it with nobody: see [`Statistics`](super::statistics::Statistics).
pub(crate) type Replacement<'a> =
    dyn FnMut(&str, &dyn Fn() -> TensorData) -> Option<TensorData> + 'a;

struct Replace<'a, 'b, B: AutodiffBackend> {
    replace: &'a mut Replacement<'b>,
    path: Vec<String>,
    /// What the first path of a trained parameter has got.
    made: HashMap<ParamId, FloatTensor<B>>,
}

impl<B: AutodiffBackend> Replace<'_, '_, B> {
    fn ask(&mut self, own: &dyn Fn() -> TensorData) -> Option<TensorData> {
        (self.replace)(&self.path.join("."), own)
    }
}

impl<B: AutodiffBackend> ModuleMapper<B> for Replace<'_, '_, B> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, mut tensor, mapper) = param.consume();
        let (device, dtype) = (tensor.device(), tensor.dtype());
        let requires_grad = tensor.is_require_grad();
        if let Some(made) = self.made.get(&id).filter(|_| requires_grad) {
            let leaf = Tensor::from_primitive(TensorPrimitive::Float(made.clone()));
            return Param::from_mapped_value(id, leaf, mapper);
        }
        if let Some(data) = self.ask(&|| tensor.clone().inner().into_data()) {
            tensor = Tensor::from_data(data, (&device, dtype)).set_require_grad(requires_grad);
        }
        if requires_grad {
            let leaf = tensor.clone().into_primitive().tensor();
            self.made.insert(id, leaf);
        }
        Param::from_mapped_value(id, tensor, mapper)
    }

    fn map_int<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Int>>,
    ) -> Param<Tensor<B, D, Int>> {
        let (id, mut tensor, mapper) = param.consume();
        let (device, dtype) = (tensor.device(), tensor.dtype());
        if let Some(data) = self.ask(&|| tensor.clone().into_data()) {
            tensor = Tensor::from_data(data, (&device, dtype));
        }
        Param::from_mapped_value(id, tensor, mapper)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Bool>>,
    ) -> Param<Tensor<B, D, Bool>> {
        let (id, mut tensor, mapper) = param.consume();
        let device = tensor.device();
        if let Some(data) = self.ask(&|| tensor.clone().into_data()) {
            tensor = Tensor::from_data(data, &device);
        }
        Param::from_mapped_value(id, tensor, mapper)
    }
}
