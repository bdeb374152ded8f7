//! Parameters, wherever their elements are.
//!
//! This file moves them to host memory. `leaf.rs` makes the leaf of a parameter's next value.
//! `store.rs` is the store of a prepared model: its `entries.rs` by path, and a `version.rs` of
//! each. At stage 3 a version is a `shard.rs` on each rank, which `gathers.rs` gathers by
//! `units.rs`, in the order and the types of `uses.rs`. `parts.rs` is what a rank has of a parameter
//! before the model is prepared.

mod entries;
mod gathers;
mod leaf;
pub(crate) mod module;
mod parts;
mod shard;
mod statistics;
mod store;
mod trained;
mod units;
mod uses;
mod version;

use std::collections::HashMap;

use burn::module::{AutodiffModule, ModuleMapper, Param, ParamId};
use burn::tensor::{
    Tensor, TensorPrimitive,
    backend::{AutodiffBackend, Backend},
};
use burn_backend::tensor::{Device, FloatTensor};
use burn_checkpoint::{RematError, UploadOrder, UploadPlace};
use burn_decorator::follow_path;

use crate::backend::trained_leaf;
use crate::error::{ShardingFault, ZeroError};
use crate::host::read;
pub(crate) use entries::{StoreEntries, replace_leaves};
pub(crate) use leaf::{LeafMemory, LeafPlace, NewValue, is_on_host};
pub(crate) use parts::Parts;
pub(crate) use shard::Shard;
pub(crate) use statistics::{Statistics, independent_if_shared};
pub(crate) use store::ParameterStore;
pub(crate) use trained::Parameters;
pub(crate) use units::Units;
pub(crate) use version::{Maker, ParameterVersion};

/// The module with its parameters, trained and frozen, in host memory (DeepSpeed's
/// `offload_param`). The device holds a parameter only while an operation uses it, in forward and
/// in backward, or is about to: it is uploaded for that operation and dropped after it. So are
/// views and casts of it that autodiff saves. Losses and gradients have the same bits as without
/// offload.
///
/// The backend needs a [`Remat`](burn_checkpoint::Remat) below autodiff: `Autodiff<Remat<Cuda>>`,
/// or with gradients that leave during backward `Sharded<Autodiff<Remat<Cuda>>>`.
///
/// [`OffloadedAdamW`](crate::OffloadedAdamW) and an [update over ranks](crate::ReduceOverRanks)
/// leave a parameter in host memory if it is there; with
/// [`ZeroSettings::parameters`](crate::ZeroSettings::parameters) such an update puts it there by
/// itself. Burn's own optimizers return parameters on the device: reduce their update, over one
/// rank ([`SingleRank`](crate::SingleRank)) if there is but one. Clones, `valid()` and `fork` share
/// what is in host memory; loading a record puts the new values there. `param.val()` can be used as
/// before: each operation on it uploads it, a read takes it from host memory. Running statistics,
/// integers and booleans stay on the device.
///
/// ```
/// use burn::{backend::Autodiff, nn, optim::{GradientsParams, Optimizer}, prelude::*};
/// use burn_checkpoint::Remat;
/// use burn_zero::{HostAdamWConfig, OffloadConfig, offload_parameters};
///
/// type B = Autodiff<Remat<burn_flex::Flex>>;
/// let device = Default::default();
/// let model: nn::Linear<B> = nn::LinearConfig::new(4, 3).init(&device);
///
/// let mut model = offload_parameters::<B, _>(model)?;
/// let mut optimizer = OffloadConfig::new(HostAdamWConfig::default()).init()?;
/// for _ in 0..3 {
///     let loss = model.forward(Tensor::<B, 2>::ones([2, 4], &device)).square().mean();
///     let gradients = GradientsParams::from_grads(loss.backward(), &model);
///     model = optimizer.step(1e-3, model, gradients);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # A model that is larger than the device
///
/// Parameters that are not initialised yet are initialised one at a time, each leaving the device
/// before the next is made. So offload a model before anything uses it.
///
/// # Errors
///
/// [`ShardingFault::NoRemat`] for a backend without [`Remat`](burn_checkpoint::Remat).
///
/// # Cost
///
/// In host memory the bytes of all parameters. A use uploads the parameter: twice for a weight of a
/// layer in a step, once in forward and once in backward, and once more in a scope that is
/// recomputed. The upload takes the host's memory without a copy. From the second step on the next
/// one's begins while an operation computes with this one, so that the device holds two parameters;
/// not under a `MemoryBudget`.
pub fn offload_parameters<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
) -> Result<M, ZeroError> {
    Ok(offloaded::<B, M>(module, None)?)
}

/// [`offload_parameters`], whose parameters are uploaded to `device`, or to the device they are on
/// now if it is `None`.
pub(crate) fn offloaded<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
    device: Option<&Device<B>>,
) -> Result<M, ShardingFault> {
    let order = UploadOrder::new();
    replace_parameters(module, |_, old: &FloatTensor<B>| {
        if is_on_host::<B>(old) {
            return Ok(None);
        }
        let moved = moved::<B>(old.clone(), device, &order.place());
        Ok(Some(moved.map_err(refused)?))
    })
}

