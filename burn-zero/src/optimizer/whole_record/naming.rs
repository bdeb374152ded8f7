//! How a record knows the parameters: by ids, and by the number of dimensions in which their states are.

use std::collections::HashMap;

use burn::module::ParamId;

use crate::optimizer::piece_id;
use crate::reduce::Layout;

/// Ids and dimensions, by parameter.
pub(super) struct Naming {
    ids: Vec<String>,
    dims: Vec<usize>,
}

impl Naming {
    /// As the wrapped optimizer knows the pieces of a layout.
    pub(super) fn of_pieces(layout: &Layout) -> Self {
        let parameters = 0..layout.parameters().len();
        Self {
            ids: parameters
                .clone()
                .map(|p| piece_id(p).serialize())
                .collect(),
            dims: parameters.map(|p| layout.piece_shape(p).len()).collect(),
        }
    }

    /// As an optimizer without ranks knows the parameters of a module.
    pub(super) fn of_module(layout: &Layout, ids: &[ParamId]) -> Self {
        let shapes = layout.parameters().iter();
        Self {
            ids: ids.iter().map(|id| id.serialize()).collect(),
            dims: shapes.map(|known| known.shape.len()).collect(),
        }
    }

    /// Positions of the parameters, by id.
    pub(super) fn positions(&self) -> HashMap<String, usize> {
        let ids = self.ids.iter().enumerate();
        ids.map(|(index, id)| (id.clone(), index)).collect()
    }

    pub(super) fn id(&self, parameter: usize) -> &str {
        &self.ids[parameter]
    }

    /// The key of an entry of a parameter's state. Burn's records say in how many dimensions a state is: `Rank2`.
    pub(super) fn key(&self, key: &str, parameter: Option<usize>) -> String {
        let dims = key.strip_prefix("Rank").map(str::parse::<usize>);
        match (parameter, dims) {
            (Some(parameter), Some(Ok(_))) => format!("Rank{}", self.dims[parameter]),
            _ => key.to_owned(),
        }
    }
}
