//! What DeepSpeed's users write, a feature a file, and for each whether it loads or why not. The
//! features are those of the files in deepspeedai/DeepSpeedExamples, huggingface/accelerate and
//! huggingface/transformers. What the sections of precision, optimizer and schedule say is for the
//! program: see `examples/tests/gpt/deepspeed.rs`.

use std::fs;
use std::path::Path;

use burn_zero::{ZeroConfig, ZeroError};
use serde_json::json;

/// What stands here for a file that loads without any help.
const LOADS: &str = "loads";

/// The file in `files`, and what is said of it if nothing fills in `"auto"`.
const FILES: &[(&str, &str)] = &[
    ("adam", LOADS),
    ("adamw", LOADS),
    ("torch_adam", LOADS),
    ("sgd", LOADS),
    ("adagrad", LOADS),
    ("warmup", LOADS),
    ("warmup_decay", LOADS),
    ("warmup_cosine", LOADS),
    ("fp16", LOADS),
    ("fp16_fixed_scale", LOADS),
    ("bf16", LOADS),
    ("bfloat16", LOADS),
    ("stage_0", LOADS),
    ("stage_1", LOADS),
    ("stage_2", LOADS),
    ("stage_3", LOADS),
    ("stage_3_offload_param", LOADS),
    ("stage_as_true", LOADS),
    ("offload_optimizer", LOADS),
    ("cpu_offload", LOADS),
    ("stage_3_keys_in_stage_2", LOADS),
    ("clipping_off", LOADS),
    ("prescaled", LOADS),
    ("communication", LOADS),
    ("logging", LOADS),
    ("activation_checkpointing", LOADS),
    ("autotuning", LOADS),
    ("compile", LOADS),
    ("untested_optimizer", LOADS),
    ("what_is_off", LOADS),
    ("auto_batch", LOADS),
    ("auto_buckets", LOADS),
    (
        "auto_fp16",
        "fp16.enabled: \"auto\", and nothing fills it in: let the program give it, or put a value there",
    ),
    (
        "auto_bf16",
        "bf16.enabled: \"auto\", and nothing fills it in: let the program give it, or put a value there",
    ),
    (
        "auto_lr",
        "optimizer.params.lr: \"auto\", and nothing fills it in: let the program give it, or put a value there",
    ),
    (
        "auto_betas",
        "optimizer.params.betas: \"auto\", and nothing fills it in: let the program give it, or put a value there",
    ),
    (
        "auto_eps",
        "optimizer.params.eps: \"auto\", and nothing fills it in: let the program give it, or put a value there",
    ),
    (
        "auto_weight_decay",
        "optimizer.params.weight_decay: \"auto\", and nothing fills it in: let the program give it, or put a value there",
    ),
    (
        "auto_warmup",
        "scheduler.params.warmup_max_lr: \"auto\", and nothing fills it in: let the program give it, or put a value there",
    ),
    (
        "auto_warmup_steps",
        "scheduler.params.warmup_num_steps: \"auto\", and nothing fills it in: let the program give it, or put a value there",
    ),
    (
        "auto_total_steps",
        "scheduler.params.total_num_steps: \"auto\", and nothing fills it in: let the program give it, or put a value there",
    ),
    (
        "auto_optimizer",
        "optimizer: \"auto\", and nothing fills it in: let the program give it, or put a value there",
    ),
    (
        "accelerate_stage_3",
        "optimizer.params.lr: \"auto\", and nothing fills it in: let the program give it, or put a value there",
    ),
    (
        "accelerate_stage_3_offload",
        "optimizer.params.lr: \"auto\", and nothing fills it in: let the program give it, or put a value there",
    ),
    (
        "transformers_stage_3",
        "fp16.enabled: \"auto\", and nothing fills it in: let the program give it, or put a value there",
    ),
    (
        "stage_3_nvme",
        "zero_optimization.offload_param.device: \"nvme\" is not supported: put \"cpu\": what is offloaded is in host memory, not on a disk",
    ),
    (
        "offload_nvme",
        "zero_optimization.offload_optimizer.device: \"nvme\" is not supported: put \"cpu\": what is offloaded is in host memory, not on a disk",
    ),
    ("lamb", LOADS),
    ("one_bit_adam", LOADS),
    ("one_bit_lamb", LOADS),
    ("zero_one_adam", LOADS),
    ("one_cycle", LOADS),
    ("bias_correction", LOADS),
    ("max_grad_norm", LOADS),
    ("bf16_masters", LOADS),
    (
        "torch_autocast",
        "torch_autocast: {\"dtype\":\"bfloat16\",\"enabled\":true} is not supported: enable fp16 or bf16 instead, which is autocast over f32 parameters here",
    ),
    (
        "amp",
        "amp: {\"enabled\":true,\"opt_level\":\"O1\"} is not supported: NVIDIA's Apex: enable fp16 or bf16 instead",
    ),
    (
        "zenflow",
        "zero_optimization.zenflow: {\"topk_ratio\":0.2,\"update_interval\":3} is not supported: each step updates all parameters",
    ),
    (
        "progressive_layer_drop",
        "progressive_layer_drop: {\"enabled\":true,\"theta\":0.4} is not supported: dropping layers is the model's own",
    ),
    (
        "sparse_attention",
        "sparse_attention: {\"block\":8,\"mode\":\"bigbird\"} is not supported: attention is the model's own",
    ),
    (
        "tensor_parallel",
        "tensor_parallel: {\"autotp_size\":2} is not supported: ranks share data only",
    ),
    (
        "sequence_parallel",
        "sequence_parallel_size: 4 is not supported: ranks share data only",
    ),
    (
        "data_efficiency",
        "data_efficiency: {\"enabled\":true,\"seed\":7} is not supported: the data pipeline is the program's own",
    ),
    (
        "curriculum",
        "curriculum_learning: {\"enabled\":true,\"min_difficulty\":4} is not supported: the data pipeline is the program's own",
    ),
    (
        "layer_reduction",
        "compression_training: {\"layer_reduction\":{\"enabled\":true}} is not supported: train without it",
    ),
    (
        "template",
        "the configuration is no JSON: expected value at line 1 column 22",
    ),
    (
        "comment",
        "the configuration is no JSON: key must be a string at line 2 column 3",
    ),
];

