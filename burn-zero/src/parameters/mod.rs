//! Parameters in host memory: moves them there, and makes new leaves of them there.

mod parts;
mod store;
mod units;

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{AutodiffModule, ModuleMapper, Param, ParamId};
use burn::tensor::{
    BasicOps, Float, Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive,
    backend::{AutodiffBackend, Backend},
};
use burn_backend::tensor::{Device, FloatTensor};
use burn_checkpoint::{RematError, delivered, is_delivered};
use burn_decorator::{HostRead, upload};

use crate::backend::trained_leaf;
use crate::{ZeroError, ZeroOptimizerError};
pub(crate) use parts::{Frozen, Parts};
pub(crate) use store::{ParameterStore, own_shards};
pub(crate) use units::{Shard, Units};

use crate::host::{floats, not_read, read};
use crate::optimizer::Statistics;
use burn_decorator::follow_path;

/// The module with its parameters, trained and frozen, in host memory (DeepSpeed's `offload_param`). The device holds a parameter only while
/// an operation uses it, in forward and in backward: it is uploaded for that operation and dropped after it. So are views and casts
/// of it that autodiff saves. Losses and gradients have the same bits as without offload.
///
/// The backend needs a [`Remat`](burn_checkpoint::Remat) below autodiff: `Autodiff<Remat<Cuda>>`, or with gradients that leave during backward
/// `Sharded<Autodiff<Remat<Cuda>>>`.
///
/// [`OffloadedAdamW`](crate::OffloadedAdamW) and [`ZeroOptimizer`](crate::ZeroOptimizer) leave a parameter in
/// host memory if it is there; with [`ZeroSettings::parameters`](crate::ZeroSettings::parameters) a `ZeroOptimizer` puts it there by itself. Burn's
/// own optimizers return parameters on the device: put them inside of a `ZeroOptimizer`. Clones, `valid()` and `fork` share what is in host
/// memory; loading a record puts the new values there. `param.val()` can be used as before: each operation on it uploads it, a read takes it
/// from host memory. Running statistics, integers and booleans stay on the device.
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
/// Parameters that are not initialised yet are initialised one at a time, each leaving the device before the next is made. So offload
/// a model before anything uses it.
///
/// # Errors
///
/// [`ZeroOptimizerError::NoRemat`] for a backend without [`Remat`](burn_checkpoint::Remat).
///
/// # Cost
///
/// In host memory the bytes of all parameters. A use uploads the parameter: twice for a weight of a layer in a step, once in forward
/// and once in backward, and once more in a scope that is recomputed.
pub fn offload_parameters<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
) -> Result<M, ZeroOptimizerError> {
    offloaded::<B, M>(module, None)
}

/// [`offload_parameters`], whose parameters are uploaded to `device`, or to the device they are on now if it is `None`.
pub(crate) fn offloaded<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
    device: Option<&Device<B>>,
) -> Result<M, ZeroOptimizerError> {
    replace_parameters(module, |_, old: &FloatTensor<B>| {
        match is_on_host::<B>(old) {
            true => Ok(None),
            false => Ok(Some(moved::<B>(old.clone(), device).map_err(refused)?)),
        }
    })
}

pub(crate) fn refused(error: RematError) -> ZeroOptimizerError {
    let backend = match error {
        RematError::NoRemat { backend } => backend,
        // The only error of `delivered`.
        error => error.to_string(),
    };
    ZeroOptimizerError::NoRemat { backend }
}

/// The module with other leaves of its parameters, trained and frozen, which `make` returns for a path and a value; `None` leaves the
/// parameter as it is, or as a [`trained_leaf`]. A parameter that is not initialised yet is initialised when it is replaced. A value that is
/// loaded into a replaced one moves to host memory.
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
    // Running statistics are initialised and untrained, as frozen parameters may be: these follow, when the statistics are known.
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
    /// The leaves of trained parameters, which a module may hold at several paths. Frozen tensors may share an id and differ.
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
        // A running statistic may be computed from a leaf too: Burn's `load_record` copies it from one.
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
        if trained {
            leaf = B::float_set_require_grad(leaf, true);
            self.made.insert(id, leaf.clone());
        }
        let loading = mapper.clone();
        Param::from_mapped_value(id, float(leaf), mapper).load_mapper(move |loaded| {
            match loading.on_load(loaded).into_primitive() {
                TensorPrimitive::Float(loaded) => float(
                    moved::<B>(loaded, None).expect("a tensor of this backend was moved before"),
                ),
                loaded => Tensor::from_primitive(loaded),
            }
        })
    }
}

