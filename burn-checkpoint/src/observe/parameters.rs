//! Names of parameters in traces and snapshots.

use burn::module::Module;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorPrimitive};
use burn_decorator::carried::carry;
use burn_decorator::module::{AnyTensor, map_floats};

use crate::host::request::Named;
use crate::record::op::OpInfo;

/// The model with parameters whose paths a trace shows: in a step with this model, not once an
/// optimizer has replaced them.
///
/// # Cost
///
/// Each float parameter is read to the host and uploaded again; its path is never freed.
pub fn name_parameters<B: Backend, M: Module<B>>(model: M) -> M {
    map_floats(model, |path, _, value: FloatTensor<B>| {
        let path = OpInfo::parameter(path);
        let (device, requires_grad) = (B::float_device(&value), B::float_is_require_grad(&value));
        let data = AnyTensor::<B>::Float(TensorPrimitive::Float(value)).to_data();
        let named = Named { path, unit: None };
        let (value, _) = carry(named, || B::float_from_data(data, &device));
        B::float_set_require_grad(value, requires_grad)
    })
}
