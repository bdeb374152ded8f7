//! Updates of adapters are those of PEFT (`lora.py`), whatever else is chosen, and its files are
//! read and written.

use std::path::{Path, PathBuf};

use burn::backend::Autodiff;
use burn::tensor::DType;
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_decorator::module::for_each_float;
use burn_flex::Flex;
use burn_zero::TensorFile;
use examples::finetune::report::Report;
use examples::finetune::tuning::TuningOptions;
use examples::llm::{Llm, LlmConfig};
use serde_json::Value;

use crate::{Directory, assert_near, numbers, refusal, tests, turn};

fn adapter(model: &str, when: &str) -> PathBuf {
    tests().join("finetune/lora").join(model).join(when)
}

fn golden(model: &str) -> Value {
    let path = tests().join("finetune/lora.json");
    let text = std::fs::read_to_string(path).expect("a reference");
    let golden: Value = serde_json::from_str(&text).expect("JSON");
    golden[model].clone()
}

/// The options of the reference, and more.
fn train(directory: &Directory, model: &str, more: &str) -> Report {
    let start = adapter(model, "start");
    let options = format!(
        "--packing plain --lr 1e-2 --adapter {} {more}",
        start.display()
    );
    let report = directory.run(&options);
    report.unwrap_or_else(|error| panic!("{model} {more}: {error}"))
}

fn assert_follows(report: &Report, model: &str, what: &str, tolerance: f64) {
    let golden = golden(model);
    let of = |name: &str| format!("{model} {what}: {name}");
    let [losses, norms] = ["losses", "norms"].map(|name| numbers(&golden[name]));
    assert_near(&of("loss"), &report.losses, &losses, tolerance);
    assert_near(
        &of("norm"),
        &report.gradient_norms,
        &norms,
        10.0 * tolerance,
    );
}

/// Every value of an adapter's file.
fn values(folder: &Path) -> Vec<(String, Vec<f32>)> {
    let file = TensorFile::open(&folder.join("adapter_model.safetensors")).expect("a file");
    let read = |name: &str| file.read(name).expect("a tensor").to_vec().expect("f32");
    file.names()
        .map(|name| (name.to_owned(), read(name)))
        .collect()
}

fn assert_same_adapter(ours: &Path, theirs: &Path, tolerance: f32) {
    let (ours, theirs) = (values(ours), values(theirs));
    assert_eq!(ours.len(), theirs.len());
    for ((our_name, ours), (name, theirs)) in ours.iter().zip(&theirs) {
        assert_eq!(our_name, name);
        assert_eq!(ours.len(), theirs.len(), "{name}");
        for (ours, theirs) in ours.iter().zip(theirs) {
            assert!(
                (ours - theirs).abs() < tolerance,
                "{name}: {ours}, not {theirs}"
            );
        }
    }
}

#[test]
fn every_update_and_the_file_are_those_of_peft() {
    let _turn = turn();
    for model in ["llama", "qwen3"] {
        let directory = Directory::new(model);
        let report = train(&directory, model, "");
        assert_follows(&report, model, "", 2e-5);
        assert_eq!(golden(model)["parameters"], report.parameters);
        let output = directory.path("output");
        assert_same_adapter(&output, &adapter(model, "trained"), 1e-4);

        let settings = |folder: &Path| -> Value {
            let text = std::fs::read_to_string(folder.join("adapter_config.json"));
            serde_json::from_str(&text.expect("settings")).expect("JSON")
        };
        let (ours, theirs) = (settings(&output), settings(&adapter(model, "trained")));
        for key in [
            "peft_type",
            "task_type",
            "r",
            "lora_alpha",
            "use_rslora",
            "bias",
        ] {
            assert_eq!(ours[key], theirs[key], "{key}");
        }
        assert!(!output.join("model.safetensors").exists());
    }
}

/// Frozen parameters stay so, and adapters are sharded, accumulated and offloaded as other
/// parameters are.
#[test]
fn no_option_for_memory_changes_an_update_of_adapters() {
    let _turn = turn();
    for more in [
        "--batch 1 --accum 2",
        "--checkpoint block",
        "--checkpoint offload --batch 1 --accum 2",
        "--offload-param --offload",
        "--batch 1 --ranks 2",
        "--batch 1 --ranks 2 --zero 2 --offload --checkpoint keep-compute",
        "--batch 1 --ranks 2 --zero 3",
    ] {
        let directory = Directory::new("qwen3");
        let report = train(&directory, "qwen3", more);
        assert_follows(&report, "qwen3", more, 2e-5);
        assert_same_adapter(
            &directory.path("output"),
            &adapter("qwen3", "trained"),
            1e-4,
        );
    }
}

