//! The unit of a parameter, which its next version is in, too.

use burn::tensor::backend::AutodiffBackend;
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};
use burn_decorator::carried::carry;

use crate::host::request::Named;
use crate::record::context;
use crate::scope::units;

/// The unit that a parameter is in, if it is that of a model whose units have scopes
/// ([`checkpoint_units`](crate::checkpoint_units)).
///
/// An update makes a new tensor of each parameter. Code that makes it by itself, as burn-zero does
/// of the shards of all ranks, puts it into the unit of the parameter that it replaces.
///
/// # Cost
///
/// None where no model of the process has units; else two small allocations for each parameter.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::ops::FloatTensor;
/// use burn_checkpoint::{ParameterUnit, Remat};
/// use burn_flex::Flex;
///
/// type B = Autodiff<Remat<Flex>>;
///
/// fn replace(before: FloatTensor<B>, next: FloatTensor<B>) -> FloatTensor<B> {
///     ParameterUnit::of::<B>(&before).put::<B>(next)
/// }
/// # let x = burn::tensor::Tensor::<B, 1>::ones([1], &Default::default());
/// # let x = x.into_primitive().tensor();
/// # replace(x.clone(), x);
/// ```
#[derive(Clone, Debug, Default)]
pub struct ParameterUnit(Option<Named>);

impl ParameterUnit {
    /// That of a parameter.
    pub fn of<B: Backend>(parameter: &FloatTensor<B>) -> Self {
        if !units::exist() {
            return Self::default();
        }
        let nodes = context::collecting(|| drop(parameter.shape()));
        let mut named = nodes.iter().filter_map(|node| {
            Some(Named {
                path: node.info().op,
                unit: Some(node.unit()?),
            })
        });
        Self(named.next())
    }

    /// The next version of the parameter, in this unit: as a new leaf, unless it is
    /// [delivered](crate::delivered()).
    pub fn put<B: AutodiffBackend>(&self, version: FloatTensor<B>) -> FloatTensor<B> {
        match &self.0 {
            None => version,
            Some(named) => put::<B>(named, version).version,
        }
    }
}

/// A version of a parameter, and whether `Remat` has put it into a unit.
pub(crate) struct Put<B: Backend> {
    pub version: FloatTensor<B>,
    pub is_seen: bool,
}

/// Puts a version of a parameter into a unit, unless it is there.
pub(crate) fn put<B: AutodiffBackend>(named: &Named, version: FloatTensor<B>) -> Put<B> {
    let nodes = context::collecting(|| drop(version.shape()));
    let unit = named.unit.as_ref();
    let is_there = unit.is_none_or(|unit| {
        let mut nodes = nodes.iter();
        nodes.any(|node| node.is_of_unit(unit) || node.put_in_unit(unit))
    });
    if is_there {
        return Put {
            version,
            is_seen: true,
        };
    }
    let requires_grad = B::float_is_require_grad(&version);
    let value = B::inner(version);
    let device = B::InnerBackend::float_device(&value);
    let again = || B::InnerBackend::float_to_device(value, &device);
    let (value, not_taken) = carry(named.clone(), again);
    Put {
        version: B::float_set_require_grad(B::from_inner(value), requires_grad),
        is_seen: not_taken.is_none(),
    }
}
