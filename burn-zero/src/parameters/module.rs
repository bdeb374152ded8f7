//! The tensors of a module by path: new data for them, and which of them Burn's stores transpose.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{
    BasicOps, Bool, Float, Int, Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive,
    backend::{AutodiffBackend, Backend},
};
use burn_decorator::follow_path;
use burn_decorator::module::{AnyTensor, map_tensors};

use crate::parameters::{LeafPlace, NewValue};

/// The device of a module's parameters.
pub(crate) fn device_of<B: Backend, M: Module<B>>(module: &M) -> B::Device {
    module.devices().into_iter().next().unwrap_or_default()
}

/// New data for the tensor at a path, if any; the second argument reads the old data.
pub(crate) type Replace<'a> = dyn FnMut(&str, &dyn Fn() -> TensorData) -> Option<TensorData> + 'a;

/// The module with the data that `replace` returns for its tensors, as new leaves. `replace` is
/// called in the module's order, for frozen tensors and buffers too, with the path and a function
/// that reads the old data. `None` keeps a tensor.
///
/// A trained tensor that the module holds at several paths under one id is replaced once, by its
/// first path, and is one leaf afterwards, even if it was several before: Burn's `fork` and
/// `load_record` make one leaf per path, and `GradientsParams` keeps only the last leaf's gradient.
/// Frozen tensors may share an id and differ, such as clones with older weights.
pub(crate) fn replace_tensors<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
    replace: &mut Replace<'_>,
) -> M {
    // The new leaf of each trained parameter, made at its first path.
    let mut made: HashMap<ParamId, AnyTensor<B>> = HashMap::new();
    map_tensors(module, |path, id, _, tensor| {
        let requires_grad = tensor.requires_grad();
        if let Some(made) = made.get(&id).filter(|_| requires_grad) {
            return made.clone();
        }
        let new = match replace(path, &|| tensor.to_data()) {
            Some(data) => replaced(tensor, data),
            None => tensor,
        };
        if requires_grad {
            made.insert(id, new.clone());
        }
        new
    })
}

/// A tensor of `data` that replaces `old`: on its device or in host memory, in its type, and
/// trained if `old` is.
fn replaced<B: AutodiffBackend>(old: AnyTensor<B>, data: TensorData) -> AnyTensor<B> {
    fn made<B: Backend, K: BasicOps<B>>(old: K::Primitive, data: TensorData) -> K::Primitive {
        let old = Tensor::<B, 1, K>::from_primitive(old);
        K::from_data(data, &old.device(), old.dtype())
    }
    match old {
        AnyTensor::Float(TensorPrimitive::Float(old)) => {
            let data = NewValue::Host(data.convert_dtype(old.dtype()));
            let new = LeafPlace::<B>::of(&old).leaf(data);
            AnyTensor::Float(TensorPrimitive::Float(new))
        }
        AnyTensor::Float(old) => AnyTensor::Float(made::<B, Float>(old, data)),
        AnyTensor::Int(old) => AnyTensor::Int(made::<B, Int>(old, data)),
        AnyTensor::Bool(old) => AnyTensor::Bool(made::<B, Bool>(old, data)),
    }
}

/// The paths of the matrices that Burn's stores write transposed, because of their save mapper:
/// weights of layers with `LinearLayout::Col`.
pub(crate) fn transposed_in_stores<B: Backend, M: Module<B>>(module: &M) -> Vec<String> {
    let mut visitor = TransposedInStores {
        path: Vec::new(),
        found: Vec::new(),
    };
    module.visit(&mut visitor);
    visitor.found
}

struct TransposedInStores {
    path: Vec<String>,
    found: Vec<String>,
}

impl<B: Backend> ModuleVisitor<B> for TransposedInStores {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if D != 2 {
            return;
        }
        // Of other sizes than the parameter, which would have to be gathered for it, and not
        // square, so that its shape tells.
        let (_, tensor, mapper) = param.clone().consume();
        let matrix = Tensor::<B, D>::zeros(Shape::new([2, 3]), &tensor.device());
        let path = self.path.join(".");
        // A mapper that takes one size only panics, which must not cost the record.
        match catch_unwind(AssertUnwindSafe(|| mapper.on_save(matrix).dims())) {
            Ok(dims) if dims[..] == [3, 2] => self.found.push(path),
            Ok(_) => {}
            Err(_) => burn_decorator::warn_user!(
                "the save mapper of parameter {path} panicked on a matrix of two rows and three columns: the consolidated file will have \
                 its values as they are in memory"
            ),
        }
    }
}
