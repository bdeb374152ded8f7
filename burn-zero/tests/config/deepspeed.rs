//! DeepSpeed's JSON, read and refused.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value, json};

use burn_ranks::BufferDtype;
use burn_zero::{BatchConfig, ConfigFault, Memory, Stage, ZeroConfig};

use crate::fault;

/// The file that must load unmodified.
const UNMODIFIED: &str = r#"{"train_batch_size": 64, "fp16": {"enabled": true}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu",
"pin_memory": true}, "offload_param": {"device": "cpu"}}}"#;

/// A file with something in every section.
const FULL: &str = r#"{
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "gradient_clipping": 1.0,
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3,
           "min_loss_scale": 2, "auto_cast": false, "consecutive_hysteresis": false},
  "bf16": {"enabled": false},
  "zero_optimization": {"stage": 1, "overlap_comm": true, "reduce_bucket_size": 2e8, "allgather_bucket_size": 200000000,
    "contiguous_gradients": true, "sub_group_size": 1e9, "round_robin_gradients": true,
    "stage3_prefetch_bucket_size": "auto", "stage3_max_live_parameters": 1e9,
    "offload_optimizer": {"device": "cpu", "ratio": 1.0, "buffer_count": 4, "fast_init": false}},
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 5e2,
    "total_num_steps": 10000, "warmup_type": "linear"}},
  "activation_checkpointing": {"cpu_checkpointing": true}, "communication_data_type": "bf16",
  "steps_per_print": 2000, "wall_clock_breakdown": false, "flops_profiler": {"enabled": true}, "amp": {"enabled": false}
}"#;

fn sections(json: Value) -> BTreeMap<String, Value> {
    serde_json::from_value(json).unwrap()
}

#[track_caller]
fn error(json: Value) -> ConfigFault {
    let read = ZeroConfig::from_deepspeed_json(&json.to_string());
    fault(read.expect_err(&json.to_string()))
}

#[test]
fn the_file_users_bring_loads_unmodified() {
    let config = ZeroConfig::from_deepspeed_json(UNMODIFIED).unwrap();
    let expected = ZeroConfig {
        stage: Stage::Gradients,
        batch: BatchConfig {
            train_batch_size: Some(64),
            ..Default::default()
        },
        offload_optimizer: Memory::Host,
        sections: sections(json!({"fp16": {"enabled": true}})),
        ignored: config.ignored.clone(),
        ..Default::default()
    };
    assert_eq!(config, expected);
    let ignored: Vec<&String> = config.ignored.keys().collect();
    assert_eq!(
        ignored,
        [
            "zero_optimization.offload_optimizer.pin_memory",
            "zero_optimization.offload_param",
        ]
    );
    assert_eq!(config.batch.resolve(4).unwrap().micro, 16);
}

#[test]
fn every_section_is_read() {
    let config = ZeroConfig::from_deepspeed_json(FULL).unwrap();
    let expected = ZeroConfig {
        stage: Stage::OptimizerState,
        batch: BatchConfig {
            train_batch_size: None,
            train_micro_batch_size_per_gpu: Some(4),
            gradient_accumulation_steps: Some(8),
        },
        gradient_clipping: Some(1.0),
        offload_optimizer: Memory::Host,
        offload_param: Memory::Device,
        shards: Memory::Host,
        reduce_bucket_size: 200_000_000,
        allgather_bucket_size: 200_000_000,
        communication_dtype: BufferDtype::Bf16,
        sections: sections(json!({
            "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3,
                "min_loss_scale": 2, "auto_cast": false, "consecutive_hysteresis": false},
            "bf16": {"enabled": false},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5,
                "warmup_num_steps": 500, "total_num_steps": 10000, "warmup_type": "linear"}},
        })),
        ignored: config.ignored.clone(),
    };
    assert_eq!(config, expected);
    assert_eq!(config.batch.resolve(2).unwrap().train, 64);
    for path in [
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.overlap_comm",
        "amp",
        "steps_per_print",
    ] {
        assert!(config.ignored.contains_key(path), "{path}");
    }
}