/// The tensor in host memory, as a new leaf that requires gradients if `tensor` does.
fn moved<B: AutodiffBackend>(
    tensor: FloatTensor<B>,
    device: Option<&Device<B>>,
) -> Result<FloatTensor<B>, RematError> {
    if is_on_host::<B>(&tensor) {
        return Ok(tensor);
    }
    let device = device.cloned().unwrap_or_else(|| B::float_device(&tensor));
    let trained = B::float_is_require_grad(&tensor);
    let data = read::<B>(tensor);
    let tensor = on_host::<B>(data, &device)?;
    Ok(B::float_set_require_grad(tensor, trained))
}

/// A tensor whose elements are in host memory, and are uploaded whenever it is used.
fn on_host<B: Backend>(data: TensorData, device: &Device<B>) -> Result<FloatTensor<B>, RematError> {
    let (shape, dtype, data) = (data.shape.clone(), data.dtype, Arc::new(data));
    delivered::<B>(shape, dtype, device, move || TensorData::clone(&data))
}

/// Whether a parameter is in host memory.
pub(crate) fn is_on_host<B: Backend>(parameter: &FloatTensor<B>) -> bool {
    is_delivered::<B>(parameter)
}

/// The new value of a parameter.
pub(crate) enum NewValue<I: Backend> {
    /// In host memory.
    Host(TensorData),
    /// On the device.
    Device(FloatTensor<I>),
}

impl<I: Backend> NewValue<I> {
    /// In another shape.
    pub(crate) fn reshaped(self, shape: Shape) -> Self {
        match self {
            Self::Host(mut data) => {
                data.shape = shape;
                Self::Host(data)
            }
            Self::Device(value) => Self::Device(I::float_reshape(value, shape)),
        }
    }

    /// Starts to bring its elements to the host.
    pub(crate) fn start_read(self) -> ReadValue {
        match self {
            Self::Host(data) => ReadValue::Host(data),
            Self::Device(value) => ReadValue::Underway(HostRead::start::<I>(value)),
        }
    }

    /// The leaf of the parameter: in host memory if `stays_on_host`, else on the device.
    pub(crate) fn into_tensor<B>(self, stays_on_host: bool, device: &Device<B>) -> FloatTensor<B>
    where
        B: AutodiffBackend<InnerBackend = I, Device = I::Device>,
    {
        let data = match self {
            Self::Device(value) if !stays_on_host => return B::from_inner(value),
            Self::Device(value) => read::<I>(value),
            Self::Host(data) => data,
        };
        match stays_on_host {
            true => {
                on_host::<B>(data, device).expect("`prepare` refuses a backend without `Remat`")
            }
            false => B::from_inner(upload::<I>(data, device)),
        }
    }
}

/// A new value that is in host memory, or on its way there.
pub(crate) enum ReadValue {
    /// In host memory.
    Host(TensorData),
    /// Being read.
    Underway(HostRead),
}

impl ReadValue {
    /// Waits for the elements, in f32. `path` is that of the parameter.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Read`].
    pub(crate) fn wait(self, path: &str) -> Result<Vec<f32>, ZeroError> {
        match self {
            Self::Host(data) => Ok(floats(data)),
            Self::Underway(read) => {
                let data = read.wait();
                Ok(floats(data.map_err(|error| {
                    not_read("the new value", path, &error)
                })?))
            }
        }
    }
}

/// A tensor of `data` in the memory and the type of `old`.
pub(crate) fn in_place_of<B: Backend>(old: &FloatTensor<B>, data: TensorData) -> FloatTensor<B> {
    let (device, dtype) = (B::float_device(old), old.dtype());
    match is_on_host::<B>(old) {
        true => on_host::<B>(data.convert_dtype(dtype), &device)
            .expect("the backend of a tensor in host memory has a `Remat`"),
        false => <Float as BasicOps<B>>::from_data(data, &device, dtype).tensor(),
    }
}
