//! A safetensors file as the initial values of a model, each read when it is first used.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param, Parameter};
use burn::tensor::{
    BasicOps, Bool, BoolStore, DType, Float, Int, Shape, Tensor, TensorData, backend::Backend,
};
use safetensors::tensor::{Metadata, TensorInfo};

use crate::record::{Dtype, RecordError, run};
use burn_decorator::follow_path;

/// The module with the tensors of a safetensors file, by their paths, as [`consolidate`](crate::consolidate) writes it. A parameter that
/// is not initialised yet stays so: it is read when it is first used. So [`prepare`](crate::ZeroOptimizer::prepare) at stage 3 and
/// [`offload_parameters`](crate::offload_parameters()) read one parameter at a time, and neither a rank nor a device has the whole model. Each rank
/// calls it, and reads the file. Values get the types of the module's tensors: floats of any type, integers of any width. Load mappers are applied,
/// as by Burn's stores: the weight of a layer with `LinearLayout::Col` is transposed.
///
/// # Errors
///
/// [`RecordError::Io`], [`RecordError::Torn`] for a file of another format, [`RecordError::OtherModel`] unless file and module have the same
/// tensors: floats, integers or booleans, in the same shapes.
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
pub fn read_on_use<B: Backend, M: Module<B>>(module: M, file: &Path) -> Result<M, RecordError> {
    let file = Arc::new(Tensors::open(file)?);
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
    let mut names = file.metadata.offset_keys().into_iter();
    let unknown = names.find(|name| !found.contains(name));
    let unknown = unknown.map(|name| format!("has a tensor {name}, which the model has not"));
    let path = file.path.clone();
    match refused.or(unknown) {
        None => Ok(module),
        Some(reason) => Err(RecordError::OtherModel { path, reason }),
    }
}

struct Tensors {
    path: PathBuf,
    metadata: Metadata,
    /// Where the first tensor begins.
    start: u64,
}

impl Tensors {
    fn open(path: &Path) -> Result<Self, RecordError> {
        let torn = |reason| RecordError::Torn {
            path: path.to_owned(),
            reason,
        };
        let (header, bytes) = run("read", path, || {
            let mut file = File::open(path)?;
            let all = file.metadata()?.len();
            let (mut length, mut header) = ([0; 8], Vec::new());
            file.read_exact(&mut length)?;
            let length = u64::from_le_bytes(length);
            // Another number is no length: the file is of another format, and the header stays empty.
            if length <= all.saturating_sub(8) {
                file.take(length).read_to_end(&mut header)?;
            }
            Ok((header, all))
        })?;
        // `SafeTensors` requires the bytes of all tensors too.
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| torn(format!("is no safetensors file: {error}")))?;
        let start = 8 + header.len() as u64;
        let expected = start + metadata.data_len() as u64;
        match bytes == expected {
            true => Ok(Self {
                path: path.to_owned(),
                metadata,
                start,
            }),
            false => Err(torn(format!(
                "has {bytes} bytes, but its header tells of {expected}"
            ))),
        }
    }

    /// A tensor in the file's type.
    fn read(&self, info: &TensorInfo) -> Result<TensorData, RecordError> {
        let (start, end) = info.data_offsets;
        let mut bytes = vec![0; end - start];
        run("read", &self.path, || {
            let mut file = File::open(&self.path)?;
            file.seek(SeekFrom::Start(self.start + start as u64))?;
            file.read_exact(&mut bytes)
        })?;
        let dtype = on_host(info.dtype).expect("a tensor of another type was refused");
        Ok(TensorData::from_bytes_vec(bytes, info.shape.clone(), dtype))
    }
}

/// The type on the host; `None` for types that no parameter has.
fn on_host(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        Dtype::U64 => DType::U64,
        Dtype::U32 => DType::U32,
        Dtype::U16 => DType::U16,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool(BoolStore::Native),
        _ => return None,
    })
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
    file: Arc<Tensors>,
}

impl ReadOnUse {
    /// The parameter with the file's elements, which have this shape there and are of a type that `fits`. `load` applies the parameter's load
    /// mapper, such as that of a layer with `LinearLayout::Col`, whose weight is transposed in files.
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
        let info = match file.metadata.info(&name).cloned() {
            Some(info) if info.shape == shape && fits(info.dtype) => info,
            found => {
                let found = found.map(|found| (found.dtype, found.shape));
                let reason =
                    format!("has {found:?} where the model has {name}, {kind} of {shape:?}");
                self.refused.get_or_insert(reason);
                return param;
            }
        };
        self.found.insert(name);
        param.init_mapper(move |initial| {
            let data = file.read(&info).unwrap_or_else(|error| panic!("{error}"));
            // `param` may have been frozen after `load` was made.
            let is_trained = Parameter::is_require_grad(&initial);
            let options = (&Tensor::device(&initial), initial.dtype());
            let read = load(Tensor::from_data(data, options));
            let read = Parameter::set_require_grad(read, is_trained);
            match is_trained {
                true => read,
                // If `initial` was computed from a leaf, so is the result, and `prepare` knows that it is trained.
                false => initial.slice_assign(read.dims().map(|size| 0..size), read),
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
            // The shape in files. That of a parameter which is not initialised is from before any mapper.
            let shape = match param.is_initialized() {
                true => param.transform_for_save().shape(),
                false => param.lazy_shape(),
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
