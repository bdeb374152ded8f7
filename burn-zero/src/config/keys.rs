//! The table of all keys of DeepSpeed 0.19.8's JSON, with their treatment here.

use serde_json::Value;

use Treatment::{Ignored, Read, ReadOrDefault, Refused, Section};

/// What is done with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Treatment {
    /// An object, with a table of its own.
    Section,
    /// Read, by this crate or by the program.
    Read,
    /// As `Read`, but `"auto"` is the default if the program does not fill it in.
    ReadOrDefault,
    /// Listed as ignored, with the reason.
    Ignored,
    /// An error, because it would change the training, unless its value has no effect.
    Refused(Harmless),
}

impl Treatment {
    /// Whether a value of the key changes the training.
    pub(super) fn has_effect(self, value: &Value) -> bool {
        match self {
            Section | Read | ReadOrDefault => true,
            Ignored => false,
            Refused(harmless) => !harmless.has(value),
        }
    }
}

/// The values of a refused key that have no effect; `null` always has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Harmless {
    /// 1.
    One,
    /// `false`, an empty object, or one whose `enabled` is `false`.
    Off,
    /// 0.
    Zero,
    /// `false`.
    No,
    /// `true`.
    Yes,
    /// An object whose values all are `"fp32"`.
    F32,
    /// Everything but `"sum"`.
    NotSum,
}

/// A key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) treatment: Treatment,
    /// Why it is ignored, or what to do instead.
    pub(super) reason: &'static str,
}

/// The keys of the section at `path`; none if there is no such section.
pub(super) fn keys(path: &str) -> impl Iterator<Item = Key> {
    let found = SECTIONS.iter().filter(move |section| section.path == path);
    found.flat_map(|section| section.lines).flat_map(Line::keys)
}

/// The key of this name in the section at `path`.
pub(super) fn key(path: &str, name: &str) -> Option<Key> {
    keys(path).find(|key| key.name == name)
}

impl Harmless {
    /// Whether a value of a refused key has no effect.
    pub(super) fn has(self, value: &Value) -> bool {
        match (self, value) {
            (Self::NotSum, value) => {
                let name = value.as_str();
                !name.is_some_and(|name| name.eq_ignore_ascii_case("sum"))
            }
            (_, Value::Null) => true,
            (Self::One, value) => *value == 1,
            (Self::Zero, value) => *value == 0,
            (Self::No, value) => *value == false,
            (Self::Yes, value) => *value == true,
            (Self::Off, Value::Bool(on)) => !on,
            (Self::Off, Value::Object(entries)) => match entries.get("enabled") {
                Some(enabled) => self.has(enabled),
                None => entries.is_empty(),
            },
            (Self::F32, Value::Object(entries)) => {
                let mut values = entries.values();
                values.all(|value| value.is_null() || *value == "fp32")
            }
            _ => false,
        }
    }
}

/// The table of a section.
struct SectionKeys {
    /// The path of its object.
    path: &'static str,
    lines: &'static [Line],
}

/// Keys with the same treatment for the same reason.
struct Line {
    treatment: Treatment,
    names: &'static [&'static str],
    reason: &'static str,
}

impl Line {
    const fn read(treatment: Treatment, names: &'static [&'static str]) -> Self {
        Self::new(treatment, names, "")
    }

    const fn new(
        treatment: Treatment,
        names: &'static [&'static str],
        reason: &'static str,
    ) -> Self {
        Self {
            treatment,
            names,
            reason,
        }
    }

    fn keys(&self) -> impl Iterator<Item = Key> {
        self.names.iter().map(|name| Key {
            name,
            treatment: self.treatment,
            reason: self.reason,
        })
    }
}

