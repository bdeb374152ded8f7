//! Where a model is. As in burn-accum's strategy: neither crate imports the other, and this is too little for a third.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Device, Int, Tensor};

/// The device of the first parameter. Unlike `Module::devices` it initialises none: in a copy of a model they would get
/// other values than in the model itself.
pub(super) fn of<B: Backend, M: Module<B>>(module: &M) -> Device<B> {
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
