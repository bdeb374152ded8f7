//! A safetensors file as the initial values of a model, each read when it is first used.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param, Parameter};
use burn::tensor::{BasicOps, Bool, Float, Int, Shape, Tensor, backend::Backend};

use crate::error::ZeroError;
use crate::record::{Dtype, RecordFault};
use crate::tensor_file::{TensorFile, on_host};
use burn_decorator::follow_path;

/// The module with the tensors of a safetensors file, by their paths, as
/// [`consolidate`](crate::consolidate) writes it. A parameter that is not initialised yet stays so:
/// it is read when it is first used. So
/// [`Update::prepare`](burn_update::Update::prepare) at stage 3 and
/// [`offload_parameters`](crate::offload_parameters()) read one parameter at a time, and neither a
/// rank nor a device has the whole model. Each rank calls it, and reads the file. Values get the
/// types of the module's tensors: floats of any type, integers of any width. Load mappers are
/// applied, as by Burn's stores: the weight of a layer with `LinearLayout::Col` is transposed.
///
/// # Errors
///
/// [`RecordFault::Io`], [`RecordFault::Torn`] for a file of another format,
/// [`RecordFault::OtherModel`] unless file and module have the same tensors: floats, integers or
/// booleans, in the same shapes.
///
/// # Panics
///
/// The first use of a parameter panics if the file cannot be read any more.
///
/// ```no_run
/// # use burn::{backend::Autodiff, nn::{Linear, LinearConfig}};
/// # use burn_checkpoint::Remat;
/// # type B = Autodiff<Remat<burn_flex::Flex>>;
/// # let device = Default::default();
/// let model: Linear<B> = LinearConfig::new(1024, 1024).init(&device);
/// let model = burn_zero::read_on_use::<B, _>(model, "model.safetensors".as_ref())?;
/// let model = burn_zero::offload_parameters::<B, _>(model)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn read_on_use<B: Backend, M: Module<B>>(module: M, file: &Path) -> Result<M, ZeroError> {
    let file = Arc::new(TensorFile::open(file)?);
    let mut mapper = ReadOnUse {
        path: Vec::new(),
        found: HashSet::new(),
        refused: None,
        file,
    };
    let module = module.map(&mut mapper);
    let ReadOnUse {
        found,
        refused,
        file,
        ..
    } = mapper;
    let mut names = file.names();
    let unknown = names
        .find(|name| !found.contains(*name))
        .map(|name| format!("has a tensor {name}, which the model has not"));
    let path = file.path().to_owned();
    match refused.or(unknown) {
        None => Ok(module),
        Some(reason) => Err(RecordFault::OtherModel { path, reason }.into()),
    }
}

fn is_float(dtype: Dtype) -> bool {
    on_host(dtype).is_some_and(|dtype| dtype.is_float())
}

fn is_int(dtype: Dtype) -> bool {
    on_host(dtype).is_some_and(|dtype| dtype.is_int() || dtype.is_uint())
}

struct ReadOnUse {
    path: Vec<String>,
    found: HashSet<String>,
    /// Why the file is refused, for the first tensor that it lacks or has in another kind or shape.
    refused: Option<String>,
    file: Arc<TensorFile>,
}

impl ReadOnUse {
    /// The parameter with the file's elements, which have this shape there and are of a type that
    /// `fits`. `load` applies the parameter's load mapper, such as that of a layer with
    /// `LinearLayout::Col`, whose weight is transposed in files.
    fn read<B: Backend, const D: usize, K: BasicOps<B> + 'static>(
        &mut self,
        param: Param<Tensor<B, D, K>>,
        shape: Shape,
        kind: &str,
        fits: fn(Dtype) -> bool,
        load: impl Fn(Tensor<B, D, K>) -> Tensor<B, D, K> + Send + Sync + 'static,
    ) -> Param<Tensor<B, D, K>>
    where
        Tensor<B, D, K>: Parameter<Device = B::Device>,
    {
        let (name, file, shape) = (self.path.join("."), self.file.clone(), shape.to_vec());
        match file.info(&name) {
            Some(info) if info.shape == shape && fits(info.dtype) => {}
            found => {
                let found = found.map(|found| (found.dtype, &found.shape));
                let reason =
                    format!("has {found:?} where the model has {name}, {kind} of {shape:?}");
                self.refused.get_or_insert(reason);
                return param;
            }
        }
        self.found.insert(name.clone());
        param.init_mapper(move |initial| {
            let data = file.read(&name).unwrap_or_else(|error| panic!("{error}"));
            // `param` may have been frozen after `load` was made.
            let is_trained = Parameter::is_require_grad(&initial);
            let options = (&Tensor::device(&initial), initial.dtype());
            let loaded = load(Tensor::from_data(data, options));
            let read = Parameter::set_require_grad(loaded, is_trained);
            if is_trained {
                read
            } else {
                // If `initial` was computed from a leaf, so is the result, and `prepare` knows that
                // it is trained.
                initial.slice_assign(read.dims().map(|size| 0..size), read)
            }
        })
    }
}

macro_rules! read_kind {
    ($map:ident, $kind:ident, $name:literal, $fits:expr) => {
        fn $map<const D: usize>(
            &mut self,
            param: Param<Tensor<B, D, $kind>>,
        ) -> Param<Tensor<B, D, $kind>> {
            // The shape in files. That of a parameter which is not initialised is from before any
            // mapper.
            let shape = if param.is_initialized() {
                param.transform_for_save().shape()
            } else {
                param.lazy_shape()
            };
            let loading = param.clone();
            self.read(param, shape, $name, $fits, move |tensor| {
                let loaded = loading.clone().transform_for_load(tensor, loading.id);
                loaded.into_value()
            })
        }
    };
}

impl<B: Backend> ModuleMapper<B> for ReadOnUse {
    follow_path!();

    read_kind!(map_float, Float, "floats", is_float);
    read_kind!(map_int, Int, "integers", is_int);
    read_kind!(map_bool, Bool, "booleans", |dtype| dtype == Dtype::BOOL);
}
