//! The updates of `finetune` are those of transformers (`golden.py`), with every option that must
//! not change them, and what cannot be trained is refused by its name.

mod chat;
mod lora;
mod text;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_estimate::{DeviceMemory, MetaDevice, Planned, measure};
use burn_flex::Flex;
use examples::finetune::options::{Options, Schedule};
use examples::finetune::plan::Updates;
use examples::finetune::report::Report;
use examples::llm::LlmConfig;
use examples::training::error::TrainingError;
use examples::training::plan::Setting;
use serde_json::{Value, json};

/// The precision is a setting of the process, and random numbers are its backend's: trainings take
/// turns.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

fn golden() -> Value {
    let text = fs::read_to_string(tests().join("finetune/training.json")).expect("a reference");
    serde_json::from_str(&text).expect("JSON")
}

fn numbers(value: &Value) -> Vec<f64> {
    serde_json::from_value(value.clone()).expect("numbers")
}

/// A directory of a small model with the tokenizer.
struct Directory(tempfile::TempDir);

impl Directory {
    fn new(model: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let to = directory.path().join("model");
        fs::create_dir(&to).expect("a directory");
        for file in ["config.json", "model.safetensors"] {
            let from = tests().join("llm").join(model).join(file);
            fs::copy(from, to.join(file)).expect("a copy");
        }
        let from = tests().join("finetune/tokenizer.json");
        fs::copy(from, to.join("tokenizer.json")).expect("a copy");
        Self(directory)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The options of the reference, and more.
    fn options(&self, more: &str) -> Options {
        let text = ["one.txt", "two.txt"].map(|file| tests().join("finetune").join(file));
        let [one, two] = text.each_ref().map(|file| file.display());
        self.options_on(&format!("--text {one} {two}"), more)
    }

    /// Those of the reference, but for the text.
    fn options_on(&self, data: &str, more: &str) -> Options {
        let (model, output) = (self.path("model"), self.path("output"));
        let arguments = format!(
            "finetune --model {} --output {} --no-shuffle --schedule constant --lr 1e-3 --beta-2 0.95 \
             --weight-decay 0.1 --context 16 --batch 2 --steps 5 {data} {more}",
            model.display(),
            output.display(),
        );
        Options::read(arguments.split_whitespace()).expect("options")
    }

    /// Trains; rank 0 is always here.
    fn run(&self, more: &str) -> Result<Report, TrainingError> {
        examples::finetune::run(&self.options(more)).map(Option::unwrap)
    }
}

fn assert_near(what: &str, ours: &[f64], theirs: &[f64], tolerance: f64) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (update, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        assert!(
            (ours - theirs).abs() <= tolerance * theirs.abs(),
            "{what} of update {}: {ours}, not {theirs}",
            update + 1
        );
    }
}

/// Losses and norms, to a relative tolerance.
fn assert_follows(report: &Report, run: &str, tolerance: f64) {
    let golden = &golden()[run];
    assert_near(
        &format!("{run}: loss"),
        &report.losses,
        &numbers(&golden["losses"]),
        tolerance,
    );
    assert_near(
        &format!("{run}: norm"),
        &report.gradient_norms,
        &numbers(&golden["norms"]),
        10.0 * tolerance,
    );
}

#[test]
fn every_update_is_that_of_transformers() {
    let _turn = turn();
    for model in ["llama", "qwen3"] {
        for packing in ["plain", "documents"] {
            let report = Directory::new(model).run(&format!("--packing {packing}"));
            let report = report.expect("a report");
            assert_follows(&report, &format!("{model} {packing}"), 2e-5);
        }
    }
}

#[test]
fn bf16_stays_near() {
    let _turn = turn();
    let report = Directory::new("llama").run("--amp bf16");
    assert_follows(&report.expect("a report"), "llama documents", 2e-2);
}

