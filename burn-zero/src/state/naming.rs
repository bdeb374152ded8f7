//! The ids under which a record knows parameters.

use std::collections::HashMap;

use burn::module::ParamId;

use crate::optimizer::{Parameters, shard_id};

/// What an id is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Known {
    /// Position of the parameter.
    pub(super) parameter: usize,
    pub(super) is: Of,
}

/// Whose tensors are under an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Of {
    /// The optimizer's, which are cut over ranks.
    Shard,
    /// Those of layers around the [`ZeroOptimizer`](crate::ZeroOptimizer), which are of this rank alone.
    Rank,
}

/// The ids that are in a record.
pub(crate) struct Naming(Vec<(String, Known)>);

impl Naming {
    /// In that of an optimizer that meets pieces of so many parameters.
    pub(crate) fn of_pieces(parameters: usize) -> Self {
        Self::of_shards((0..parameters).map(shard_id))
    }

    /// In that of an optimizer that meets parameters of these ids.
    pub(crate) fn of_module(ids: &[ParamId]) -> Self {
        Self::of_shards(ids.iter().copied())
    }

    /// In that of the layers around an optimizer that meets pieces: they meet the parameters.
    pub(crate) fn of_layers(parameters: &Parameters) -> Self {
        let Self(mut ids) = Self::of_pieces(parameters.list.len());
        ids.extend(parameters.index.iter().map(|(id, &parameter)| {
            let is = Of::Rank;
            (id.serialize(), Known { parameter, is })
        }));
        Self(ids)
    }

    fn of_shards(ids: impl Iterator<Item = ParamId>) -> Self {
        let ids = ids.enumerate().map(|(parameter, id)| {
            let is = Of::Shard;
            (id.serialize(), Known { parameter, is })
        });
        Self(ids.collect())
    }

    /// What is known, by id.
    pub(super) fn by_id(self) -> HashMap<String, Known> {
        self.0.into_iter().collect()
    }

    /// Ids, by what they are of.
    pub(super) fn ids(self) -> HashMap<Known, String> {
        let ids = self.0.into_iter();
        ids.map(|(id, known)| (known, id)).collect()
    }
}
