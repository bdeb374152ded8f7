//! Copies of modules that share no running statistics. With the feature `module`.
//!
//! A clone of a module shares its running statistics, such as those of BatchNorm: a training
//! forward pass of the clone changes the module. Everything that runs a step of the user to learn
//! something, such as its memory or its first overflow, runs it on a copy from here.

use core::any::Any;
use std::collections::VecDeque;

use burn::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Float, Int, Tensor, backend::AutodiffBackend};

/// A clone of a module with running statistics of its own, such as BatchNorm's, which ordinary
/// clones share. The parameters are the same leaves under the same ids, as in a clone; no data is
/// copied.
///
/// For whoever runs a training forward pass to learn something and leaves the training as it was,
/// and for ranks that are threads and start from one model. Lazy parameters of `module` are
/// initialised, so that both have the same values, and the statistics of its last forward pass are
/// applied to it, which Burn otherwise does in its next one.
///
/// ```
/// # use burn::{backend::Autodiff, nn::{BatchNorm, BatchNormConfig}, tensor::Tensor};
/// # type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let norm: BatchNorm<B> = BatchNormConfig::new(3).init(&device);
/// let (clone, own) = (norm.clone(), burn_decorator::module::independent::<B, _>(&norm));
///
/// norm.forward(Tensor::<B, 2>::ones([4, 3], &device));
/// let mean = |norm: &BatchNorm<B>| norm.running_mean.value_sync().into_data();
/// assert_eq!(mean(&clone), mean(&norm));
/// assert_ne!(mean(&own), mean(&norm));
/// ```
pub fn independent<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> M {
    // First, because it initialises lazy parameters, which otherwise each clone would initialise
    // for itself.
    let inner = module.valid();
    let mut params = Params(VecDeque::new());
    module.visit(&mut params);
    // Conversion to the inner backend and back makes new running statistics, but loses leaves and
    // mappers: these are put back.
    M::from_inner(inner).map(&mut params)
}

/// Clones of a module's parameters, in its order: as a visitor it collects them, as a mapper it
/// puts them into another module.
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