/// The sequences of an update are the same, however they fall into micro-batches and ranks.
#[test]
fn no_option_for_memory_changes_an_update() {
    let _turn = turn();
    for more in [
        "--batch 1 --accum 2",
        "--checkpoint block",
        "--offload",
        "--offload-param --offload --checkpoint units",
        "--batch 1 --ranks 2",
        "--batch 1 --ranks 2 --zero 1",
        "--batch 1 --ranks 2 --zero 2 --offload",
        "--batch 1 --ranks 2 --zero 3 --checkpoint units",
    ] {
        let report = Directory::new("qwen3").run(more);
        let report = report.unwrap_or_else(|error| panic!("{more}: {error}"));
        assert_follows(&report, "qwen3 documents", 2e-5);
    }
}

/// What the file says counts where the command line says nothing: two micro-batches of a sequence
/// are an update of two.
#[test]
fn a_deepspeed_file_gives_the_settings() {
    let _turn = turn();
    let directory = Directory::new("qwen3");
    let file = directory.path("ds_config.json");
    let read = |json: Value, more: &str| {
        fs::write(&file, json.to_string()).expect("a file");
        let [model, output] = ["model", "output"].map(|name| directory.path(name));
        let [one, two] = ["one.txt", "two.txt"].map(|file| tests().join("finetune").join(file));
        let arguments = format!(
            "finetune --model {} --output {} --text {} {} --no-shuffle --schedule constant --context 16 --steps 5 --config {} {more}",
            model.display(),
            output.display(),
            one.display(),
            two.display(),
            file.display(),
        );
        Options::read(arguments.split_whitespace())
    };
    let json = json!({
        "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": 7.0, "betas": [0.9, 0.95], "eps": "auto", "weight_decay": 0.1}},
    });
    let of_batch = read(json.clone(), "--lr 1e-3 --batch 2").expect("a file that works");
    assert_eq!((of_batch.batch, of_batch.accum), (2, 1));
    let options = read(json, "--lr 1e-3").expect("a file that works");
    assert_eq!((options.batch, options.accum, options.lr), (1, 2, 1e-3));
    let report = examples::finetune::run(&options)
        .expect("a run")
        .expect("rank 0");
    assert_follows(&report, "qwen3 documents", 2e-5);
    assert_eq!((report.stage, report.window), (2, 2));

    for (json, text) in [
        (
            json!({"gradient_clipping": 0}),
            "gradient_clipping: this program clips",
        ),
        (
            json!({"scheduler": {"type": "WarmupLR"}}),
            "scheduler: this program has a schedule",
        ),
        (
            json!({"optimizer": {"type": "AdamW", "params": {"lr": 7.0}}}),
            "optimizer.params.lr: 7",
        ),
        (
            json!({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}),
            "train_batch_size",
        ),
    ] {
        let error = read(json, "").expect_err(text).to_string();
        assert!(
            error.contains("ds_config.json") && error.contains(text),
            "{error}"
        );
    }
}

