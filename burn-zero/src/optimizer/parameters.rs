//! The parameters of a module, in the order of its paths.

use std::collections::{BTreeMap, HashMap};

use burn::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor, backend::AutodiffBackend};

use burn_backend::tensor::FloatTensor;

use crate::ZeroOptimizerError;
use crate::backend::node_behind;
use crate::offload::leaf_node;
use crate::reduce::Parameter;

use super::parameter_shards::{MOST_DIMENSIONS, shard_id};

/// The parameters of a module that require gradients. `ParamId`s are random in each process: what ranks have in common are
/// paths.
#[derive(Default)]
pub(crate) struct Parameters {
    pub(crate) list: Vec<Parameter>,
    /// The nodes of their leaves, as far as the backend shows them.
    pub(crate) nodes: Vec<Option<u64>>,
    /// Position in the list. One that the module holds twice is one parameter, under its first path.
    pub(crate) index: HashMap<ParamId, usize>,
    /// Whether the module holds any of them twice.
    pub(crate) tied: bool,
    /// The first that is another leaf at a later path: its position, and that path.
    apart: Option<(usize, String)>,
    path: Vec<String>,
}

impl Parameters {
    pub(crate) fn of<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> Self {
        let mut found = Self::default();
        module.visit(&mut found);
        found
    }

    /// The values, by position.
    pub(crate) fn values<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        module: &M,
    ) -> BTreeMap<usize, FloatTensor<B::InnerBackend>> {
        let mut values = Values::<B> {
            parameters: self,
            found: BTreeMap::new(),
        };
        module.visit(&mut values);
        values.found
    }

    /// The nodes of their leaves, as far as they are known, by the ids of this rank's shards.
    pub(crate) fn leaf_nodes<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        module: &M,
    ) -> HashMap<ParamId, u64> {
        let mut nodes = LeafNodes {
            parameters: self,
            found: HashMap::new(),
        };
        module.visit(&mut nodes);
        nodes.found
    }

    /// Their ids, by position.
    pub(crate) fn ids(&self) -> Vec<ParamId> {
        let mut ids: Vec<_> = self.index.iter().map(|(id, index)| (*index, *id)).collect();
        ids.sort_unstable_by_key(|(index, _)| *index);
        ids.into_iter().map(|(_, id)| id).collect()
    }

    /// # Errors
    ///
    /// [`ZeroOptimizerError::UnsupportedDtype`].
    pub(crate) fn check_dtypes(&self) -> Result<(), ZeroOptimizerError> {
        let odd = self
            .list
            .iter()
            .find(|parameter| !matches!(parameter.dtype, DType::F32 | DType::BF16 | DType::F16));
        match odd {
            None => Ok(()),
            Some(Parameter { path, dtype, .. }) => Err(ZeroOptimizerError::UnsupportedDtype {
                path: path.clone(),
                dtype: *dtype,
            }),
        }
    }

    /// # Errors
    ///
    /// [`ZeroOptimizerError::TooManyDimensions`] for an optimizer that meets them in their shape.
    pub(crate) fn check_dimensions(&self) -> Result<(), ZeroOptimizerError> {
        let odd = self
            .list
            .iter()
            .find(|parameter| parameter.shape.len() > MOST_DIMENSIONS);
        match odd {
            None => Ok(()),
            Some(Parameter { path, shape, .. }) => Err(ZeroOptimizerError::TooManyDimensions {
                path: path.clone(),
                dimensions: shape.len(),
            }),
        }
    }

    /// # Errors
    ///
    /// [`ZeroOptimizerError::TiedApart`] if one that the module holds twice is not one leaf, as far as the backend shows.
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
                found: name(self.list.get(index)),
                expected: name(expected.get(index)),
            }),
        }
    }
}

struct LeafNodes<'a> {
    parameters: &'a Parameters,
    found: HashMap<ParamId, u64>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for LeafNodes<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let index = self.parameters.index.get(&param.id);
        let value = param.val();
        if let Some(&index) = index.filter(|_| value.is_require_grad())
            && let Some(node) = leaf_node(&value)
        {
            self.found.entry(shard_id(index)).or_insert(node);
        }
    }
}

/// The values of the parameters.
struct Values<'a, B: AutodiffBackend> {
    parameters: &'a Parameters,
    found: BTreeMap<usize, FloatTensor<B::InnerBackend>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Values<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let value = param.val();
        // A frozen copy under the same id is another tensor.
        if !value.is_require_grad() {
            return;
        }
        if let Some(&index) = self.parameters.index.get(&param.id) {
            let value = value.inner().into_primitive().tensor();
            self.found.entry(index).or_insert(value);
        }
    }
}

fn name(parameter: Option<&Parameter>) -> String {
    parameter.map_or("none".to_owned(), |Parameter { path, shape, dtype }| {
        format!("{path} {shape:?} {dtype:?}")
    })
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Parameters {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let tensor = param.val();
        let mut requires_grad = false;
        let node = node_behind(|| requires_grad = tensor.is_require_grad());
        if !requires_grad {
            return;
        }
        if let Some(&index) = self.index.get(&param.id) {
            self.tied = true;
            if self.nodes[index] != node && self.apart.is_none() {
                self.apart = Some((index, self.path.join(".")));
            }
            return;
        }
        self.index.insert(param.id, self.list.len());
        self.nodes.push(node);
        self.list.push(Parameter {
            path: self.path.join("."),
            shape: tensor.dims().to_vec(),
            dtype: tensor.dtype(),
        });
    }
}
