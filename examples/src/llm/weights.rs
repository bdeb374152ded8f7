//! The parameters of a model from `*.safetensors`, each read when it is first used.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::prelude::*;
use burn_decorator::follow_path;
use burn_zero::TensorFile;
use serde::Deserialize;

use super::LlmError;

/// The one file of a small model.
pub(super) const WHOLE: &str = "model.safetensors";
/// Names the file of each tensor of a large one.
const INDEX: &str = "model.safetensors.index.json";

/// Tensors that some files have and the models do not need: tables of the rotary embedding, and the
/// head of a tied model.
const UNUSED: [&str; 2] = ["rotary_emb.inv_freq", "lm_head.weight"];

pub(super) fn read_on_use<B: Backend, M: Module<B>>(
    module: M,
    folder: &Path,
) -> Result<M, LlmError> {
    let mut mapper = ReadOnUse {
        path: Vec::new(),
        files: open(folder)?,
        refused: None,
    };
    let module = module.map(&mut mapper);
    let is_unused = |name: &String| UNUSED.iter().any(|end| name.ends_with(end));
    let unknown = mapper.files.into_keys().find(|name| !is_unused(name));
    let unknown = unknown.map(|name| format!("has {name}, which the model has not"));
    match mapper.refused.or(unknown) {
        None => Ok(module),
        Some(reason) => Err(LlmError::OtherModel {
            folder: folder.to_owned(),
            reason,
        }),
    }
}

#[derive(Deserialize)]
struct Index {
    /// The file of each tensor.
    weight_map: BTreeMap<String, PathBuf>,
}

/// The file of each tensor.
fn open(folder: &Path) -> Result<BTreeMap<String, Arc<TensorFile>>, LlmError> {
    let mut files = BTreeMap::new();
    let index = folder.join(INDEX);
    if !index.exists() {
        let file = Arc::new(TensorFile::open(&folder.join(WHOLE))?);
        files.extend(file.names().map(|name| (name.to_owned(), file.clone())));
        return Ok(files);
    }
    let text = fs_err::read_to_string(&index)?;
    let read: Index = serde_json::from_str(&text).map_err(|error| LlmError::Json {
        path: index.clone(),
        reason: error.to_string(),
    })?;
    let mut opened: BTreeMap<PathBuf, Arc<TensorFile>> = BTreeMap::new();
    for (name, path) in read.weight_map {
        let file = match opened.get(&path) {
            Some(file) => file.clone(),
            None => {
                let file = Arc::new(TensorFile::open(&folder.join(&path))?);
                opened.insert(path.clone(), file.clone());
                file
            }
        };
        if file.shape(&name).is_none() {
            let reason = format!("says that {} has {name}, which it has not", path.display());
            return Err(LlmError::Json {
                path: index,
                reason,
            });
        }
        files.insert(name, file);
    }
    Ok(files)
}

struct ReadOnUse {
    path: Vec<String>,
    /// The files of the tensors that no parameter has taken yet.
    files: BTreeMap<String, Arc<TensorFile>>,
    /// The first parameter that the files lack, or have in another shape.
    refused: Option<String>,
}

impl ReadOnUse {
    fn name(&self) -> String {
        name_in_files(&self.path.join("."))
    }
}

/// The name in files of the parameter at a path of the model.
pub(super) fn name_in_files(path: &str) -> String {
    match path.strip_suffix("gamma") {
        Some(norm) => format!("{norm}weight"),
        None => path.to_owned(),
    }
}

/// Whether PyTorch has the transposed matrix: `[outputs, inputs]` for a linear layer.
pub(super) fn is_transposed(name: &str) -> bool {
    let ends = ["_proj.weight", ".lora_A.weight", ".lora_B.weight"];
    name == "lm_head.weight" || ends.iter().any(|end| name.ends_with(end))
}

impl<B: Backend> ModuleMapper<B> for ReadOnUse {
    follow_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let name = self.name();
        let is_transposed = is_transposed(&name);
        let mut expected = param.lazy_shape().to_vec();
        if is_transposed {
            expected.reverse();
        }
        let file = self.files.remove(&name);
        let found = file.as_ref().and_then(|file| file.shape(&name));
        let file = match file {
            Some(file) if found == Some(&expected[..]) => file,
            _ => {
                let found = found.map_or("lacks".to_owned(), |shape| format!("has {shape:?} as"));
                let reason = format!("{found} {name}, which is {expected:?} in the model");
                self.refused.get_or_insert(reason);
                return param;
            }
        };
        param.init_mapper(move |initial| {
            let data = file.read(&name).unwrap_or_else(|error| panic!("{error}"));
            let read = Tensor::<B, D>::from_data(data, (&initial.device(), initial.dtype()));
            let read = if is_transposed {
                read.swap_dims(0, 1)
            } else {
                read
            };
            read.set_require_grad(initial.is_require_grad())
        })
    }
}