const SECTIONS: &[SectionKeys] = &[
    SectionKeys {
        path: "",
        lines: &[
            Line::read(Section, &["zero_optimization"]),
            Line::read(
                ReadOrDefault,
                &[
                    "train_batch_size",
                    "train_micro_batch_size_per_gpu",
                    "gradient_accumulation_steps",
                    "gradient_clipping",
                ],
            ),
            Line::read(
                Read,
                &[
                    "communication_data_type",
                    "fp16",
                    "bf16",
                    "bfloat16",
                    "optimizer",
                    "scheduler",
                ],
            ),
            Line::new(
                Ignored,
                &[
                    "steps_per_print",
                    "wall_clock_breakdown",
                    "memory_breakdown",
                    "dump_state",
                    "log_level",
                    "timers",
                    "comms_logger",
                    "flops_profiler",
                    "tensorboard",
                    "wandb",
                    "comet",
                    "csv_monitor",
                    "monitor_config",
                ],
                "logging: use the Learner's metrics and loggers",
            ),
            Line::new(
                Ignored,
                &["checkpoint", "nebula", "datastates_ckpt"],
                "records are saved and loaded by this crate's own functions",
            ),
            Line::new(
                Ignored,
                &["prescale_gradients", "gradient_predivide_factor"],
                "gradients are summed in f32 and divided once",
            ),
            Line::new(
                Ignored,
                &["disable_allgather"],
                "gradients are always reduced and parameters gathered in whole flat buckets",
            ),
            Line::new(
                Ignored,
                &["compile", "graph_harvesting"],
                "Burn's backends compile by themselves",
            ),
            Line::new(Ignored, &["aio"], "nothing is offloaded to a disk"),
            Line::new(
                Ignored,
                &["dataloader_drop_last"],
                "the data pipeline is the program's own",
            ),
            Line::new(
                Ignored,
                &["cuda_visible_devices"],
                "the program names its devices",
            ),
            Line::new(
                Ignored,
                &["sparse_gradients"],
                "gradients are dense in Burn",
            ),
            Line::new(
                Ignored,
                &["vocabulary_size"],
                "DeepSpeed only warns about it",
            ),
            Line::new(
                Ignored,
                &["managed_gradient_accumulation"],
                "burn-accum's `accumulate` part does it",
            ),
            Line::new(
                Ignored,
                &["use_data_before_expert_parallelism"],
                "there is no expert parallelism",
            ),
            Line::new(
                Ignored,
                &["seq_parallel_communication_data_type"],
                "there is no sequence parallelism",
            ),
            Line::new(
                Ignored,
                &["zero_allow_untested_optimizer"],
                "optimizers that cannot be sharded exactly are found by a trial, and refused",
            ),
            Line::new(
                Ignored,
                &["zero_force_ds_cpu_optimizer"],
                "the state of AdamW alone is kept in host memory, by OffloadedAdamW",
            ),
            Line::new(
                Ignored,
                &["activation_checkpointing"],
                "checkpoints are scopes in the program: burn_checkpoint::checkpoint(..)",
            ),
            Line::new(
                Ignored,
                &["autotuning"],
                "nothing is tuned: see burn_zero::estimate and burn_accum::find_micro_batch",
            ),
            Line::new(
                Refused(Harmless::NotSum),
                &["gradient_allreduce_op"],
                "gradients are averaged over ranks: scale the loss instead",
            ),
            Line::new(
                Refused(Harmless::F32),
                &["data_types"],
                "gradients accumulate, and parameters stay, in f32: remove it",
            ),
            Line::new(
                Refused(Harmless::Off),
                &["amp"],
                "NVIDIA's Apex: enable fp16 or bf16 instead",
            ),
            Line::new(
                Refused(Harmless::Off),
                &["torch_autocast"],
                "enable fp16 or bf16 instead, which is autocast over f32 parameters here",
            ),
            Line::new(
                Refused(Harmless::Off),
                &["elasticity"],
                "the number of ranks is fixed while a job runs; its record loads at any other number",
            ),
            Line::new(
                Refused(Harmless::Off),
                &["tensor_parallel", "expert_parallel", "pipeline"],
                "ranks share data only",
            ),
            Line::new(
                Refused(Harmless::One),
                &["sequence_parallel_size"],
                "ranks share data only",
            ),
            Line::new(
                Refused(Harmless::Off),
                &["sparse_attention"],
                "attention is the model's own",
            ),
            Line::new(
                Refused(Harmless::Off),
                &["progressive_layer_drop"],
                "dropping layers is the model's own",
            ),
            Line::new(
                Refused(Harmless::Off),
                &["curriculum_learning", "data_efficiency"],
                "the data pipeline is the program's own",
            ),
            Line::new(
                Refused(Harmless::Off),
                &[
                    "compression_training",
                    "quantize_training",
                    "weight_quantization",
                    "eigenvalue",
                ],
                "train without it",
            ),
            Line::new(
                Refused(Harmless::Off),
                &["hybrid_engine"],
                "there is no inference engine",
            ),
        ],
    },
    SectionKeys {
        path: "zero_optimization",
        lines: &[
            Line::read(Section, &["offload_optimizer", "offload_param"]),
            Line::read(Read, &["stage"]),
            Line::read(
                ReadOrDefault,
                &[
                    "reduce_bucket_size",
                    "allgather_bucket_size",
                    "cpu_offload",
                    "cpu_offload_param",
                ],
            ),
            Line::new(
                Ignored,
                &["stage3_prefetch_bucket_size", "prefetch_bucket_size"],
                "ranks gather one unit ahead, whatever its size",
            ),
            Line::new(
                Ignored,
                &[
                    "stage3_param_persistence_threshold",
                    "param_persistence_threshold",
                    "stage3_model_persistence_threshold",
                    "model_persistence_threshold",
                ],
                "a small parameter is gathered in the buckets of its unit, so it costs no collective of its own",
            ),
            Line::new(
                Ignored,
                &["stage3_max_live_parameters", "max_live_parameters"],
                "a rank holds the unit in use and the next one, whatever their size",
            ),
            Line::new(
                Ignored,
                &["stage3_max_reuse_distance", "max_reuse_distance"],
                "a unit is freed when another is used",
            ),
            Line::new(
                Ignored,
                &[
                    "stage3_module_granularity_threshold",
                    "module_granularity_threshold",
                    "leaf_module",
                ],
                "units are the repeated blocks of the module, by path",
            ),
            Line::new(
                Ignored,
                &["sub_group_size"],
                "AdamW on the host updates one parameter after the other",
            ),
            Line::new(
                Ignored,
                &[
                    "stage3_gather_16bit_weights_on_model_save",
                    "gather_16bit_weights_on_model_save",
                    "stage3_gather_fp16_weights_on_model_save",
                ],
                "Burn's records have whole parameters",
            ),
            Line::new(
                Ignored,
                &[
                    "stage3_use_all_reduce_for_fetch_params",
                    "use_all_reduce_for_fetch_params",
                    "stage3_allgather_sequential",
                    "allgather_sequential",
                    "stage3_partition_stream_chunk_size",
                    "partition_stream_chunk_size",
                    "zero_hpz_partition_size",
                    "mics_shard_size",
                    "mics_hierarchical_params_gather",
                ],
                "ranks gather a unit from all ranks",
            ),
            Line::new(
                Ignored,
                &[
                    "memory_efficient_linear",
                    "pipeline_loading_checkpoint",
                    "override_module_apply",
                    "save_muon_momentum_buffer_in_memory",
                ],
                "of PyTorch's modules",
            ),
            Line::new(
                Ignored,
                &["overlap_comm"],
                "stage 2 always reduces gradients while backward goes on, the other stages do in the step",
            ),
            Line::new(
                Ignored,
                &["cpu_offload_use_pin_memory"],
                "transfers go through the backend's own buffers, and whether those are page-locked is its choice",
            ),
            Line::new(
                Ignored,
                &[
                    "contiguous_gradients",
                    "reduce_scatter",
                    "use_multi_rank_bucket_allreduce",
                    "allgather_partitions",
                    "round_robin_gradients",
                    "legacy_stage1",
                ],
                "gradients are always reduced and parameters gathered in whole flat buckets",
            ),
            Line::new(
                Ignored,
                &["load_from_fp32_weights"],
                "records are saved and loaded by this crate's own functions",
            ),
            Line::new(
                Ignored,
                &["elastic_checkpoint"],
                "records load at any number of ranks",
            ),
            Line::new(
                Ignored,
                &["ignore_unused_parameters"],
                "a parameter without a gradient takes part with zeros",
            ),
            Line::new(
                Ignored,
                &["enable_sanity_checks"],
                "collectives are always checked across ranks",
            ),
            Line::new(
                Ignored,
                &["log_trace_cache_warnings"],
                "logging: use the Learner's metrics and loggers",
            ),
            Line::new(
                Refused(Harmless::Off),
                &[
                    "zero_quantized_weights",
                    "zero_quantized_nontrainable_weights",
                ],
                "under autocast parameters are gathered in the low type, in half the bytes",
            ),
            Line::new(
                Refused(Harmless::Off),
                &["zero_quantized_gradients", "zeropp_loco_param"],
                "set communication_data_type to bf16 to send half the bytes",
            ),
            Line::new(
                Refused(Harmless::Off),
                &["zenflow"],
                "each step updates all parameters",
            ),
        ],
    },
    SectionKeys {
        path: "fp16",
        lines: &[
            Line::read(
                Read,
                &[
                    "enabled",
                    "loss_scale",
                    "initial_scale_power",
                    "loss_scale_window",
                    "hysteresis",
                    "min_loss_scale",
                ],
            ),
            Line::new(
                Ignored,
                &["auto_cast"],
                "operations cast their inputs in any case",
            ),
            Line::new(
                Ignored,
                &["fused_mode"],
                "the optimizer is fused where it can be",
            ),
            Line::new(
                Refused(Harmless::No),
                &["consecutive_hysteresis"],
                "an overflow uses up hysteresis until the scale grows",
            ),
            Line::new(
                Refused(Harmless::No),
                &["fp16_master_weights_and_grads"],
                "parameters and gradients are f32",
            ),
        ],
    },
    SectionKeys {
        path: "bf16",
        lines: &[
            Line::read(Read, &["enabled"]),
            Line::new(
                Ignored,
                &["immediate_grad_update", "check_grad_overflow"],
                "gradients are f32 at once, and losses need no scale",
            ),
            Line::new(
                Refused(Harmless::No),
                &["bf16_master_weights_and_grads", "bf16_optimizer_states"],
                "parameters, gradients and the optimizer's state are f32",
            ),
        ],
    },
    SectionKeys {
        path: "optimizer",
        lines: &[
            Line::read(Read, &["type", "params"]),
            Line::new(
                Ignored,
                &["legacy_fusion"],
                "the optimizer is fused where it can be",
            ),
        ],
    },
    SectionKeys {
        path: "optimizer.params",
        lines: &[
            Line::read(
                Read,
                &[
                    "lr",
                    "betas",
                    "eps",
                    "weight_decay",
                    "adam_w_mode",
                    "torch_adam",
                ],
            ),
            Line::new(
                Ignored,
                &["fused", "foreach", "capturable"],
                "the optimizer is fused where it can be",
            ),
            Line::new(
                Refused(Harmless::Yes),
                &["bias_correction"],
                "moments are always corrected",
            ),
            Line::new(
                Refused(Harmless::Yes),
                &["fp32_optimizer_states"],
                "the optimizer's state is f32",
            ),
            Line::new(
                Refused(Harmless::No),
                &["amsgrad", "maximize"],
                "of PyTorch's AdamW",
            ),
            Line::new(
                Refused(Harmless::Zero),
                &["max_grad_norm"],
                "put it into gradient_clipping",
            ),
        ],
    },
    SectionKeys {
        path: "zero_optimization.offload_optimizer",
        lines: &[
            Line::read(ReadOrDefault, &["device"]),
            Line::new(
                Refused(Harmless::One),
                &["ratio"],
                "the state of all parameters is in host memory, or of none",
            ),
            Line::new(
                Ignored,
                &["pin_memory"],
                "transfers go through the backend's own buffers, and whether those are page-locked is its choice",
            ),
            Line::new(
                Ignored,
                &["nvme_path", "buffer_count", "fast_init"],
                "nothing is offloaded to a disk",
            ),
            Line::new(
                Ignored,
                &["pipeline", "pipeline_read", "pipeline_write"],
                "transfers and updates always overlap",
            ),
            Line::new(
                Ignored,
                &["convert_grad_on_cpu"],
                "low-precision gradients are widened within the update",
            ),
            Line::new(
                Ignored,
                &["super_offload", "cpuadam_cores_perc"],
                "of stage 3, as in DeepSpeed",
            ),
        ],
    },
    SectionKeys {
        path: "zero_optimization.offload_param",
        lines: &[
            Line::read(ReadOrDefault, &["device"]),
            Line::new(
                Ignored,
                &["pin_memory"],
                "transfers go through the backend's own buffers, and whether those are page-locked is its choice",
            ),
            Line::new(
                Ignored,
                &["nvme_path", "buffer_count", "buffer_size", "max_in_cpu"],
                "nothing is offloaded to a disk",
            ),
        ],
    },
];