/// From a record after three of five updates: with the same settings the bits, the masks of dropout
/// too; on other ranks the numbers.
#[test]
fn a_resumed_training_is_the_one_without_the_break() {
    let _turn = turn();
    let adapters = "--lora-rank 2 --lora-dropout 0.5 --save-every 3";
    let (directory, file) = (Directory::new("llama"), "output/adapter_model.safetensors");
    let whole = directory.run(adapters).expect("a run");
    let weights = fs::read(directory.path(file)).expect("adapters");
    let resumed = directory
        .run(&format!("{adapters} --resume"))
        .expect("a record");
    assert_eq!(resumed.losses, whole.losses);
    assert_eq!(resumed.gradient_norms, whole.gradient_norms);
    assert_eq!(resumed.valid_loss_before, whole.valid_loss_before);
    assert_eq!(resumed.valid_loss, whole.valid_loss);
    assert!(fs::read(directory.path(file)).expect("adapters") == weights);

    let directory = Directory::new("qwen3");
    let ranks = "--batch 1 --ranks 2 --zero 2 --save-every 3";
    directory.run(ranks).expect("a run");
    let refused = refusal(&directory, ranks);
    assert!(
        refused.contains("has the records of an earlier run"),
        "{refused}"
    );
    let others = "--batch 1 --ranks 2 --zero 3 --resume";
    let resumed = directory.run(others).expect("a record");
    assert_follows(&resumed, "qwen3 documents", 2e-5);

    let refused = refusal(&directory, "--resume --packing plain");
    assert!(
        refused.contains("now \"--packing\": \"plain\""),
        "{refused}"
    );
    let refused = refusal(&directory, "--resume --clip 2");
    assert!(
        refused.contains("other settings: \"--clip\": 1.0, now \"--clip\": 2.0"),
        "{refused}"
    );
    let refused = refusal(&Directory::new("qwen3"), "--resume");
    assert!(refused.contains("run without --resume first"), "{refused}");
    let directory = Directory::new("qwen3");
    directory.run("").expect("a run");
    let refused = refusal(&directory, "--resume");
    assert!(refused.contains("run with --save-every"), "{refused}");
}

/// `--memory` chooses what is recomputed and accumulated, and trains as without it.
#[test]
fn settings_that_fit_are_chosen_and_train_the_same() {
    let _turn = turn();
    let options = "--context 16 --batch 2";
    let directory = Directory::new("qwen3");
    let chosen = |bytes: &str| {
        let report = directory.run(&format!("{options} --memory {bytes}"));
        let report = report.unwrap_or_else(|error| panic!("{bytes}: {error}"));
        assert_follows(&report, "qwen3 documents", 2e-5);
        (report.micro_batch, report.window)
    };
    assert_eq!(chosen("1G"), (2, 1));
    let least = least(&directory);
    let error = refusal(&directory, &format!("{options} --memory 1K"));
    assert!(
        error.contains("nothing fits") && error.contains(&least.setting.to_string()),
        "{error}"
    );
    // With as much as the least takes, whatever the speed of this machine was measured to be.
    let Setting { batch, accum, .. } = least.setting;
    assert_eq!(chosen(&least.needed_bytes.to_string()), (batch, accum));
}

/// The update that takes the least.
fn least(directory: &Directory) -> Planned<Setting> {
    let options = directory.options("");
    let config = LlmConfig::read(&options.model).expect("a configuration");
    let updates = Updates {
        config: &config,
        tuning: &options.tuning,
        context: options.context,
        has_documents: true,
        meta: MetaDevice::new(0),
    };
    let profile = measure::<Flex>(&Default::default(), 64);
    let mut planner = updates.planner(profile, DeviceMemory::heap(1));
    let setting = Setting::new(options.batch, options.accum, &options.memory);
    let plan = planner.plan(setting, &[setting.amp]).expect("a plan");
    plan.too_large[0].clone()
}

/// What is written is a model's directory: its loss on the held-out text is that at the end of the
/// training, also where ranks share the parameters.
#[test]
fn the_trained_model_can_be_trained_on() {
    let _turn = turn();
    for more in ["", "--batch 1 --ranks 2 --zero 3"] {
        let directory = Directory::new("llama");
        let first = directory.run(more).expect("a report");
        assert!(first.valid_loss < first.valid_loss_before);
        let output = directory.path("output");
        let again = format!(
            "--model {} --output {}",
            output.display(),
            directory.path("again").display()
        );
        let second = directory.run(&again).expect("a report");
        let difference = (second.valid_loss_before - first.valid_loss).abs();
        assert!(difference < 1e-6, "{more}: {difference:e}");
        for file in ["config.json", "tokenizer.json", "report.json"] {
            assert!(output.join(file).exists(), "{file}");
        }
        let read = LlmConfig::read(&output).expect("a configuration");
        assert_eq!(
            read,
            LlmConfig::read(&directory.path("model")).expect("one")
        );
        let model = read.init::<Flex>(&Default::default());
        model.read_weights(&output).expect("weights");
    }
}

