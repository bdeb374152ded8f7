//! A model as a Hugging Face directory.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use burn::prelude::*;
use burn_amp::{F32, autocast};
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_decorator::module::for_each_float;
use safetensors::tensor::{Dtype, View, serialize_to_file};
use serde_json::Value;

use super::lora::{WEIGHTS, adapter_name};
use super::projection::Product;
use super::weights::{WHOLE, is_transposed, name_in_files};
use super::{Llm, LlmError};

/// What is copied of the directory that the model was read from, where it is there: the tokenizer,
/// and how to generate.
const COPIED: [&str; 9] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];

/// Writes the model in f32, adapters merged into the layers that they adapt, with the configuration
/// and the tokenizer of the directory that it was read from. Without a directory to write to only
/// reads every parameter, in the same order.
pub(super) fn write<B: Backend>(
    model: &Llm<B>,
    from: &Path,
    to: Option<&Path>,
) -> Result<(), LlmError> {
    let adapters = model.projections().into_iter().filter_map(|(path, layer)| {
        let weight = format!("{path}.weight");
        Some((weight, layer.adapter()?.product()))
    });
    let mut adapters: HashMap<_, _> = adapters.collect();
    let parameters = parameters(model, |path| {
        adapter_name(path).is_none().then(|| {
            let name = name_in_files(path);
            let added = adapters.remove(&name);
            (name, added)
        })
    });
    write_tensors(parameters, to.map(|to| to.join(WHOLE)))?;
    let Some(to) = to else {
        return Ok(());
    };
    for file in COPIED {
        if from.join(file).exists() {
            fs_err::copy(from.join(file), to.join(file))?;
        }
    }
    write_config(from, to)
}

/// Writes the adapters alone; as [`write`].
pub(super) fn write_adapters<B: Backend>(
    model: &Llm<B>,
    to: Option<&Path>,
) -> Result<(), LlmError> {
    let parameters = parameters(model, |path| Some((adapter_name(path)?, None)));
    write_tensors(parameters, to.map(|to| to.join(WEIGHTS)))
}

/// The parameters that have a name, each with what is added to it.
fn parameters<B: Backend>(
    model: &Llm<B>,
    mut named: impl FnMut(&str) -> Option<(String, Option<Product<B>>)>,
) -> Vec<(String, FileTensor<B>)> {
    let mut parameters = Vec::new();
    for_each_float(model, |path, _, tensor| {
        let Some((name, added)) = named(path) else {
            return;
        };
        let is_transposed = is_transposed(&name);
        let mut shape = tensor.shape().to_vec();
        if is_transposed {
            shape.reverse();
        }
        let parameter = FileTensor::<B> {
            tensor,
            added,
            is_transposed,
            shape,
        };
        parameters.push((name, parameter));
    });
    // As the file has them: ranks that read a parameter together read in one order.
    parameters.sort_by(|(left, _), (right, _)| left.cmp(right));
    parameters
}

/// Writes a file, or without one only reads the tensors.
fn write_tensors<B: Backend>(
    tensors: Vec<(String, FileTensor<B>)>,
    file: Option<PathBuf>,
) -> Result<(), LlmError> {
    let Some(file) = file else {
        for (_, tensor) in &tensors {
            tensor.data();
        }
        return Ok(());
    };
    if let Some(folder) = file.parent() {
        fs_err::create_dir_all(folder)?;
    }
    // What `save_pretrained` writes, and `transformers` asks for.
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    serialize_to_file(tensors, Some(metadata), &file).map_err(|error| {
        let reason = format!("cannot write {}: {error}", file.display());
        std::io::Error::other(reason)
    })?;
    Ok(())
}

/// The configuration, with the type of the weights that were written.
fn write_config(from: &Path, to: &Path) -> Result<(), LlmError> {
    let path = from.join("config.json");
    let text = fs_err::read_to_string(&path)?;
    let refused = |error: serde_json::Error| LlmError::Json {
        path: path.clone(),
        reason: error.to_string(),
    };
    let mut config: serde_json::Map<String, Value> =
        serde_json::from_str(&text).map_err(refused)?;
    // Transformers 5 calls it `dtype`, and reads both.
    for key in ["dtype", "torch_dtype"] {
        if let Some(dtype) = config.get_mut(key) {
            *dtype = "float32".into();
        }
    }
    let text = serde_json::to_string_pretty(&config).map_err(refused)?;
    Ok(fs_err::write(to.join("config.json"), text + "\n")?)
}

/// A tensor of the file, read from the device when it is written.
struct FileTensor<B: Backend> {
    tensor: FloatTensor<B>,
    /// What an adapter adds.
    added: Option<Product<B>>,
    /// Whether the file has the transposed matrix.
    is_transposed: bool,
    /// In the file.
    shape: Vec<usize>,
}

impl<B: Backend> View for FileTensor<B> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let tensor = match &self.added {
            None => self.tensor.clone(),
            // In f32 also where the training multiplies in a low type.
            Some(added) => autocast::<F32, _>(|| added.add_to(self.tensor.clone())),
        };
        let tensor = if self.is_transposed {
            B::float_transpose(tensor)
        } else {
            tensor
        };
        let data = burn_backend::read_sync(B::float_into_data(tensor));
        let values = data.expect("a parameter can be read");
        let bytes = values.iter::<f32>().flat_map(f32::to_le_bytes);
        Cow::Owned(bytes.collect())
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * size_of::<f32>()
    }
}
