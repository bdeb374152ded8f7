//! The parameters of a module, in the order of its paths.

use std::collections::HashMap;

use burn::module::{AutodiffModule, ParamId};
use burn::tensor::{TensorMetadata, backend::AutodiffBackend};
use burn_backend::tensor::FloatTensor;
use burn_ranks::Partition;

use crate::backend::{is_hooked, leaf_node};
use crate::error::ShardingFault;
use crate::host::exchanged;
use crate::reduce::ParameterSpec;
use burn_decorator::module::for_each_float;

/// Most dimensions of a shard, as in Burn's records of optimizers.
const MOST_DIMENSIONS: usize = 8;

/// The parameters of a module that require gradients. `ParamId`s are random in each process, so
/// ranks identify parameters by path.
#[derive(Default)]
pub(crate) struct Parameters {
    pub(crate) list: Vec<ParameterSpec>,
    /// The graph nodes of their leaves; `None` if the backend does not expose them.
    pub(crate) nodes: Vec<Option<u64>>,
    /// Whether the backend has a [`Sharded`](crate::Sharded) in it, which can hook them.
    pub(crate) are_hooked: bool,
    /// Position in the list. A tensor that the module holds twice is one parameter, under its first
    /// path.
    pub(crate) index: HashMap<ParamId, usize>,
    ids: Vec<ParamId>,
    /// The first parameter that is a different leaf at a later path: its position, and that path.
    apart: Option<(usize, String)>,
}

impl Parameters {
    pub(crate) fn of<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> Self {
        let mut found = Self {
            are_hooked: true,
            ..Self::default()
        };
        for_each_float(module, |path, id, tensor: FloatTensor<B>| {
            if !B::float_is_require_grad(&tensor) {
                return;
            }
            let node = leaf_node::<B>(&tensor);
            found.are_hooked &= is_hooked::<B>(&tensor);
            if let Some(&index) = found.index.get(&id) {
                if found.nodes[index] != node && found.apart.is_none() {
                    found.apart = Some((index, path.to_owned()));
                }
                return;
            }
            found.index.insert(id, found.list.len());
            found.ids.push(id);
            found.nodes.push(node);
            found.list.push(ParameterSpec {
                path: path.to_owned(),
                shape: tensor.shape().to_vec(),
                dtype: tensor.dtype(),
            });
        });
        found
    }

    /// The position of a tensor of the module; `None` for a frozen copy under the same id.
    pub(crate) fn position<B: AutodiffBackend>(
        &self,
        id: ParamId,
        tensor: &FloatTensor<B>,
    ) -> Option<usize> {
        let index = self.index.get(&id).copied();
        index.filter(|_| B::float_is_require_grad(tensor))
    }

    /// Their ids, by position.
    pub(crate) fn ids(&self) -> Vec<ParamId> {
        self.ids.clone()
    }

    /// # Errors
    ///
    /// [`ShardingFault::UnsupportedDtype`] if collectives do not support a type;
    /// [`ShardingFault::TooManyDimensions`] if a parameter has more dimensions than a whole
    /// shard can have.
    pub(crate) fn check(&self, ranks: usize, partition: Partition) -> Result<(), ShardingFault> {
        for ParameterSpec { path, shape, dtype } in &self.list {
            let (path, dtype, dimensions) = (path.clone(), *dtype, shape.len());
            if ranks > 1 && exchanged(dtype).is_none() {
                return Err(ShardingFault::UnsupportedDtype { path, dtype });
            }
            if partition == Partition::Whole && dimensions > MOST_DIMENSIONS {
                return Err(ShardingFault::TooManyDimensions { path, dimensions });
            }
        }
        Ok(())
    }

    /// # Errors
    ///
    /// [`ShardingFault::OtherModel`] unless these are `expected`.
    pub(crate) fn check_same(&self, expected: &[ParameterSpec]) -> Result<(), ShardingFault> {
        let longest = self.list.len().max(expected.len());
        let differs = |&index: &usize| self.list.get(index) != expected.get(index);
        let Some(index) = (0..longest).find(differs) else {
            return Ok(());
        };
        let describe = |found: Option<&ParameterSpec>| found.map_or("none".to_owned(), describe);
        let (found, expected) = (self.list.get(index), expected.get(index));
        Err(ShardingFault::OtherModel(format!(
            "parameter {index} of the module is {}, but that of the prepared model is {}: prepare the model again after \
             changing it",
            describe(found),
            describe(expected)
        )))
    }

    /// # Errors
    ///
    /// [`ShardingFault::OtherModel`] if a parameter that the module holds twice is not one
    /// leaf.
    pub(crate) fn check_tied(&self) -> Result<(), ShardingFault> {
        let Some((first, again)) = &self.apart else {
            return Ok(());
        };
        Err(ShardingFault::OtherModel(format!(
            "{again} is {} held again, but the two are separate leaves now, and Burn keeps the gradient of one of them \
             only: `load_record` and `fork` take tied parameters apart, so prepare the model again after them",
            self.list[*first].path
        )))
    }

    /// Descriptions that must be equal on all ranks.
    pub(crate) fn describe(&self) -> Vec<String> {
        self.list.iter().map(describe).collect()
    }
}

fn describe(ParameterSpec { path, shape, dtype }: &ParameterSpec) -> String {
    format!("{path} {shape:?} {dtype:?}")
}