#[test]
fn bf16_adapters_stay_near_with_a_base_in_either_type() {
    let _turn = turn();
    for (more, tolerance) in [
        ("--amp bf16", 2e-2),
        ("--amp bf16 --frozen bf16", 2e-2),
        (
            "--amp bf16 --frozen bf16 --offload-param --checkpoint block",
            2e-2,
        ),
        (
            "--amp bf16 --frozen bf16 --batch 1 --ranks 2 --zero 3",
            2e-2,
        ),
    ] {
        let report = train(&Directory::new("llama"), "llama", more);
        assert_follows(&report, "llama", more, tolerance);
    }
}

#[test]
fn frozen_matrices_are_in_their_type_and_nothing_else() {
    let config = LlmConfig::read(&tests().join("llm/llama")).expect("a configuration");
    let model: Llm<Autodiff<Flex>> = config.init(&Default::default());
    let model = model.with_trained(&["model.embed_tokens.*".to_owned()]);
    let model = model.expect("a parameter").with_frozen_in(DType::BF16);
    for_each_float(&model, |path, _, parameter: FloatTensor<Autodiff<Flex>>| {
        let is_matrix = parameter.shape().num_dims() == 2;
        let expected = match is_matrix && !path.contains("embed_tokens") {
            true => DType::BF16,
            false => DType::F32,
        };
        assert_eq!(parameter.dtype(), expected, "{path}");
    });
}

/// The merged model has the held-out loss of the base with the adapters.
#[test]
fn a_merged_model_and_loaded_adapters_compute_the_same() {
    let _turn = turn();
    for more in ["--merge", "--merge --batch 1 --ranks 2 --zero 3"] {
        let directory = Directory::new("qwen3");
        let first = train(&directory, "qwen3", more);
        assert!(first.valid_loss < first.valid_loss_before);
        let output = directory.path("output");
        let merged = output.join("merged");
        assert!(merged.join("tokenizer.json").exists());
        let again = directory.path("again");
        let base = directory.path("model");
        for (model, adapter) in [
            (&merged, String::new()),
            (&base, format!("--adapter {}", output.display())),
        ] {
            let options = format!(
                "--packing plain --steps 1 --model {} --output {} {adapter}",
                model.display(),
                again.display()
            );
            let second = directory.run(&options).expect("a report");
            let difference = (second.valid_loss_before - first.valid_loss).abs();
            assert!(difference < 1e-6, "{more} {adapter}: {difference:e}");
        }
    }
}

#[test]
fn new_adapters_change_nothing_before_the_first_update() {
    let _turn = turn();
    let directory = Directory::new("llama");
    let plain = directory.run("--steps 1").expect("a report");
    let new = directory.run("--steps 2 --lora-rank 3 --lora-targets q_proj mlp.up_proj");
    let new = new.expect("a report");
    assert_eq!(new.valid_loss_before, plain.valid_loss_before);
    assert_eq!(new.losses[0], plain.losses[0]);
    assert_ne!(new.losses[1], new.losses[0]);
    // Width 16, inner width 24, two blocks.
    assert_eq!(new.parameters, 2 * 3 * ((16 + 16) + (16 + 24)));
    let values = values(&directory.path("output"));
    let names: Vec<_> = values.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names.len(), 8);
    assert_eq!(
        names[0],
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    );
}

/// PEFT draws `lora_A` as PyTorch draws a linear layer: uniformly up to one over the root of the
/// inputs.
#[test]
fn the_first_values_are_those_of_peft() {
    // A training beside it would draw from the same generator.
    let _turn = turn();
    let config = LlmConfig::read(&tests().join("llm/llama")).expect("a configuration");
    let model: Llm<Flex> = config.init(&Default::default());
    let lora = examples::llm::LoraConfig {
        rank: 64,
        alpha: 8.0,
        dropout: 0.0,
        is_rank_stabilized: false,
    };
    let model = model.with_lora(&lora, &["gate_proj".to_owned()]);
    let folder = tempfile::tempdir().expect("a folder");
    let written = model
        .expect("adapters")
        .write_adapter(Path::new("llama"), Some(folder.path()));
    written.expect("a file");
    for (name, values) in values(folder.path()) {
        let largest = values
            .iter()
            .fold(0.0f32, |most, value| most.max(value.abs()));
        if name.contains("lora_B") {
            assert_eq!(largest, 0.0, "{name}");
            continue;
        }
        let mean_square: f32 =
            values.iter().map(|value| value * value).sum::<f32>() / values.len() as f32;
        assert!(largest <= 0.25 && largest > 0.24, "{name}: {largest}");
        // That of a uniform distribution, a third of the bound's square.
        assert!(
            (mean_square * 48.0 - 1.0).abs() < 0.15,
            "{name}: {mean_square}"
        );
    }
    let settings = std::fs::read_to_string(folder.path().join("adapter_config.json"));
    let settings: Value = serde_json::from_str(&settings.expect("settings")).expect("JSON");
    assert_eq!(settings["target_modules"], serde_json::json!(["gate_proj"]));
}

