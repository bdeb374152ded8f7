//! Running statistics: tensors that a forward pass changes and that clones of a module share, behind a lock.
//!
//! Burn's `RunningState`, of which BatchNorm has two, holds its lock while a visitor or a mapper runs on it. So this module makes no
//! collective while a module is visited or mapped: tensors are collected, broadcast, and then put back.

use core::any::Any;
use std::collections::{BTreeSet, HashMap, VecDeque};

use burn::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Float, Int, Tensor, TensorData, backend::AutodiffBackend};
use burn_backend::tensor::FloatTensor;

use crate::ZeroError;
use crate::group::{HostBuffer, ProcessGroup};
use crate::host::{HostRead, floats};
use crate::module::replace_tensors;
use burn_decorator::module::{for_each_float, map_floats};

/// A clone of a module with running statistics of its own, such as BatchNorm's, which ordinary clones share. The
/// parameters are the same leaves under the same ids, as in a clone; no data is copied.
///
/// For ranks that are threads and start from one model. [`ZeroOptimizer::prepare`](crate::ZeroOptimizer::prepare)
/// and [`ZeroStrategy`](crate::ZeroStrategy) make such a copy themselves:
///
/// ```
/// # use burn::{backend::Autodiff, nn::{BatchNorm, BatchNormConfig}, tensor::Tensor};
/// # type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let norm: BatchNorm<B> = BatchNormConfig::new(3).init(&device);
/// let (clone, own) = (norm.clone(), burn_zero::independent::<B, _>(&norm));
///
/// norm.forward(Tensor::<B, 2>::ones([4, 3], &device));
/// let mean = |norm: &BatchNorm<B>| norm.running_mean.value_sync().into_data();
/// assert_eq!(mean(&clone), mean(&norm));
/// assert_ne!(mean(&own), mean(&norm));
/// ```
pub fn independent<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> M {
    // First, because it initialises lazy parameters, which otherwise each clone would initialise for itself.
    let inner = module.valid();
    let mut params = Params(VecDeque::new());
    module.visit(&mut params);
    // Conversion to the inner backend and back makes new running statistics, but loses leaves and mappers: these are put back.
    M::from_inner(inner).map(&mut params)
}

/// The module, or an [`independent`] one if it shares running statistics with its clones.
pub(super) fn independent_if_shared<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: Box<M>,
) -> Box<M> {
    if Statistics::of::<B, M>(&module).is_empty() {
        module
    } else {
        Box::new(independent::<B, M>(&module))
    }
}

/// Clones of a module's parameters, in its order: as a visitor it collects them, as a mapper it puts them into another module.
struct Params(VecDeque<Box<dyn Any>>);

macro_rules! params_of_kind {
    ($visit:ident, $kind:ident) => {
        fn $visit<const D: usize>(&mut self, param: &Param<Tensor<B, D, $kind>>) {
            self.0.push_back(Box::new(param.clone()));
        }
    };
    ($map:ident -> $kind:ident) => {
        fn $map<const D: usize>(
            &mut self,
            _: Param<Tensor<B, D, $kind>>,
        ) -> Param<Tensor<B, D, $kind>> {
            let param = self.0.pop_front().and_then(|param| param.downcast().ok());
            *param.expect("a module and what `from_inner` makes of it have the same tensors")
        }
    };
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Params {
    params_of_kind!(visit_float, Float);
    params_of_kind!(visit_int, Int);
    params_of_kind!(visit_bool, Bool);
}

impl<B: AutodiffBackend> ModuleMapper<B> for Params {
    params_of_kind!(map_float -> Float);
    params_of_kind!(map_int -> Int);
    params_of_kind!(map_bool -> Bool);
}

/// The running statistics of a module, by their paths.
#[derive(Debug, Default)]
pub(crate) struct Statistics(BTreeSet<String>);

impl Statistics {
    /// Distinguished from frozen parameters by a trial on a copy that nothing else shares: a mapper that changes a clone's running
    /// statistics changes the module's too.
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

    /// Gives the module, and with it all its clones, the running statistics of rank 0. One collective, if there are any.
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
                own.push((path.to_owned(), HostRead::start::<B>(tensor).data()));
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