#[test]
fn every_file_loads_or_says_why_not() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config/files");
    let read =
        |name: &str| fs::read_to_string(directory.join(name).with_extension("json")).unwrap();
    let found = fs::read_dir(&directory).unwrap().count();
    assert_eq!(found, FILES.len(), "files beside those of the table");

    let auto = |path: &str| match path {
        "zero_optimization.reduce_bucket_size" => Some(json!(64 * 64)),
        "gradient_clipping" => Some(json!(2.0)),
        "optimizer.params.betas" => Some(json!([0.9, 0.95])),
        "fp16.enabled" | "bf16.enabled" => Some(json!(false)),
        "optimizer" => Some(json!({"type": "AdamW"})),
        path if path.contains(".params.") => Some(json!(1)),
        _ => None,
    };
    let says = |config: Result<ZeroConfig, ZeroError>| {
        config.map_or_else(|error| error.to_string(), |_| LOADS.to_owned())
    };
    for (name, expected) in FILES {
        let text = read(name);
        assert_eq!(
            says(ZeroConfig::from_deepspeed_json(&text)),
            *expected,
            "{name}"
        );
        // What only the program knows is all that it fills in.
        let filled = match expected.contains("nothing fills it in") {
            true => LOADS,
            false => expected,
        };
        assert_eq!(
            says(ZeroConfig::from_deepspeed_json_with(&text, &auto)),
            filled,
            "{name}"
        );
    }
}
