//! A safetensors file as the initial values of a model, each read when it is first used.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use safetensors::tensor::{Metadata, TensorInfo};

use crate::module::follow_path;
use crate::record::{Dtype, RecordError, run, to_f32};

/// The module with the float tensors of a safetensors file, by their paths, as [`consolidate`](crate::consolidate) writes it. A parameter that
/// is not initialised yet stays so: it is read when it is first used. So [`prepare`](crate::ZeroOptimizer::prepare) at stage 3 and
/// [`offload_parameters`](crate::offload_parameters()) read one parameter at a time, and neither a rank nor a device has the whole model. Each rank
/// calls it, and reads the file. Values get the types of the module's tensors.
///
/// # Errors
///
/// [`RecordError::Io`], [`RecordError::Torn`] for a file of another format, [`RecordError::OtherModel`] unless file and module have the same float
/// tensors, in the same shapes.
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
    let unknown =
        unknown.map(|name| format!("has a tensor {name}, which is no float of the model"));
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
            file.take(u64::from_le_bytes(length))
                .read_to_end(&mut header)?;
            Ok((header, all))
        })?;
        // `SafeTensors` wants the bytes of all tensors too.
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

    /// A tensor, in f32.
    fn read(&self, info: &TensorInfo) -> Result<TensorData, RecordError> {
        let (start, end) = info.data_offsets;
        let mut bytes = vec![0; end - start];
        run("read", &self.path, || {
            let mut file = File::open(&self.path)?;
            file.seek(SeekFrom::Start(self.start + start as u64))?;
            file.read_exact(&mut bytes)
        })?;
        let elements = to_f32(&bytes, info.dtype);
        Ok(TensorData::new(elements, info.shape.clone()))
    }
}

struct ReadOnUse {
    path: Vec<String>,
    found: HashSet<String>,
    /// Why, for the first tensor that the file has not, or not so.
    refused: Option<String>,
    file: Arc<Tensors>,
}

impl<B: Backend> ModuleMapper<B> for ReadOnUse {
    follow_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (name, file) = (self.path.join("."), self.file.clone());
        let shape = param.lazy_shape().to_vec();
        let is_float = |dtype| matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16);
        let info = match file.metadata.info(&name).cloned() {
            Some(info) if info.shape == shape && is_float(info.dtype) => info,
            found => {
                let found = found.map(|found| (found.dtype, found.shape));
                let reason =
                    format!("has {found:?} where the model has {name}, floats of {shape:?}");
                self.refused.get_or_insert(reason);
                return param;
            }
        };
        self.found.insert(name);
        param.init_mapper(move |initial| {
            let data = file.read(&info).unwrap_or_else(|error| panic!("{error}"));
            let options = (&initial.device(), initial.dtype());
            Tensor::from_data(data, options).set_require_grad(initial.is_require_grad())
        })
    }
}
