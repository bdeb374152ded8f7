//! The parameters of a module, in the order of its paths.

use std::collections::{BTreeMap, HashMap};

use burn::module::{AutodiffModule, ParamId};
use burn::tensor::{DType, TensorMetadata, backend::AutodiffBackend};
use burn_backend::tensor::FloatTensor;

use super::parameter_shards::{MOST_DIMENSIONS, shard_id};
use crate::ZeroOptimizerError;
use crate::backend::node_behind;
use crate::module::for_each_float;
use crate::offload::leaf_node;
use crate::reduce::Parameter;

/// The parameters of a module that require gradients. `ParamId`s are random in each process, so ranks identify parameters by
/// path.
#[derive(Default)]
pub(crate) struct Parameters {
    pub(crate) list: Vec<Parameter>,
    /// The graph nodes of their leaves; `None` if the backend does not expose them.
    pub(crate) nodes: Vec<Option<u64>>,
    /// Position in the list. A tensor that the module holds twice is one parameter, under its first path.
    pub(crate) index: HashMap<ParamId, usize>,
    /// Whether the module holds any of them twice.
    pub(crate) tied: bool,
    ids: Vec<ParamId>,
    /// The first parameter that is a different leaf at a later path: its position, and that path.
    apart: Option<(usize, String)>,
}

impl Parameters {
    pub(crate) fn of<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> Self {
        let mut found = Self::default();
        for_each_float(module, |path, id, tensor: FloatTensor<B>| {
            let mut requires_grad = false;
            let node = node_behind(|| requires_grad = B::float_is_require_grad(&tensor));
            if !requires_grad {
                return;
            }
            if let Some(&index) = found.index.get(&id) {
                found.tied = true;
                if found.nodes[index] != node && found.apart.is_none() {
                    found.apart = Some((index, path.to_owned()));
                }
                return;
            }
            found.index.insert(id, found.list.len());
            found.ids.push(id);
            found.nodes.push(node);
            found.list.push(Parameter {
                path: path.to_owned(),
                shape: tensor.shape().to_vec(),
                dtype: tensor.dtype(),
            });
        });
        found
    }

    /// The values, by position.
    pub(crate) fn values<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        module: &M,
    ) -> BTreeMap<usize, FloatTensor<B::InnerBackend>> {
        let mut values = BTreeMap::new();
        for_each_float(module, |_, id, tensor: FloatTensor<B>| {
            if let Some(index) = self.position::<B>(id, &tensor) {
                values.entry(index).or_insert_with(|| B::inner(tensor));
            }
        });
        values
    }

    /// The position of a tensor of the module; `None` for a frozen copy under the same id.
    pub(super) fn position<B: AutodiffBackend>(
        &self,
        id: ParamId,
        tensor: &FloatTensor<B>,
    ) -> Option<usize> {
        let index = self.index.get(&id).copied();
        index.filter(|_| B::float_is_require_grad(tensor))
    }

    /// The known nodes of their leaves, by the ids of this rank's shards.
    pub(crate) fn leaf_nodes<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        module: &M,
    ) -> HashMap<ParamId, u64> {
        let mut nodes = HashMap::new();
        for_each_float(module, |_, id, tensor: FloatTensor<B>| {
            if let Some(index) = self.position::<B>(id, &tensor)
                && let Some(node) = leaf_node::<B>(&tensor)
            {
                nodes.entry(shard_id(index)).or_insert(node);
            }
        });
        nodes
    }

    /// Their ids, by position.
    pub(crate) fn ids(&self) -> Vec<ParamId> {
        self.ids.clone()
    }

    /// Checks that collectives support their types.
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::UnsupportedDtype`].
    pub(crate) fn check_dtypes(&self) -> Result<(), ZeroOptimizerError> {
        for Parameter { path, dtype, .. } in &self.list {
            if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
                let (path, dtype) = (path.clone(), *dtype);
                return Err(ZeroOptimizerError::UnsupportedDtype { path, dtype });
            }
        }
        Ok(())
    }

    /// Checks that whole shards can have their shapes.
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::TooManyDimensions`].
    pub(crate) fn check_dimensions(&self) -> Result<(), ZeroOptimizerError> {
        for Parameter { path, shape, .. } in &self.list {
            if shape.len() > MOST_DIMENSIONS {
                let (path, dimensions) = (path.clone(), shape.len());
                return Err(ZeroOptimizerError::TooManyDimensions { path, dimensions });
            }
        }
        Ok(())
    }

    /// # Errors
    ///
    /// [`ZeroOptimizerError::TiedApart`] if a parameter that the module holds twice is not one leaf, where the backend exposes leaves.
    pub(crate) fn check_tied(&self) -> Result<(), ZeroOptimizerError> {
        match &self.apart {
            None => Ok(()),
            Some((first, again)) => Err(ZeroOptimizerError::TiedApart {
                first: self.list[*first].path.clone(),
                again: again.clone(),
            }),
        }
    }

    /// # Errors
    ///
    /// [`ZeroOptimizerError::OtherModel`] unless these are `expected`.
    pub(crate) fn check_same(&self, expected: &[Parameter]) -> Result<(), ZeroOptimizerError> {
        let longest = self.list.len().max(expected.len());
        let differs = |&index: &usize| self.list.get(index) != expected.get(index);
        match (0..longest).find(differs) {
            None => Ok(()),
            Some(index) => Err(ZeroOptimizerError::OtherModel {
                index,
                found: self.list.get(index).map_or("none".to_owned(), describe),
                expected: expected.get(index).map_or("none".to_owned(), describe),
            }),
        }
    }

    /// A description that must be equal on all ranks.
    pub(super) fn describe(&self) -> String {
        let all: Vec<_> = self.list.iter().map(describe).collect();
        all.join(", ")
    }
}

fn describe(Parameter { path, shape, dtype }: &Parameter) -> String {
    format!("{path} {shape:?} {dtype:?}")
}