#[test]
fn a_cosine_falls_to_zero() {
    let rate = |update| Schedule::Cosine.lr(2.0, update, 4);
    assert_eq!(rate(0), 2.0);
    assert!((rate(2) - 1.0).abs() < 1e-12);
    assert!(rate(3) < 0.3 && rate(4).abs() < 1e-12);
    assert_eq!(Schedule::Constant.lr(2.0, 3, 4), 2.0);
}

fn refusal(directory: &Directory, more: &str) -> String {
    directory.run(more).expect_err(more).to_string()
}

#[test]
fn a_loss_that_is_no_number_ends_the_training() {
    let _turn = turn();
    let directory = Directory::new("llama");
    let weights = directory.path("model").join("model.safetensors");
    let mut bytes = fs::read(&weights).expect("a file");
    let last = bytes.len() - size_of::<f32>();
    bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&weights, bytes).expect("a file");
    let error = directory.run("").expect_err("NaN");
    assert!(
        matches!(error, TrainingError::Diverged { update: 1, .. }),
        "{error}"
    );
    let error = error.to_string();
    assert!(error.contains("NaN") && error.contains("--lr"), "{error}");
    assert!(!directory.path("output").join("model.safetensors").exists());
}

#[test]
fn what_cannot_be_trained_is_refused_by_its_name() {
    let _turn = turn();
    let directory = Directory::new("llama");
    let error = refusal(&directory, "--context 65");
    assert!(
        error.contains("--context 65") && error.contains("64"),
        "{error}"
    );

    let binary = directory.path("binary");
    fs::write(&binary, [b'a', b'b', 0xff]).expect("a file");
    let error = refusal(&directory, &format!("--text {}", binary.display()));
    assert!(
        error.contains("binary") && error.contains("byte 2"),
        "{error}"
    );

    let short = directory.path("short");
    fs::write(&short, "the fox").expect("a file");
    let options = Options {
        text: vec![short],
        ..directory.options("")
    };
    let error = examples::finetune::run(&options)
        .expect_err("short")
        .to_string();
    assert!(
        error.contains("too little") && error.contains("--context"),
        "{error}"
    );

    // A tokenizer with a token more than the model.
    let tokenizer = directory.path("model").join("tokenizer.json");
    let text = fs::read_to_string(&tokenizer).expect("a tokenizer");
    let mut json: Value = serde_json::from_str(&text).expect("JSON");
    json["added_tokens"] = serde_json::json!([{
        "id": 40, "content": "fox", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": false
    }]);
    fs::write(&tokenizer, json.to_string()).expect("a tokenizer");
    let error = refusal(&directory, "");
    assert!(
        error.contains("one.txt") && error.contains("\"fox\""),
        "{error}"
    );

    fs::remove_file(&tokenizer).expect("a file");
    let error = refusal(&directory, "");
    assert!(error.contains("tokenizer.json"), "{error}");
}

#[test]
fn a_result_that_would_destroy_the_model_or_be_taken_for_another_is_refused() {
    let _turn = turn();
    let directory = Directory::new("llama");
    let model = directory.path("model");
    let options = Options {
        output: model.clone(),
        ..directory.options("")
    };
    let error = examples::finetune::run(&options).expect_err("the model's own directory");
    let error = error.to_string();
    assert!(
        error.contains("--output") && error.contains("over --model"),
        "{error}"
    );
    let tokenizer = fs::read(model.join("tokenizer.json")).expect("a tokenizer");
    assert!(!tokenizer.is_empty());

    let output = directory.path("output");
    fs::create_dir_all(&output).expect("a directory");
    fs::write(output.join("adapter_config.json"), "{}").expect("a file");
    let error = refusal(&directory, "");
    assert!(
        error.contains("adapter_config.json is of an earlier run"),
        "{error}"
    );
}
