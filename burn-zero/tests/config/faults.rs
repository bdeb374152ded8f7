//! What DeepSpeed 0.19.8 does and this crate did otherwise.

use std::collections::BTreeSet;

use burn_zero::{Memory, ZeroConfig};
use serde_json::{Value, json};

fn read(json: Value) -> ZeroConfig {
    ZeroConfig::from_deepspeed_json(&json.to_string()).unwrap()
}

#[test]
fn a_file_without_the_key_clips_to_1() {
    assert_eq!(read(json!({})).gradient_clipping, Some(1.0));
    assert_eq!(
        read(json!({"gradient_clipping": null})).gradient_clipping,
        Some(1.0)
    );
    assert_eq!(
        read(json!({"gradient_clipping": 0})).gradient_clipping,
        None
    );
    assert_eq!(
        read(json!({"gradient_clipping": 0.5})).gradient_clipping,
        Some(0.5)
    );
}

#[test]
fn sequence_parallelism_sends_in_a_type_of_its_own_name() {
    let config = read(json!({"seq_parallel_communication_data_type": "bf16"}));
    let ignored = "seq_parallel_communication_data_type";
    assert!(config.ignored.contains_key(ignored));
}

/// The templates of Accelerate and Transformers say it nearly everywhere.
#[test]
fn auto_is_the_default_where_there_is_one() {
    let config = read(json!({
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }));
    assert_eq!(config.gradient_clipping, Some(1.0));
    assert_eq!(
        config.reduce_bucket_size,
        ZeroConfig::default().reduce_bucket_size
    );
    let error = config.batch.resolve(2).unwrap_err();
    assert_eq!(
        error.to_string(),
        "neither train_batch_size nor train_micro_batch_size_per_gpu has a number: put one there, or set it in ZeroConfig::batch"
    );
}

#[test]
fn the_program_fills_auto_in() {
    let file = json!({
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "total_num_steps": "auto"}},
    });
    let auto = |path: &str| match path {
        "gradient_clipping" => Some(json!(0.5)),
        "bf16.enabled" => Some(json!(true)),
        "zero_optimization.reduce_bucket_size" => Some(json!(10_000)),
        "scheduler.params.total_num_steps" => Some(json!(70)),
        "scheduler.params.warmup_min_lr" => Some(Value::Null),
        _ => None,
    };
    let config = ZeroConfig::from_deepspeed_json_with(&file.to_string(), &auto).unwrap();
    assert_eq!(config.gradient_clipping, Some(0.5));
    assert_eq!(config.reduce_bucket_size, 10_000);
    assert_eq!(config.sections["bf16"], json!({"enabled": true}));
    let params = json!({"total_num_steps": 70});
    assert_eq!(config.sections["scheduler"]["params"], params);

    // Nothing fills one of them: the key, and what to do.
    let error = ZeroConfig::from_deepspeed_json(&file.to_string()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "bf16.enabled: \"auto\", and nothing fills it in: let the program give it, or put a value there"
    );
}

#[test]
fn the_keys_of_stage_3_are_listed_as_ignored() {
    let config = read(
        json!({"zero_optimization": {"stage3_prefetch_bucket_size": 1e6, "param_persistence_threshold": 2,
        "stage3_model_persistence_threshold": 3, "stage3_max_live_parameters": 4, "max_reuse_distance": 5, "sub_group_size": 1e14,
        "stage3_gather_fp16_weights_on_model_save": true, "cpu_offload_param": true}}),
    );
    assert_eq!(config.ignored.len(), 8, "{:?}", config.ignored);
    let of_stage_3 = &config.ignored["zero_optimization.cpu_offload_param"];
    assert_eq!(of_stage_3, "of stage 3, as in DeepSpeed");
    let own = [
        "stage3_prefetch_bucket_size",
        "param_persistence_threshold",
        "stage3_max_live_parameters",
        "max_reuse_distance",
        "sub_group_size",
    ];
    let reasons = own.map(|key| &config.ignored[&format!("zero_optimization.{key}")]);
    let different: BTreeSet<_> = reasons.into_iter().collect();
    assert_eq!(
        different.len(),
        own.len(),
        "each has its own: {different:?}"
    );
    assert_eq!(config.offload_param, Memory::Device);
}
