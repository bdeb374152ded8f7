//! Models of other people's families compute what transformers computes (`golden.py`), and what is
//! not supported is refused by its name.

use std::fs;
use std::path::{Path, PathBuf};

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_checkpoint::Remat;
use burn_decorator::module::for_each_float;
use burn_flex::Flex;
use burn_fused::FusedBackward;
use burn_zero::{TensorFile, offload_parameters};
use examples::llm::{Llm, LlmConfig, LlmError, Sequences};
use serde::Deserialize;

const MODELS: [&str; 5] = ["llama", "llama_biased", "mistral", "qwen2", "qwen3"];

fn folder(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/llm")
        .join(model)
}

/// What transformers computes.
#[derive(Deserialize)]
struct Reference {
    tokens: Vec<i64>,
    loss: f64,
    gradient_norm: f64,
    parameters: usize,
}

fn reference(model: &str) -> Reference {
    let text = fs::read_to_string(folder(model).join("reference.json")).expect("a reference");
    serde_json::from_str(&text).expect("the reference's keys")
}

fn read<B: Backend>(folder: &Path) -> Result<Llm<B>, LlmError> {
    let config = LlmConfig::read(folder)?;
    config.init::<B>(&Default::default()).read_weights(folder)
}

fn tokens<B: Backend>(reference: &Reference) -> Tensor<B, 2, Int> {
    let time = reference.tokens.len() / 2;
    let data = TensorData::new(reference.tokens.clone(), [2, time]);
    Tensor::from_data(data, &Default::default())
}

fn values<B: Backend>(tensor: FloatTensor<B>) -> Vec<f64> {
    let data = burn_backend::read_sync(B::float_into_data(tensor)).expect("a read");
    data.iter::<f64>().collect()
}

/// The largest difference, relative to the largest number.
fn difference(ours: &[f64], theirs: &[f64]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let largest = theirs.iter().fold(1e-6, |most: f64, x| most.max(x.abs()));
    let pairs = ours.iter().zip(theirs);
    pairs.fold(0.0, |most: f64, (ours, theirs)| {
        most.max((ours - theirs).abs())
    }) / largest
}

/// Logits, loss and every gradient, to f32 rounding.
fn computes_what_transformers_does<B: AutodiffBackend>(model: &str, llm: &Llm<B>) {
    let reference = reference(model);
    let file = TensorFile::open(&folder(model).join("reference.safetensors")).expect("a file");
    let expected = |name: &str| -> Vec<f64> {
        let data = file.read(name).unwrap_or_else(|error| panic!("{error}"));
        data.iter::<f64>().collect()
    };

    let logits = llm.logits(tokens(&reference)).into_data();
    let logits: Vec<f64> = logits.iter().collect();
    let error = difference(&logits, &expected("logits"));
    assert!(error < 1e-5, "{model}: logits differ by {error:e}");

    let loss = llm.loss(&Sequences::whole(tokens(&reference))).loss;
    let gradients = loss.backward();
    let loss: f64 = loss.into_data().iter().next().expect("one number");
    assert!(
        (loss - reference.loss).abs() < 1e-5,
        "{model}: a loss of {loss}"
    );

    let mut squares = 0.0;
    let mut parameters = 0;
    for_each_float(llm, |path, _, parameter: FloatTensor<B>| {
        let name = path.replace("gamma", "weight");
        let gradient = B::grad(&parameter, &gradients);
        let gradient = gradient.unwrap_or_else(|| panic!("{model}: {name} has no gradient"));
        let is_matrix = name.ends_with("_proj.weight") || name == "lm_head.weight";
        let gradient = if is_matrix {
            B::InnerBackend::float_transpose(gradient)
        } else {
            gradient
        };
        let ours = values::<B::InnerBackend>(gradient);
        let error = difference(&ours, &expected(&name));
        assert!(
            error < 5e-5,
            "{model}: the gradient of {name} differs by {error:e}"
        );
        squares += ours.iter().map(|x| x * x).sum::<f64>();
        parameters += ours.len();
    });
    let norm = squares.sqrt();
    assert!(
        (norm - reference.gradient_norm).abs() < 1e-4 * norm,
        "{model}: a norm of {norm}"
    );
    assert_eq!(parameters, reference.parameters);
    assert_eq!(parameters, llm.config().parameters());
}

/// Keys of the `config.json` that these models were published with (meta-llama/Llama-3.2-1B,
/// Llama-3.1-8B, Meta-Llama-3-70B, Qwen/Qwen2.5-7B, Qwen3-8B, HuggingFaceTB/SmolLM2-1.7B), and the
/// number of parameters that their pages say.
#[test]
fn parameters_are_as_many_as_published() {
    for (model, parameters) in [
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("smollm2-1.7b", 1_711_376_384),
    ] {
        let config = LlmConfig::read_file(&folder("published").join(format!("{model}.json")));
        let config = config.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(config.parameters(), parameters, "{model}");
    }
}

#[test]
fn every_family_computes_what_transformers_does() {
    for model in MODELS {
        let llm = read(&folder(model)).expect("a model");
        computes_what_transformers_does::<Autodiff<Flex>>(model, &llm);
        let llm = read(&folder(model)).expect("a model");
        computes_what_transformers_does::<FusedBackward<Autodiff<Flex>>>(model, &llm);
    }
}

#[test]
fn parameters_in_host_memory_compute_the_same() {
    type B = FusedBackward<Autodiff<Remat<Flex>>>;
    for model in ["llama", "qwen3"] {
        let llm = read::<B>(&folder(model)).expect("a model");
        let llm = offload_parameters::<B, _>(llm).expect("`Remat` is there");
        computes_what_transformers_does::<B>(model, &llm);
    }
}

