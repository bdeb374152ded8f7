//! The parameters of a store, by path.

use core::hash::Hash;
use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{AutodiffModule, ParamId};
use burn::tensor::TensorMetadata;
use burn::tensor::backend::AutodiffBackend;
use burn_backend::tensor::FloatTensor;
use burn_decorator::module::{for_each_float, map_floats};

use super::LeafPlace;
use crate::parameters::Parameters;
use crate::reduce::Layout;

/// The parameters of a store: the trained ones of a model and after them the frozen ones that are
/// sharded. All stores of a model that was prepared once have the same.
pub(crate) struct StoreEntries {
    layout: Arc<Layout>,
    /// The frozen ones, by path: these may share an id and differ.
    frozen: HashMap<String, usize>,
}

impl StoreEntries {
    /// The parameters of `layout`, all of them trained.
    pub(crate) fn trained(layout: Arc<Layout>) -> Self {
        Self {
            layout,
            frozen: HashMap::new(),
        }
    }

    /// The parameters of `layout`, of which the first are those that are `trained`.
    pub(crate) fn with_frozen(layout: Arc<Layout>, trained: usize) -> Self {
        let known = layout.parameters().iter().enumerate();
        let frozen = known
            .skip(trained)
            .map(|(parameter, known)| (known.path.clone(), parameter))
            .collect();
        Self { frozen, layout }
    }

    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The position of a tensor of a module. `trained` are the trained parameters of the module.
    pub(crate) fn position<B: AutodiffBackend>(
        &self,
        trained: &Parameters,
        path: &str,
        id: ParamId,
        tensor: &FloatTensor<B>,
    ) -> Option<usize> {
        let of_trained = trained.position::<B>(id, tensor);
        of_trained.or_else(|| {
            let parameter = *self.frozen.get(path)?;
            let known = &self.layout.parameters()[parameter];
            let is_same = !B::float_is_require_grad(tensor)
                && known.dtype == tensor.dtype()
                && known.shape == tensor.shape().to_vec();
            is_same.then_some(parameter)
        })
    }

    /// The leaves of a module, by position.
    pub(super) fn leaves<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        module: &M,
    ) -> HashMap<usize, FloatTensor<B>> {
        let trained = Parameters::of::<B, M>(module);
        let mut leaves = HashMap::new();
        for_each_float(module, |path, id, tensor: FloatTensor<B>| {
            if let Some(parameter) = self.position::<B>(&trained, path, id, &tensor) {
                leaves.entry(parameter).or_insert(tensor);
            }
        });
        leaves
    }

    /// The module with its leaves replaced by `each`, which gets a position and the place of the
    /// old leaf, and returns the new one by [`LeafPlace::leaf`] or [`LeafPlace::put`]; `None` keeps
    /// the old one. Called as that of [`replace_leaves`].
    pub(super) fn map<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        module: M,
        mut each: impl FnMut(usize, LeafPlace<B>) -> Option<FloatTensor<B>>,
    ) -> M {
        let trained = Parameters::of::<B, M>(&module);
        let position = |path: &str, id, leaf: &_| self.position::<B>(&trained, path, id, leaf);
        replace_leaves::<B, M, _>(module, position, |parameter, old| {
            each(parameter, LeafPlace::of(&old)).unwrap_or(old)
        })
    }
}

/// The module with its leaves replaced by `each`, which gets a parameter and its old leaf, so that
/// it can drop that before it makes the new one. `parameter` returns the parameter of a leaf, by
/// path and id; `None` keeps the leaf. `each` is called in the order of the module, once for a
/// parameter that the module holds twice, which stays one leaf.
pub(crate) fn replace_leaves<B, M, P>(
    module: M,
    mut parameter: impl FnMut(&str, ParamId, &FloatTensor<B>) -> Option<P>,
    mut each: impl FnMut(P, FloatTensor<B>) -> FloatTensor<B>,
) -> M
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    P: Copy + Eq + Hash,
{
    let mut made: HashMap<P, FloatTensor<B>> = HashMap::new();
    map_floats(module, |path, id, old: FloatTensor<B>| {
        let Some(parameter) = parameter(path, id, &old) else {
            return old;
        };
        if let Some(made) = made.get(&parameter) {
            return made.clone();
        }
        let leaf = each(parameter, old);
        made.insert(parameter, leaf.clone());
        leaf
    })
}
