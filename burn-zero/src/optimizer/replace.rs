//! A module with other values in its tensors.

use burn::module::{AutodiffModule, ModuleMapper, Param};
use burn::tensor::{Bool, Int, Tensor, TensorData, backend::AutodiffBackend};

/// The module with the data that `replace` has for its tensors, as leaves of this thread: it is asked in their order, frozen
/// ones and buffers included, by path, with the tensor's own data at hand. A tensor for which it has none stays.
pub(crate) fn replace_tensors<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
    replace: &mut Replacement<'_>,
) -> M {
    let mut mapper = Replace {
        replace,
        path: Vec::new(),
    };
    module.map(&mut mapper)
}

/// New data for the tensor of a path; the second argument reads what is there.
pub(crate) type Replacement<'a> =
    dyn FnMut(&str, &dyn Fn() -> TensorData) -> Option<TensorData> + 'a;

struct Replace<'a, 'b> {
    replace: &'a mut Replacement<'b>,
    path: Vec<String>,
}

impl Replace<'_, '_> {
    fn ask(&mut self, own: &dyn Fn() -> TensorData) -> Option<TensorData> {
        (self.replace)(&self.path.join("."), own)
    }
}

impl<B: AutodiffBackend> ModuleMapper<B> for Replace<'_, '_> {
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
        if let Some(data) = self.ask(&|| tensor.clone().inner().into_data()) {
            tensor = Tensor::from_data(data, (&device, dtype)).set_require_grad(requires_grad);
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