#[test]
fn without_autodiff_the_logits_are_the_same() {
    type B = FusedBackward<Autodiff<Flex>>;
    for model in MODELS {
        let llm = read::<B>(&folder(model)).expect("a model");
        let trained = llm.logits(tokens(&reference(model))).into_data();
        let valid = llm.valid().logits(tokens(&reference(model))).into_data();
        let [trained, valid] = [trained, valid].map(|data| data.iter::<f64>().collect::<Vec<_>>());
        assert!(difference(&valid, &trained) < 1e-5, "{model}");
    }
}

#[test]
fn weights_in_a_low_type_are_read_in_that_of_the_model() {
    use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};

    let copy = tempfile::tempdir().expect("a folder");
    fs::copy(
        folder("qwen3").join("config.json"),
        copy.path().join("config.json"),
    )
    .expect("a copy");
    let bytes = fs::read(folder("qwen3").join("model.safetensors")).expect("a file");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    // The upper half of an f32 is the bf16 that is next to it towards zero.
    let low: Vec<(String, Vec<usize>, Vec<u8>)> = file
        .iter()
        .map(|(name, view)| {
            let halves = view.data().chunks(4).flat_map(|value| [value[2], value[3]]);
            (name.to_owned(), view.shape().to_vec(), halves.collect())
        })
        .collect();
    let views = low.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::BF16, shape.clone(), bytes).expect("two bytes each");
        (name.as_str(), view)
    });
    serialize_to_file(views, None, &copy.path().join("model.safetensors")).expect("a file");

    let reference = reference("qwen3");
    let [low, full] = [copy.path().to_owned(), folder("qwen3")].map(|folder| {
        let llm = read::<Flex>(&folder).expect("a model");
        let mut types = Vec::new();
        for_each_float(&llm, |_, _, parameter: FloatTensor<Flex>| {
            types.push(burn_backend::TensorMetadata::dtype(&parameter));
        });
        assert!(types.iter().all(|dtype| *dtype == burn::tensor::DType::F32));
        let logits = llm.logits(tokens(&reference)).into_data();
        logits.iter::<f64>().collect::<Vec<_>>()
    });
    let error = difference(&low, &full);
    assert!(error > 1e-6 && error < 5e-2, "{error:e}");
}

/// A copy of a model's directory with another value in its configuration.
fn with_config(model: &str, key: &str, value: serde_json::Value) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a folder");
    for file in fs::read_dir(folder(model)).expect("a folder").flatten() {
        fs::copy(file.path(), copy.path().join(file.file_name())).expect("a copy");
    }
    let path = copy.path().join("config.json");
    let text = fs::read_to_string(&path).expect("a configuration");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    config[key] = value;
    fs::write(&path, config.to_string()).expect("a configuration");
    copy
}

#[test]
fn what_is_not_supported_is_refused_by_its_name() {
    for (model, key, value) in [
        ("llama", "model_type", "gpt2".into()),
        ("llama", "hidden_act", "gelu".into()),
        ("mistral", "sliding_window", 4096.into()),
        (
            "llama",
            "quantization_config",
            serde_json::json!({"bits": 4}),
        ),
        ("llama", "partial_rotary_factor", 0.5.into()),
        ("llama", "num_key_value_heads", 3.into()),
        ("llama", "head_dim", 5.into()),
    ] {
        let copy = with_config(model, key, value);
        let error = LlmConfig::read(copy.path()).expect_err(key).to_string();
        assert!(error.contains(key), "{error}");
    }
    let yarn = serde_json::json!({"rope_type": "yarn", "factor": 4.0});
    let copy = with_config("llama", "rope_parameters", yarn);
    let error = LlmConfig::read(copy.path()).expect_err("yarn").to_string();
    assert!(
        error.contains("\"yarn\"") && error.contains("llama3"),
        "{error}"
    );
    // A window that is switched off.
    let copy = with_config("qwen2", "sliding_window", 4096.into());
    assert!(LlmConfig::read(copy.path()).is_ok());
}

#[test]
fn a_tensor_that_does_not_fit_is_named() {
    for (key, value, name) in [
        (
            "intermediate_size",
            25,
            "model.layers.0.mlp.gate_proj.weight",
        ),
        (
            "num_hidden_layers",
            3,
            "model.layers.2.input_layernorm.weight",
        ),
        ("num_hidden_layers", 1, "model.layers.1."),
        ("vocab_size", 41, "model.embed_tokens.weight"),
    ] {
        let copy = with_config("llama", key, value.into());
        let error = read::<Flex>(copy.path()).expect_err(key);
        assert!(matches!(error, LlmError::OtherModel { .. }), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
    let empty = tempfile::tempdir().expect("a folder");
    let config = LlmConfig::read(&folder("llama")).expect("a configuration");
    let error = config
        .init::<Flex>(&Default::default())
        .read_weights(empty.path());
    let error = error.expect_err("no file").to_string();
    assert!(error.contains("model.safetensors"), "{error}");
    assert!(LlmConfig::read(empty.path()).is_err());
}

#[test]
fn the_number_of_parameters_of_a_published_model() {
    // SmolLM2-135M has 134,515,008.
    let config = r#"{"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 100000, "tie_word_embeddings": true}"#;
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("config.json"), config).expect("a configuration");
    let config = LlmConfig::read(folder.path()).expect("a configuration");
    assert_eq!(config.parameters(), 134_515_008);
    assert_eq!(
        config.init::<Flex>(&Default::default()).num_params(),
        134_515_008
    );
}