#[test]
fn recomputed_blocks_have_the_same_dropout() {
    let _turn = turn();
    let options = "--lora-rank 4 --lora-dropout 0.5 --lr 1e-2";
    let run = |more: &str| {
        let report = Directory::new("llama").run(&format!("{options} {more}"));
        report.expect("a report").losses
    };
    let (kept, recomputed) = (run(""), run("--checkpoint block"));
    assert_eq!(kept, recomputed);
    let without = run("--lora-dropout 0");
    assert_eq!(without[0], kept[0]);
    assert_ne!(without[4], kept[4]);
}

/// burn-zero's own tests compare the masks of ranks with each other.
#[test]
fn masks_of_ranks_are_a_function_of_the_seed() {
    let _turn = turn();
    let directory = Directory::new("llama");
    let text = directory.path("equal.txt");
    std::fs::write(&text, "k".repeat(400)).expect("a file");
    let run = |more: &str| {
        let options = format!(
            "--text {} --steps 3 --batch 1 --lora-rank 2 --lora-dropout 0.5 --lr 1e-2 {more}",
            text.display()
        );
        let options = directory.options_on(&options, "");
        let report = examples::finetune::run(&options).expect("a training");
        report.expect("rank 0 is here").gradient_norms
    };
    let two = run("--ranks 2");
    assert_eq!(two, run("--ranks 2"));
    assert_ne!(two, run("--ranks 2 --seed 43"));
}

/// `--memory` estimates many settings, and reads the files of `--adapter` once.
#[test]
fn adapters_of_a_directory_are_described_without_its_files() {
    for model in ["llama", "qwen3"] {
        let directory = Directory::new(model);
        let start = adapter(model, "start");
        let options = directory.options(&format!("--adapter {}", start.display()));
        let config = LlmConfig::read(&options.model).expect("a configuration");
        let tuned = |tuning: &TuningOptions| {
            let model: Llm<Flex> = config.init(&Default::default());
            tuning.tuned(model).expect("adapters")
        };
        let described = options.tuning.without_files(&config).expect("adapters");
        assert_eq!(described.adapter, None);
        let (read, described) = (tuned(&options.tuning), tuned(&described));
        assert_eq!(described.lora(), read.lora());
        assert_eq!(described.target_modules(), read.target_modules());
        assert_eq!(described.trained_parameters(), read.trained_parameters());
    }
}

/// Parameters by their names in the files; the others are in the output as they were.
#[test]
fn only_the_named_parameters_are_trained() {
    let _turn = turn();
    let directory = Directory::new("qwen3");
    let report = directory
        .run("--train *layers.1.* model.norm.weight lm_head.* --checkpoint block")
        .expect("a report");
    let config = LlmConfig::read(&directory.path("model")).expect("a configuration");
    assert!(report.parameters < config.parameters());
    assert!(report.losses[4] != report.losses[0]);
    let [before, after] = ["model", "output"].map(|folder| {
        let file = directory.path(folder).join("model.safetensors");
        TensorFile::open(&file).expect("a file")
    });
    for name in before.names() {
        let [before, after] = [&before, &after].map(|file| file.read(name).expect("a tensor"));
        let is_trained =
            name.contains("layers.1.") || ["model.norm.weight", "lm_head.weight"].contains(&name);
        assert_eq!(before != after, is_trained, "{name}");
    }
}

#[test]
fn what_cannot_be_adapted_is_refused_by_its_name() {
    let _turn = turn();
    let directory = Directory::new("llama");
    for (more, says) in [
        ("--lora-rank 2 --lora-targets q_proj lm_head", "\"lm_head\""),
        ("--train *layers.2.*", "*layers.2.*"),
        ("--merge", "--lora-rank"),
        ("--frozen bf16 --amp bf16", "--train"),
        ("--frozen bf16 --lora-rank 2", "--amp bf16"),
    ] {
        let error = refusal(&directory, more);
        assert!(error.contains(says), "{more}: {error}");
    }
    let of_another = adapter("qwen3", "start");
    let error = refusal(&directory, &format!("--adapter {}", of_another.display()));
    assert!(
        error.contains("q_proj.lora_B") && error.contains("[16, 2]"),
        "{error}"
    );

    let copy = directory.path("adapter");
    std::fs::create_dir(&copy).expect("a folder");
    let start = adapter("llama", "start");
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(start.join(file), copy.join(file)).expect("a copy");
    }
    let settings = copy.join("adapter_config.json");
    let text = std::fs::read_to_string(&settings).expect("settings");
    for (key, value) in [
        ("use_dora", Value::from(true)),
        ("alpha_pattern", serde_json::json!({"q_proj": 2})),
        ("peft_type", "IA3".into()),
        ("init_lora_weights", "pissa".into()),
        ("r", 0.into()),
    ] {
        let mut changed: Value = serde_json::from_str(&text).expect("JSON");
        changed[key] = value;
        std::fs::write(&settings, changed.to_string()).expect("settings");
        let error = refusal(&directory, &format!("--adapter {}", copy.display()));
        assert!(error.contains(key), "{error}");
    }
}
