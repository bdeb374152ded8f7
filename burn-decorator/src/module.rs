//! Visitors and mappers of a module's tensors by path, as closures. The order of a module is that
//! of its visitors and mappers.

use core::ops::Range;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{
    BasicOps, Bool, DType, Float, Int, Tensor, TensorData, TensorMetadata, TensorPrimitive,
    backend::Backend,
};
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};

pub use crate::independent::independent;

/// A tensor of a module, whatever its kind and its number of dimensions.
#[derive(Clone, Debug)]
pub enum AnyTensor<B: Backend> {
    /// Floats, perhaps quantized.
    Float(TensorPrimitive<B>),
    /// Integers.
    Int(IntTensor<B>),
    /// Booleans.
    Bool(BoolTensor<B>),
}

impl<B: Backend> AnyTensor<B> {
    /// Whether it is a trained leaf.
    pub fn requires_grad(&self) -> bool {
        match self {
            Self::Float(TensorPrimitive::Float(tensor)) => B::float_is_require_grad(tensor),
            _ => false,
        }
    }

    /// Its type and its shape.
    pub fn kind(&self) -> (DType, Vec<usize>) {
        match self {
            Self::Float(tensor) => (tensor.dtype(), tensor.shape().to_vec()),
            Self::Int(tensor) => (tensor.dtype(), tensor.shape().to_vec()),
            Self::Bool(tensor) => (tensor.dtype(), tensor.shape().to_vec()),
        }
    }

    /// Reads it. Waits for the device.
    pub fn to_data(&self) -> TensorData {
        self.clone().read(0..self.kind().1.iter().product())
    }

    /// Reads some of its elements, flat, or all as they are. Waits for the device.
    pub fn read(self, elements: Range<usize>) -> TensorData {
        fn part<B: Backend, K: BasicOps<B>>(
            tensor: K::Primitive,
            elements: Range<usize>,
        ) -> TensorData {
            // The number of dimensions does not matter for reading.
            let tensor = Tensor::<B, 1, K>::from_primitive(tensor);
            let all = tensor.shape().num_elements();
            match elements.len() == all {
                true => tensor.into_data(),
                false => tensor.reshape([all]).slice([elements]).into_data(),
            }
        }
        match self {
            Self::Float(tensor) => part::<B, Float>(tensor, elements),
            Self::Int(tensor) => part::<B, Int>(tensor, elements),
            Self::Bool(tensor) => part::<B, Bool>(tensor, elements),
        }
    }
}

/// A visitor or mapper that calls `each` with the path of every tensor.
struct Walk<F> {
    path: Vec<String>,
    each: F,
}

impl<F> Walk<F> {
    fn new(each: F) -> Self {
        Self {
            path: Vec::new(),
            each,
        }
    }
}

/// The methods by which a visitor or a mapper with a field `path: Vec<String>` follows a path.
#[macro_export]
macro_rules! follow_path {
    () => {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.to_owned());
        }

        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }
    };
}

macro_rules! visit {
    ($visit:ident, $kind:ident) => {
        fn $visit<const D: usize>(&mut self, param: &Param<Tensor<B, D, $kind>>) {
            let tensor = AnyTensor::$kind(param.val().into_primitive());
            (self.each)(&self.path.join("."), param.id, tensor);
        }
    };
}

macro_rules! map {
    ($map:ident, $kind:ident) => {
        fn $map<const D: usize>(
            &mut self,
            param: Param<Tensor<B, D, $kind>>,
        ) -> Param<Tensor<B, D, $kind>> {
            let is_new = !param.is_initialized();
            let (id, tensor, mapper) = param.consume();
            let tensor = AnyTensor::$kind(tensor.into_primitive());
            let made = (self.each)(&self.path.join("."), id, is_new, tensor);
            let AnyTensor::$kind(tensor) = made else {
                unreachable!("a tensor is replaced by one of its kind");
            };
            Param::from_mapped_value(id, Tensor::from_primitive(tensor), mapper)
        }
    };
}

impl<B: Backend, F: FnMut(&str, ParamId, AnyTensor<B>)> ModuleVisitor<B> for Walk<F> {
    follow_path!();
    visit!(visit_float, Float);
    visit!(visit_int, Int);
    visit!(visit_bool, Bool);
}

impl<B: Backend, F: FnMut(&str, ParamId, bool, AnyTensor<B>) -> AnyTensor<B>> ModuleMapper<B>
    for Walk<F>
{
    follow_path!();
    map!(map_float, Float);
    map!(map_int, Int);
    map!(map_bool, Bool);
}

/// Calls `each` with the path, the id and the tensor of all parameters and buffers, in the order of
/// the module.
///
/// Burn holds the lock of running statistics during the call: `each` must not wait for another
/// thread that may share them.
pub fn for_each_tensor<B: Backend, M: Module<B>>(
    module: &M,
    each: impl FnMut(&str, ParamId, AnyTensor<B>),
) {
    module.visit(&mut Walk::new(each));
}

/// [`for_each_tensor`], of those that are floats and not quantized.
pub fn for_each_float<B: Backend, M: Module<B>>(
    module: &M,
    mut each: impl FnMut(&str, ParamId, FloatTensor<B>),
) {
    for_each_tensor(module, |path, id, tensor| {
        if let AnyTensor::Float(TensorPrimitive::Float(tensor)) = tensor {
            each(path, id, tensor);
        }
    });
}

/// The module with what `each` makes of its tensors, of the same kind and number of dimensions; ids
/// and Burn's parameter mappers stay. `each` gets whether the tensor was initialised for it, too.
///
/// Locks running statistics as [`for_each_tensor`] does; clones of the module share the changed
/// ones.
pub fn map_tensors<B: Backend, M: Module<B>>(
    module: M,
    each: impl FnMut(&str, ParamId, bool, AnyTensor<B>) -> AnyTensor<B>,
) -> M {
    module.map(&mut Walk::new(each))
}

/// [`map_tensors`], of those that are floats and not quantized.
pub fn map_new_floats<B: Backend, M: Module<B>>(
    module: M,
    mut each: impl FnMut(&str, ParamId, bool, FloatTensor<B>) -> FloatTensor<B>,
) -> M {
    map_tensors(module, |path, id, is_new, tensor| match tensor {
        AnyTensor::Float(TensorPrimitive::Float(tensor)) => {
            AnyTensor::Float(TensorPrimitive::Float(each(path, id, is_new, tensor)))
        }
        other => other,
    })
}

/// [`map_new_floats`], whether they are new or not.
pub fn map_floats<B: Backend, M: Module<B>>(
    module: M,
    mut each: impl FnMut(&str, ParamId, FloatTensor<B>) -> FloatTensor<B>,
) -> M {
    map_new_floats(module, |path, id, _, tensor| each(path, id, tensor))
}
