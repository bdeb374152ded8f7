//! Scopes of the repeated blocks of a model, found by the paths of its parameters.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_backend::tensor::{Device, FloatTensor};
use burn_decorator::module::map_floats;
use burn_decorator::{gradient, repeated_block};

use crate::MemoryBudget;
use crate::budget::in_force::apart;
use crate::error::RematError;
use crate::host::request::Named;
use crate::record::context;
use crate::record::op::OpInfo;
use crate::scope::parameter_unit::{self, Put};
use crate::scope::units::{self, Programs, Unit};

/// Makes a [scope](crate::checkpoint) of every repeated block of a model, such as `blocks.0` or
/// `encoder.layers.3`, without a change to the model's code.
///
/// A block is found by the paths of its parameters. The first operation of a forward pass that uses
/// a parameter of a block begins its scope; the first one that uses a parameter of another block,
/// or of none, ends it, and so does the backward pass. What a block hands to the rest of the model
/// is found by its uses.
///
/// The model that is returned has the same parameters, as new leaves. An optimizer makes new ones
/// in each update, so [`wrap`](CheckpointedUnits::wrap) the optimizer, inside of a loss scaler.
/// Those of burn-zero, over ranks and on the host, keep parameters in their units by themselves.
/// Parameters that anything else makes, such as those of a record that was loaded, are in no unit
/// until [`mark`](CheckpointedUnits::mark). A block of which no parameter is in a unit belongs to
/// the block before.
///
/// # Over ranks
///
/// At every stage, also with parameters in host memory: call this before the ranks prepare the
/// model, because a reduction over ranks knows each parameter as the leaf that it has prepared.
/// Clones of the model, such as those of ranks that are threads, share the units.
///
/// # Cost
///
/// That of [`checkpoint`](crate::checkpoint) around each block. In the first step the first block
/// of each kind stays in memory until the next block is over, and a tensor of it that a later part
/// of the model uses beyond the next block is computed again once. Each thread learns this by
/// itself. Two small allocations for each parameter and update.
///
/// # Limits
///
/// - What a block computes before it uses a parameter belongs to the block before.
/// - A block that is called several times in a row is one scope. One whose code begins with a scope
///   of its own is two, as that begins first.
/// - The last block of a model in which no parameter comes after it ends with the backward pass,
///   and without one, as in validation, with the next use of a parameter in a unit on this thread.
/// - A parameter that the model holds under two paths becomes two leaves with the same values, as
///   it does in the first update of Burn's optimizers.
/// - Parameters that are in no block may be used between blocks only: inside of a block they end
///   its scope, and its next parameter begins another one.
///
/// # Errors
///
/// - [`RematError::NoRepeatedBlocks`] if fewer than two blocks are found by the paths.
/// - [`RematError::UnitsNotSeen`] if `B` has no [`Remat`](crate::Remat) in it.
/// - [`RematError::UnitsHidden`] if casts of parameters are kept above `Remat`.
/// - [`RematError::BackwardNotTold`] if `B` does not tell its backward passes.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::{GradientsParams, Optimizer, SgdConfig};
/// use burn::tensor::{Tensor, activation::gelu, backend::Backend};
/// use burn_amp::{Autocast, Off};
/// use burn_checkpoint::{Remat, RematStats, checkpoint_units};
/// use burn_flex::Flex;
///
/// mod of_another_crate {
///     use super::*;
///
///     #[derive(Module, Debug)]
///     pub struct Model<B: Backend> {
///         blocks: Vec<Linear<B>>, // private
///     }
///
///     impl<B: Backend> Model<B> {
///         pub fn new(device: &B::Device) -> Self {
///             Self { blocks: (0..4).map(|_| LinearConfig::new(8, 8).init(device)).collect() }
///         }
///
///         pub fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
///             self.blocks.iter().fold(x, |x, block| gelu(block.forward(x)))
///         }
///     }
/// }
/// use of_another_crate::Model;
///
/// type B = Autocast<Autodiff<Remat<Flex>>, Off>;
/// # fn main() -> Result<(), burn_checkpoint::RematError> {
/// let device = Default::default();
/// let (mut model, units) = checkpoint_units(Model::<B>::new(&device))?;
/// let mut optimizer = units.wrap(SgdConfig::new().init());
/// for _ in 0..3 {
///     let loss = model.forward(Tensor::ones([2, 8], &device)).sum();
///     let gradients = GradientsParams::from_grads(loss.backward(), &model);
///     model = optimizer.step(0.1, model, gradients);
/// }
/// assert!(RematStats::of_thread().replayed_operations > 0);
/// # Ok(())
/// # }
/// ```
pub fn checkpoint_units<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: M,
) -> Result<(M, CheckpointedUnits), RematError> {
    checkpoint_units_by(model, |path| repeated_block(path).to_owned())
}