#[test]
fn what_is_left_out_is_the_default() {
    assert_eq!(
        ZeroConfig::from_deepspeed_json("{}").unwrap(),
        ZeroConfig::default()
    );
    let config = ZeroConfig::from_deepspeed_json(
        r#"{"gradient_clipping": 0, "optimizer": {"type": "Adam"}, "scheduler": null, "zero_optimization": null,
            "fp16": {"enabled": false, "initial_scale_power": 3}}"#,
    );
    let expected = ZeroConfig {
        gradient_clipping: None,
        sections: sections(json!({
            "fp16": {"enabled": false, "initial_scale_power": 3},
            "optimizer": {"type": "Adam"},
        })),
        ..Default::default()
    };
    assert_eq!(config.unwrap(), expected);
}

#[test]
fn variants_of_the_file_are_read_too() {
    let read = |json: Value| ZeroConfig::from_deepspeed_json(&json.to_string()).unwrap();
    assert_eq!(
        read(json!({"zero_optimization": true})).stage,
        Stage::OptimizerState
    );
    let deprecated = read(json!({"zero_optimization": {"stage": 2, "cpu_offload": true}}));
    assert_eq!(deprecated.offload_optimizer, Memory::Host);
    for stage_3 in [
        json!({"stage": 3, "offload_param": {"device": "cpu", "pin_memory": true}}),
        json!({"stage": 3, "cpu_offload_param": true}),
    ] {
        let config = read(json!({"zero_optimization": stage_3}));
        assert_eq!(config.stage, Stage::Parameters);
        let settings = config.settings();
        assert_eq!(
            (settings.parameters, settings.shards),
            (Memory::Host, Memory::Host)
        );
    }
    let none = read(json!({"zero_optimization": {"stage": 3, "offload_param": null}}));
    assert_eq!(
        (none.offload_param, none.shards),
        (Memory::Device, Memory::Host)
    );
    let device = json!({"stage": 3, "offload_param": {"device": "none"}});
    let device = read(json!({"zero_optimization": device})).settings();
    assert_eq!(
        (device.parameters, device.shards),
        (Memory::Device, Memory::Device)
    );
    let older = read(json!({"bfloat16": {"enabled": true}}));
    assert_eq!(older.sections, sections(json!({"bf16": {"enabled": true}})));
}

/// The program refuses a `bf16` that is no object, so that it must get it.
#[test]
fn what_is_no_section_of_precision_reaches_the_program() {
    let (on, off) = (json!({"enabled": true}), json!({"enabled": false}));
    for (file, expected) in [
        (json!({"bf16": true}), json!(true)),
        (json!({"bfloat16": true}), json!(true)),
        (json!({"bfloat16": true, "bf16": off}), json!(true)),
        (json!({"bfloat16": on, "bf16": false}), json!(false)),
        (json!({"bfloat16": on, "bf16": null}), on.clone()),
        (json!({"bfloat16": on, "bf16": off}), off.clone()),
    ] {
        let config = ZeroConfig::from_deepspeed_json(&file.to_string()).unwrap();
        assert_eq!(
            config.sections,
            sections(json!({"bf16": expected})),
            "{file}"
        );
    }
}

#[test]
fn integers_that_fill_in_auto_may_be_floats_as_in_the_file() {
    let file = r#"{"zero_optimization": {"reduce_bucket_size": "auto"}, "fp16": {"loss_scale_window": "auto"}}"#;
    let auto = |path: &str| match path {
        "zero_optimization.reduce_bucket_size" => Some(5e8.into()),
        "fp16.loss_scale_window" => Some(1e3.into()),
        _ => None,
    };
    let config = ZeroConfig::from_deepspeed_json_with(file, &auto).unwrap();
    assert_eq!(config.reduce_bucket_size, 500_000_000);
    assert_eq!(config.sections["fp16"]["loss_scale_window"], 1000);
}

