//! Running statistics: tensors that a forward pass changes and that clones of a module share,
//! behind a lock.
//!
//! Burn's `RunningState`, of which BatchNorm has two, holds its lock while a visitor or a mapper
//! runs on it. So this module makes no collective while a module is visited or mapped: tensors are
//! collected, broadcast, and then put back.

use std::collections::{BTreeSet, HashMap};

use burn::module::AutodiffModule;
use burn::tensor::{TensorData, backend::AutodiffBackend};
use burn_backend::tensor::FloatTensor;
use burn_ranks::{HostBuffer, ProcessGroup};

use super::module::replace_tensors;
use crate::error::ZeroError;
use crate::host::{floats, read};
use burn_decorator::module::{for_each_float, independent, map_floats};

/// The module, or an [`independent`] one if it shares running statistics with its clones.
pub(crate) fn independent_if_shared<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: Box<M>,
) -> Box<M> {
    if Statistics::of::<B, M>(&module).is_empty() {
        module
    } else {
        Box::new(independent::<B, M>(&module))
    }
}

/// The running statistics of a module, by their paths.
#[derive(Debug, Default)]
pub(crate) struct Statistics(BTreeSet<String>);

impl Statistics {
    /// Distinguished from frozen parameters by a trial on a copy that nothing else shares: a mapper
    /// that changes a clone's running statistics changes the module's too.
    pub(crate) fn of<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> Self {
        let copy = M::from_inner(module.valid());
        let frozen = untrained::<B, M>(&copy);
        drop(map_floats(copy.clone(), |_, _, tensor| {
            B::float_set_require_grad(tensor, true)
        }));
        let still_frozen = untrained::<B, M>(&copy);
        Self(frozen.difference(&still_frozen).cloned().collect())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn contains(&self, path: &str) -> bool {
        self.0.contains(path)
    }

    /// Gives the module, and with it all its clones, the running statistics of rank 0. One
    /// collective, if there are any.
    ///
    /// # Errors
    ///
    /// Those of the group, also if rank 0's statistics have another size.
    pub(crate) fn share<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        module: &M,
        group: &dyn ProcessGroup,
    ) -> Result<(), ZeroError> {
        if group.world_size() == 1 || self.is_empty() {
            return Ok(());
        }
        drop(module.valid()); // applies pending updates of the last forward pass
        let mut own = Vec::new();
        for_each_float(module, |path, _, tensor: FloatTensor<B>| {
            if self.contains(path) {
                own.push((path.to_owned(), read::<B>(tensor)));
            }
        });
        let values = own.iter().flat_map(|(_, data)| floats(data.clone()));
        let values = HostBuffer::F32(values.collect());
        let first = group.broadcast("running statistics", 0, values)?;
        let mut rest = first.into_f32().into_iter();
        let arrived = own.into_iter().map(|(path, data)| {
            let values: Vec<_> = rest.by_ref().take(data.num_elements()).collect();
            let data = TensorData::new(values, data.shape).convert_dtype(data.dtype);
            (path, data)
        });
        let mut arrived: HashMap<_, _> = arrived.collect();
        if group.rank() != 0 {
            // Mapping a clone changes the module's statistics too.
            drop(replace_tensors::<B, M>(module.clone(), &mut |path, _| {
                arrived.remove(path)
            }));
        }
        Ok(())
    }
}

/// The paths of the float tensors that require no gradients.
fn untrained<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for_each_float(module, |path, _, tensor| {
        if !B::float_is_require_grad(&tensor) {
            found.insert(path.to_owned());
        }
    });
    found
}
