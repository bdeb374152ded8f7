//! Names of parameters in traces and snapshots.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::Backend;

use crate::op::OpInfo;
use crate::request;

/// The model with parameters whose paths a trace tells: of a step with it, not of what an optimizer makes of them.
///
/// # Cost
///
/// Each float parameter goes to the host and back; its path is kept for good.
pub fn name_parameters<B: Backend, M: Module<B>>(model: M) -> M {
    struct Names(Vec<String>);
    impl<B: Backend> ModuleMapper<B> for Names {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.0.push(name.into());
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.0.pop();
        }

        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            let path = OpInfo::parameter(&self.0.join("."));
            param.map(|value| {
                let (device, requires_grad) = (value.device(), value.is_require_grad());
                let data = value.into_data();
                let named = request::naming(path, || B::float_from_data(data, &device));
                Tensor::from_primitive(TensorPrimitive::Float(named))
                    .set_require_grad(requires_grad)
            })
        }
    }
    model.map(&mut Names(Vec::new()))
}