#[test]
fn errors_name_the_path_and_what_to_put() {
    let says = |json, text: &str| assert_eq!(error(json).to_string(), text);
    says(
        json!({"zero_optimization": {"stage": 2, "overlap_com": true}}),
        "zero_optimization.overlap_com: there is no such key; the nearest is `overlap_comm`",
    );
    says(
        json!({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}),
        "optimizer.params.lr: \"auto\", and nothing fills it in: let the program give it, or put a value there",
    );
    says(
        json!({"zero_optimization": {"stage": 4}}),
        "zero_optimization.stage: 4, but it must be 0, 1, 2 or 3",
    );
    says(
        json!({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}),
        "zero_optimization.offload_optimizer.device: \"nvme\" is not supported: put \"cpu\": what is offloaded is in host \
         memory, not on a disk",
    );
    says(
        json!({"train_batch_size": 1.5}),
        "train_batch_size: invalid type: floating point `1.5`, expected u64",
    );
    says(
        json!([1]),
        "the configuration: [1], but it must be an object",
    );
    says(
        json!({"zero_optimization": {"cpu_offload": true, "offload_optimizer": {"device": "none"}}}),
        "zero_optimization.offload_optimizer.device: none, but zero_optimization.cpu_offload, the older form, asks for host memory",
    );
    for (json, path) in [
        (
            json!({"zero_optimization": {"stage": 4}}),
            "zero_optimization.stage",
        ),
        (json!({"gradient_clipping": -1}), "gradient_clipping"),
        (
            json!({"zero_optimization": {"reduce_bucket_size": 0}}),
            "zero_optimization.reduce_bucket_size",
        ),
        (
            json!({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}),
            "zero_optimization.offload_optimizer.ratio",
        ),
        (json!({"amp": {"enabled": true}}), "amp"),
        (
            json!({"data_types": {"grad_accum_dtype": "bf16"}}),
            "data_types",
        ),
        (
            json!({"communication_data_type": "int8"}),
            "communication_data_type",
        ),
    ] {
        assert_eq!(error(json).path(), Some(path));
    }
}