pub(crate) fn refused(error: RematError) -> ShardingFault {
    let backend = match error {
        RematError::NoRemat { backend } => backend,
        // The only error of `delivered`.
        error => error.to_string(),
    };
    ShardingFault::NoRemat { backend }
}

/// The module with other leaves of its parameters, trained and frozen, which `make` returns for a
/// path and a value; `None` leaves the parameter as it is, or as a [`trained_leaf`]. A parameter
/// that is not initialised yet is initialised when it is replaced. A value that is loaded into a
/// replaced one moves to host memory.
///
/// # Errors
///
/// The first of `make`.
pub(crate) fn replace_parameters<B: AutodiffBackend, M: AutodiffModule<B>, E>(
    module: M,
    make: impl FnMut(&str, &FloatTensor<B>) -> Result<Option<FloatTensor<B>>, E>,
) -> Result<M, E> {
    let mut mapper = Replace {
        path: Vec::new(),
        statistics: None,
        make,
        made: HashMap::new(),
        failed: None,
    };
    // Running statistics are initialised and untrained, as frozen parameters may be: these follow,
    // when the statistics are known.
    let module = module.map(&mut mapper);
    mapper.statistics = Some(Statistics::of::<B, M>(&module));
    let module = module.map(&mut mapper);
    mapper.failed.map_or(Ok(module), Err)
}

struct Replace<B: Backend, F, E> {
    path: Vec<String>,
    /// `None` while trained and new parameters are replaced; then the others are.
    statistics: Option<Statistics>,
    make: F,
    /// The leaves of trained parameters, which a module may hold at several paths. Frozen tensors
    /// may share an id and differ.
    made: HashMap<ParamId, FloatTensor<B>>,
    failed: Option<E>,
}

impl<B, F, E> ModuleMapper<B> for Replace<B, F, E>
where
    B: AutodiffBackend,
    F: FnMut(&str, &FloatTensor<B>) -> Result<Option<FloatTensor<B>>, E>,
{
    follow_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let is_new = !param.is_initialized();
        let (id, tensor, mapper) = param.consume();
        let old = match tensor.into_primitive() {
            TensorPrimitive::Float(old) if self.failed.is_none() => old,
            other => return Param::from_mapped_value(id, Tensor::from_primitive(other), mapper),
        };
        let path = self.path.join(".");
        // A running statistic may be computed from a leaf too: Burn's `load_record` copies it from
        // one.
        let (is_due, old) = match &self.statistics {
            None if is_new => (true, trained_leaf::<B>(old)),
            None => (B::float_is_require_grad(&old), old),
            Some(statistics) if statistics.contains(&path) => (false, old),
            Some(_) => (!B::float_is_require_grad(&old), trained_leaf::<B>(old)),
        };
        let trained = B::float_is_require_grad(&old);
        let made = match self.made.get(&id).filter(|_| trained) {
            Some(leaf) => Ok(Some(leaf.clone())),
            None if is_due => (self.make)(&path, &old),
            None => Ok(None),
        };
        let float = |tensor| Tensor::<B, D>::from_primitive(TensorPrimitive::Float(tensor));
        let made = made.unwrap_or_else(|error| {
            self.failed = Some(error);
            None
        });
        let Some(mut leaf) = made else {
            return Param::from_mapped_value(id, float(old), mapper);
        };
        let before = LeafPlace::<B>::of(&old);
        leaf = before.put(leaf);
        if trained {
            self.made.insert(id, leaf.clone());
        }
        let loading = mapper.clone();
        let (unit, place) = (before.into_unit(), leaf::upload_place_of::<B>(&leaf));
        Param::from_mapped_value(id, float(leaf), mapper).load_mapper(move |loaded| {
            match loading.on_load(loaded).into_primitive() {
                TensorPrimitive::Float(loaded) => float(
                    unit.put::<B>(
                        moved::<B>(loaded, None, &place)
                            .expect("a tensor of this backend was moved before"),
                    ),
                ),
                loaded => Tensor::from_primitive(loaded),
            }
        })
    }
}

/// The tensor in host memory, as a new leaf that requires gradients if `tensor` does; the tensor
/// itself if it is there.
fn moved<B: AutodiffBackend>(
    tensor: FloatTensor<B>,
    device: Option<&Device<B>>,
    place: &UploadPlace,
) -> Result<FloatTensor<B>, RematError> {
    if is_on_host::<B>(&tensor) {
        return Ok(tensor);
    }
    let device = device.cloned().unwrap_or_else(|| B::float_device(&tensor));
    let trained = B::float_is_require_grad(&tensor);
    let data = read::<B>(tensor);
    let tensor = leaf::on_host::<B>(data, &device, place)?;
    Ok(B::float_set_require_grad(tensor, trained))
}