/// [`checkpoint_units`] with units of your own: `unit` returns the name of the unit of a parameter,
/// by its path, and an empty one for a parameter that is in none. For models whose repeated blocks
/// are too large or too small, such as one of stages that have blocks.
///
/// # Errors
///
/// As [`checkpoint_units`].
pub fn checkpoint_units_by<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: M,
    unit: impl Fn(&str) -> String,
) -> Result<(M, CheckpointedUnits), RematError> {
    let device = model.devices().into_iter().next().unwrap_or_default();
    let backend = B::name(&device);
    // The cast of a weight that burn-amp's `CastCache` keeps is no use of the weight.
    if backend.contains("cast-cache<remat") {
        return Err(RematError::UnitsHidden { backend });
    }
    let programs = Arc::new(Programs::default());
    let mut by_name: BTreeMap<String, Arc<Unit>> = BTreeMap::new();
    let mut parameters = BTreeMap::new();
    burn_decorator::module::for_each_float(&model, |path, _, _: FloatTensor<B>| {
        let name = unit(path);
        let unit = by_name
            .entry(name.clone())
            .or_insert_with(|| Unit::new(name, programs.clone()));
        let named = Named {
            path: OpInfo::parameter(path),
            unit: Some(unit.clone()),
        };
        parameters.insert(path.to_owned(), named);
    });
    let blocks = by_name.keys().filter(|name| !name.is_empty()).count();
    if blocks < 2 {
        return Err(RematError::NoRepeatedBlocks {
            parameters: parameters.len(),
            blocks,
        });
    }
    let units = CheckpointedUnits {
        parameters: Arc::new(parameters),
    };
    let mut unseen = None;
    let model = units.mark_and_see::<B, M>(model, |path| {
        unseen.get_or_insert_with(|| path.to_owned());
    });
    if let Some(parameter) = unseen {
        return Err(RematError::UnitsNotSeen { backend, parameter });
    }
    // burn-zero's `Sharded` tells its passes, and over ranks a pass is a collective.
    if !backend.contains("sharded<") && !is_told::<B>(&device) {
        return Err(RematError::BackwardNotTold { backend });
    }
    Ok((model, units))
}

/// Whether `Remat` is told of a backward pass of this backend.
fn is_told<B: AutodiffBackend>(device: &Device<B>) -> bool {
    // A budget that is installed must not take this for a step.
    let _apart = apart();
    let _all = MemoryBudget::unlimited().install();
    let before = context::last_told();
    let x = Tensor::<B, 1>::ones([1], device).require_grad();
    drop(x.mul_scalar(2.0).backward());
    context::last_told() != before
}

/// The units of a model that have scopes: see [`checkpoint_units`].
#[derive(Clone)]
pub struct CheckpointedUnits {
    /// By path.
    parameters: Arc<BTreeMap<String, Named>>,
}

impl fmt::Debug for CheckpointedUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckpointedUnits")
            .field("names", &self.names())
            .finish()
    }
}

impl CheckpointedUnits {
    /// The names of the units that have scopes.
    pub fn names(&self) -> Vec<&str> {
        let units = self.parameters.values().filter_map(|it| it.unit.as_ref());
        let of_parameters = units.map(|unit| unit.name());
        let mut names: Vec<_> = of_parameters.filter(|name| !name.is_empty()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// The optimizer, whose updated parameters are in their units again. It goes where the
    /// optimizer went: in an `Update` it is the innermost part, `Update::new(units.wrap(optimizer))`.
    pub fn wrap<O>(&self, optimizer: O) -> UnitsOptimizer<O> {
        UnitsOptimizer {
            inner: optimizer,
            units: self.clone(),
        }
    }

    /// The model with its parameters in their units: for parameters that something else than the
    /// [wrapped](Self::wrap) optimizer has made, such as those of a record that was loaded. An
    /// update by an optimizer that is not wrapped has to run in [`gradient::update`], because it
    /// uses parameters, too.
    ///
    /// # Cost
    ///
    /// Two small allocations for each parameter that is in no unit; no copy.
    #[must_use = "the model that is returned has its parameters in their units"]
    pub fn mark<B: AutodiffBackend, M: AutodiffModule<B>>(&self, model: M) -> M {
        self.mark_and_see::<B, M>(model, |_| ())
    }

    /// [`Self::mark`], which calls `unseen` with the path of each parameter that `Remat` does not
    /// see.
    fn mark_and_see<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        model: M,
        mut unseen: impl FnMut(&str),
    ) -> M {
        units::end_inside_of(0, &[]);
        map_floats(model, |path, _, value: FloatTensor<B>| {
            let Some(named) = self.parameters.get(path) else {
                return value;
            };
            let Put { version, is_seen } = parameter_unit::put::<B>(named, value);
            if !is_seen {
                unseen(path);
            }
            version
        })
    }
}

/// An optimizer whose updated parameters are in their units: by [`CheckpointedUnits::wrap`].
#[derive(Clone, Debug)]
pub struct UnitsOptimizer<O> {
    inner: O,
    units: CheckpointedUnits,
}

impl<O> UnitsOptimizer<O> {
    /// The optimizer alone.
    pub fn into_inner(self) -> O {
        self.inner
    }
}

impl<M, B, O> Optimizer<M, B> for UnitsOptimizer<O>
where
    M: AutodiffModule<B>,
    B: AutodiffBackend,
    O: Optimizer<M, B>,
{
    type Record = O::Record;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        let module = gradient::update(|| self.inner.step(lr, module, grads));
        self.units.mark::<B, M>(module)
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        let module = gradient::update(|| self.inner.step_multi(lr, module, grads));
        self.units.mark::<B, M>(module)
    }

    fn to_record(&self) -> Self::Record {
        self.inner.to_record()
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self {
            inner: self.inner.load_record(record),
            units: self.units,
        }
    }
}