#[test]
fn a_doubled_key_and_a_comment_are_refused() {
    let read = |text| fault(ZeroConfig::from_deepspeed_json(text).unwrap_err());
    let doubled = read(r#"{"fp16": {"enabled": true, "enabled": false}}"#);
    assert_eq!(
        doubled.to_string(),
        "fp16.enabled: the key stands there twice"
    );
    assert_eq!(doubled.path(), Some("fp16.enabled"));
    assert!(matches!(read("{} // no"), ConfigFault::Syntax(_)));
    assert!(matches!(
        read(r#"{"gradient_clipping": NaN}"#),
        ConfigFault::Syntax(_)
    ));
    assert!(matches!(
        read(r#"{"gradient_clipping": 1e999}"#),
        ConfigFault::Syntax(_)
    ));
}

/// What a careless or malicious hand makes of a value.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        Just(json!(1e300)),
        Just(json!("auto")),
        ".{0,60}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((".{0,12}", inner), 0..4)
                .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

/// Every path of `json`, as its keys.
fn paths(json: &Value, prefix: &[String], found: &mut Vec<Vec<String>>) {
    for (key, value) in json.as_object().into_iter().flatten() {
        let path = [prefix, std::slice::from_ref(key)].concat();
        found.push(path.clone());
        paths(value, &path, found);
    }
}

fn parent<'a>(json: &'a mut Value, path: &[String]) -> &'a mut serde_json::Map<String, Value> {
    let (_, parents) = path.split_last().unwrap();
    let found = parents
        .iter()
        .fold(json, |json, key| &mut json[key.as_str()]);
    found.as_object_mut().unwrap()
}

fn full_and_its_path(index: usize) -> (Value, Vec<String>) {
    let full: Value = serde_json::from_str(FULL).unwrap();
    let mut found = Vec::new();
    paths(&full, &[], &mut found);
    let path = found.swap_remove(index % found.len());
    (full, path)
}

/// Whatever is read goes through our own form unchanged.
fn check_accepted(config: &ZeroConfig) {
    let text = serde_json::to_string(config).unwrap();
    assert_eq!(&serde_json::from_str::<ZeroConfig>(&text).unwrap(), config);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_replaced_value_is_read_or_named(index in any::<usize>(), value in any_value()) {
        let (mut full, path) = full_and_its_path(index);
        parent(&mut full, &path).insert(path.last().unwrap().clone(), value);
        match ZeroConfig::from_deepspeed_json(&full.to_string()) {
            Ok(config) => check_accepted(&config),
            Err(error) => {
                let error = fault(error);
                let said = error.path().expect("an error of one place");
                prop_assert!(said.starts_with(&path[0]), "{} is not at {}", error, path.join("."));
            }
        }
    }

    #[test]
    fn a_renamed_key_is_named_with_its_path(index in any::<usize>(), addition in "[a-zA-Z_]{1,3}") {
        let (mut full, path) = full_and_its_path(index);
        let (key, parents) = path.split_last().unwrap();
        let entries = parent(&mut full, &path);
        let renamed = format!("{key}{addition}");
        let value = entries.remove(key).unwrap();
        entries.insert(renamed.clone(), value);
        // The content of what is ignored, or is the program's, is not looked into.
        let others = ["activation_checkpointing", "flops_profiler", "amp", "fp16", "bf16", "optimizer", "scheduler"];
        prop_assume!(!others.contains(&path[0].as_str()) || parents.is_empty());
        let expected = [parents, &[renamed]].concat().join(".");
        let error = fault(ZeroConfig::from_deepspeed_json(&full.to_string()).unwrap_err());
        prop_assert_eq!(error.path(), Some(expected.as_str()));
        prop_assert!(error.to_string().contains("there is no such key; the nearest is `"), "{}", error);
    }

    #[test]
    fn a_removed_key_changes_nothing_else_or_is_named(index in any::<usize>()) {
        let (mut full, path) = full_and_its_path(index);
        parent(&mut full, &path).remove(path.last().unwrap());
        match ZeroConfig::from_deepspeed_json(&full.to_string()) {
            Ok(config) => {
                check_accepted(&config);
                // A section that is still there is still read.
                for key in ["optimizer", "scheduler"] {
                    prop_assert_eq!(full.get(key).is_some(), config.sections.contains_key(key), "{} without {}", key, path.join("."));
                }
            }
            Err(error) => {
                let error = fault(error);
                let said = error.path().expect("an error of one place");
                prop_assert!(said.starts_with(&path[0]), "{} is not at {}", error, path.join("."));
            }
        }
    }

    #[test]
    fn a_cut_file_is_no_json(end in 0..FULL.len() - 1) {
        let error = fault(ZeroConfig::from_deepspeed_json(&FULL[..end]).unwrap_err());
        let is_syntax = matches!(error, ConfigFault::Syntax(_));
        prop_assert!(is_syntax, "{}", error);
    }

    #[test]
    fn any_text_is_read_or_refused(text in ".{0,200}") {
        let _ = ZeroConfig::from_deepspeed_json(&text);
    }

    #[test]
    fn any_bytes_in_the_file_are_read_or_refused(at in 0..FULL.len(), byte in 0x20u8..0x7f) {
        let mut bytes = FULL.as_bytes().to_vec();
        bytes[at] = byte;
        if let Ok(config) = ZeroConfig::from_deepspeed_json(std::str::from_utf8(&bytes).unwrap()) {
            check_accepted(&config);
        }
    }
}

#[test]
fn deep_nesting_is_refused_without_using_up_the_stack() {
    for (open, close) in [("[", "]"), ("{\"fp16\":", "}")] {
        let text = format!("{}1{}", open.repeat(100_000), close.repeat(100_000));
        let error = fault(ZeroConfig::from_deepspeed_json(&text).unwrap_err());
        assert!(matches!(error, ConfigFault::Syntax(_)));
    }
}

#[test]
fn our_own_form_refuses_unknown_names_and_stages() {
    let read =
        |text: &str| serde_json::from_str::<ZeroConfig>(text).map_err(|error| error.to_string());
    assert_eq!(read("{}"), Ok(ZeroConfig::default()));
    assert!(read(r#"{"stages": 2}"#).unwrap_err().contains("stages"));
    assert!(
        read(r#"{"stage": 4}"#)
            .unwrap_err()
            .contains("there are 0, 1, 2 and 3")
    );
    check_accepted(&ZeroConfig::from_deepspeed_json(FULL).unwrap());
}
