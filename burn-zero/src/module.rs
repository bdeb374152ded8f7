//! New data for the tensors of a module, by path.

use std::collections::HashMap;

use burn::module::{AutodiffModule, ParamId};
use burn::tensor::{
    BasicOps, Bool, Float, Int, Tensor, TensorData, TensorPrimitive,
    backend::{AutodiffBackend, Backend},
};
use burn_decorator::module::{AnyTensor, map_tensors};

use crate::parameters::in_place_of;

/// New data for the tensor at a path, if any; the second argument reads the old data.
pub(crate) type Replace<'a> = dyn FnMut(&str, &dyn Fn() -> TensorData) -> Option<TensorData> + 'a;

/// The module with the data that `replace` returns for its tensors, as new leaves. `replace` is called in the module's
/// order, for frozen tensors and buffers too, with the path and a function that reads the old data. `None` keeps a tensor.
///
/// A trained tensor that the module holds at several paths under one id is replaced once, by its first path, and is one leaf
/// afterwards, even if it was several before: Burn's `fork` and `load_record` make one leaf per path, and `GradientsParams` keeps
/// only the last leaf's gradient. Frozen tensors may share an id and differ, such as clones with older weights.
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

/// A tensor of `data` that replaces `old`: on its device or in host memory, in its type, and trained if `old` is.
fn replaced<B: Backend>(old: AnyTensor<B>, data: TensorData) -> AnyTensor<B> {
    fn made<B: Backend, K: BasicOps<B>>(old: K::Primitive, data: TensorData) -> K::Primitive {
        let old = Tensor::<B, 1, K>::from_primitive(old);
        K::from_data(data, &old.device(), old.dtype())
    }
    let requires_grad = old.requires_grad();
    match old {
        AnyTensor::Float(TensorPrimitive::Float(old)) => {
            let new = in_place_of::<B>(&old, data);
            let new = B::float_set_require_grad(new, requires_grad);
            AnyTensor::Float(TensorPrimitive::Float(new))
        }
        AnyTensor::Float(old) => AnyTensor::Float(made::<B, Float>(old, data)),
        AnyTensor::Int(old) => AnyTensor::Int(made::<B, Int>(old, data)),
        AnyTensor::Bool(old) => AnyTensor::Bool(made::<B, Bool>(old, data)),
    }
}
