//! The device of a module, for training code that is given no device.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bool, Device, Int, Tensor, backend::Backend};

/// The device of the module's first parameter; the default device if it has none. Unlike Burn's
/// `Module::devices` it does not initialise lazy parameters, which would get other values in this
/// copy than in the model itself.
pub fn device_of<B: Backend, M: Module<B>>(module: &M) -> Device<B> {
    let mut first = First::<B>(None);
    module.visit(&mut first);
    first.0.unwrap_or_default()
}

struct First<B: Backend>(Option<Device<B>>);

impl<B: Backend> ModuleVisitor<B> for First<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.get_or_insert_with(|| param.lazy_device());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.0.get_or_insert_with(|| param.lazy_device());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.0.get_or_insert_with(|| param.lazy_device());
    }
}
