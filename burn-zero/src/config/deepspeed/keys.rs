//! Every key of DeepSpeed 0.19's JSON, and what it means here.

use super::{
    json::Json,
    section::{
        Keys,
        Meaning::{Ignored, Read, Refused},
    },
};

const STAGE_3: &str = "of stage 3, as in DeepSpeed";
const LOGGING: &str = "logging: use the Learner's metrics and loggers";
const RECORDS: &str = "records are saved and loaded by this crate's own functions";
const WHOLE_BUCKETS: &str =
    "gradients are always reduced and parameters gathered in whole flat buckets";
const SUM_IN_F32: &str = "gradients are summed in f32 and divided once";
const BACKENDS_BUFFERS: &str = "transfers go through the backend's own buffers, and whether those are page-locked is its choice";
const TRANSFERS: &str = "AdamW's transfers and updates always overlap; those of an optimizer on the host's backend never do";
const SCHEDULES: &str = "the data pipeline is the program's own";

/// The object itself.
pub(super) const TOP: Keys = &[
    (
        "train_batch_size",
        Read("the items of an update over all ranks, such as 64"),
    ),
    (
        "train_micro_batch_size_per_gpu",
        Read("the items of a forward pass of one rank, such as 8"),
    ),
    (
        "gradient_accumulation_steps",
        Read("the micro-batches of an update, such as 1"),
    ),
    (
        "gradient_clipping",
        Read("the largest gradient norm, such as 1.0, or 0 for none"),
    ),
    ("fp16", Read("an object such as {\"enabled\": true}")),
    ("bf16", Read("an object such as {\"enabled\": true}")),
    ("bfloat16", Read("an object such as {\"enabled\": true}")),
    (
        "zero_optimization",
        Read("an object such as {\"stage\": 2}"),
    ),
    (
        "optimizer",
        Read(
            "an object such as {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-4}}, or leave it out",
        ),
    ),
    (
        "scheduler",
        Read("an object such as {\"type\": \"WarmupLR\", \"params\": {}}, or leave it out"),
    ),
    (
        "communication_data_type",
        Read("\"fp32\", \"bf16\" or \"fp16\", or leave it out"),
    ),
    (
        "zero_allow_untested_optimizer",
        Ignored("optimizers that cannot be sharded exactly are found by a trial, and refused"),
    ),
    (
        "zero_force_ds_cpu_optimizer",
        Ignored("AdamW is offloaded to HostAdamW, others to Burn's host backend"),
    ),
    (
        "activation_checkpointing",
        Ignored("checkpoints are scopes in the program: burn_checkpoint::checkpoint(..)"),
    ),
    ("prescale_gradients", Ignored(SUM_IN_F32)),
    ("gradient_predivide_factor", Ignored(SUM_IN_F32)),
    (
        "gradient_allreduce_op",
        Refused(
            is_not_sum,
            "gradients are averaged over ranks: scale the loss instead",
        ),
    ),
    ("sparse_gradients", Ignored("gradients are dense in Burn")),
    ("disable_allgather", Ignored(WHOLE_BUCKETS)),
    (
        "seq_parallel_comm_data_type",
        Ignored("there is no sequence parallelism"),
    ),
    ("steps_per_print", Ignored(LOGGING)),
    ("wall_clock_breakdown", Ignored(LOGGING)),
    ("memory_breakdown", Ignored(LOGGING)),
    ("dump_state", Ignored(LOGGING)),
    ("log_level", Ignored(LOGGING)),
    ("timers", Ignored(LOGGING)),
    ("comms_logger", Ignored(LOGGING)),
    ("flops_profiler", Ignored(LOGGING)),
    ("tensorboard", Ignored(LOGGING)),
    ("wandb", Ignored(LOGGING)),
    ("comet", Ignored(LOGGING)),
    ("csv_monitor", Ignored(LOGGING)),
    ("monitor_config", Ignored(LOGGING)),
    ("checkpoint", Ignored(RECORDS)),
    ("nebula", Ignored(RECORDS)),
    ("datastates_ckpt", Ignored(RECORDS)),
    ("aio", Ignored("nothing is offloaded to a disk")),
    (
        "autotuning",
        Ignored("nothing is tuned: see burn_zero::estimate and burn_accum::find_micro_batch"),
    ),
    ("compile", Ignored("Burn's backends compile by themselves")),
    (
        "graph_harvesting",
        Ignored("Burn's backends compile by themselves"),
    ),
    ("vocabulary_size", Ignored("DeepSpeed only warns about it")),
    (
        "managed_gradient_accumulation",
        Ignored("burn_accum::MultiSteps accumulates"),
    ),
    ("dataloader_drop_last", Ignored(SCHEDULES)),
    (
        "use_data_before_expert_parallelism",
        Ignored("there is no expert parallelism"),
    ),
    (
        "data_types",
        Refused(
            all_f32,
            "gradients accumulate, and parameters stay, in f32: remove it",
        ),
    ),
    (
        "amp",
        Refused(is_off, "NVIDIA's Apex: enable fp16 or bf16 instead"),
    ),
    (
        "torch_autocast",
        Refused(
            is_off,
            "enable fp16 or bf16 instead, which is autocast over f32 parameters here",
        ),
    ),
    (
        "elasticity",
        Refused(
            is_off,
            "the number of ranks is fixed while a job runs; its record loads at any other number",
        ),
    ),
    ("tensor_parallel", Refused(is_off, "ranks share data only")),
    ("expert_parallel", Refused(is_off, "ranks share data only")),
    (
        "sequence_parallel_size",
        Refused(is_one, "ranks share data only"),
    ),
    ("pipeline", Refused(is_off, "ranks share data only")),
    (
        "sparse_attention",
        Refused(is_off, "attention is the model's own"),
    ),
    (
        "progressive_layer_drop",
        Refused(is_off, "dropping layers is the model's own"),
    ),
    ("curriculum_learning", Refused(is_off, SCHEDULES)),
    ("data_efficiency", Refused(is_off, SCHEDULES)),
    ("compression_training", Refused(is_off, "train without it")),
    ("quantize_training", Refused(is_off, "train without it")),
    ("weight_quantization", Refused(is_off, "train without it")),
    ("eigenvalue", Refused(is_off, "train without it")),
    (
        "hybrid_engine",
        Refused(is_off, "there is no inference engine"),
    ),
];

/// `fp16`
pub(super) const FP16: Keys = &[
    ("enabled", Read("true or false")),
    ("loss_scale", Read("a fixed scale, or 0 for a moving one")),
    (
        "initial_scale_power",
        Read("the exponent of the first scale, such as 16"),
    ),
    (
        "loss_scale_window",
        Read("the finite steps before the scale doubles, such as 1000"),
    ),
    (
        "hysteresis",
        Read("the overflows before the scale halves, such as 2"),
    ),
    ("min_loss_scale", Read("the smallest scale, such as 1")),
    (
        "auto_cast",
        Ignored("inputs are cast by the operations that compute in f16"),
    ),
    (
        "fused_mode",
        Ignored("the optimizer is always fused where it can be"),
    ),
    (
        "consecutive_hysteresis",
        Refused(
            is_off,
            "the overflows are counted since the scale last grew: remove it",
        ),
    ),
    (
        "fp16_master_weights_and_grads",
        Refused(is_off, "master parameters and gradients are f32: remove it"),
    ),
];

/// `bf16`
pub(super) const BF16: Keys = &[
    ("enabled", Read("true or false")),
    (
        "immediate_grad_update",
        Ignored("gradients are f32 as soon as backward gives them out"),
    ),
    (
        "check_grad_overflow",
        Ignored("wrap the optimizer with burn_amp::GradScaler to skip non-finite gradients"),
    ),
    (
        "bf16_master_weights_and_grads",
        Refused(is_off, "master parameters and gradients are f32: remove it"),
    ),
    (
        "bf16_optimizer_states",
        Refused(is_off, "optimizer state is f32: remove it"),
    ),
];

/// `zero_optimization`
pub(super) const ZERO: Keys = &[
    ("stage", Read("0, 1 or 2")),
    (
        "reduce_bucket_size",
        Read("the elements of a bucket, such as 5e8"),
    ),
    (
        "allgather_bucket_size",
        Read("the elements of a bucket, such as 5e8"),
    ),
    (
        "overlap_comm",
        Ignored(
            "stage 2 always reduces gradients while backward goes on, the other stages do in the step",
        ),
    ),
    (
        "offload_optimizer",
        Read("an object such as {\"device\": \"cpu\"}"),
    ),
    (
        "cpu_offload",
        Read("true or false, or better offload_optimizer: {\"device\": \"cpu\"}"),
    ),
    ("offload_param", Ignored(STAGE_3)),
    ("cpu_offload_param", Ignored(STAGE_3)),
    ("cpu_offload_use_pin_memory", Ignored(BACKENDS_BUFFERS)),
    ("contiguous_gradients", Ignored(WHOLE_BUCKETS)),
    ("reduce_scatter", Ignored(WHOLE_BUCKETS)),
    ("use_multi_rank_bucket_allreduce", Ignored(WHOLE_BUCKETS)),
    ("allgather_partitions", Ignored(WHOLE_BUCKETS)),
    ("round_robin_gradients", Ignored(WHOLE_BUCKETS)),
    ("legacy_stage1", Ignored(WHOLE_BUCKETS)),
    ("load_from_fp32_weights", Ignored(RECORDS)),
    (
        "elastic_checkpoint",
        Ignored("records load at any number of ranks"),
    ),
    (
        "ignore_unused_parameters",
        Ignored("a parameter without a gradient takes part with zeros"),
    ),
    (
        "enable_sanity_checks",
        Ignored("collectives are always checked across ranks"),
    ),
    ("log_trace_cache_warnings", Ignored(LOGGING)),
    ("sub_group_size", Ignored(STAGE_3)),
    ("stage3_prefetch_bucket_size", Ignored(STAGE_3)),
    ("prefetch_bucket_size", Ignored(STAGE_3)),
    ("stage3_param_persistence_threshold", Ignored(STAGE_3)),
    ("param_persistence_threshold", Ignored(STAGE_3)),
    ("stage3_model_persistence_threshold", Ignored(STAGE_3)),
    ("model_persistence_threshold", Ignored(STAGE_3)),
    ("stage3_max_live_parameters", Ignored(STAGE_3)),
    ("max_live_parameters", Ignored(STAGE_3)),
    ("stage3_max_reuse_distance", Ignored(STAGE_3)),
    ("max_reuse_distance", Ignored(STAGE_3)),
    (
        "stage3_gather_16bit_weights_on_model_save",
        Ignored(STAGE_3),
    ),
    ("gather_16bit_weights_on_model_save", Ignored(STAGE_3)),
    ("stage3_gather_fp16_weights_on_model_save", Ignored(STAGE_3)),
    ("stage3_module_granularity_threshold", Ignored(STAGE_3)),
    ("module_granularity_threshold", Ignored(STAGE_3)),
    ("stage3_use_all_reduce_for_fetch_params", Ignored(STAGE_3)),
    ("use_all_reduce_for_fetch_params", Ignored(STAGE_3)),
    ("stage3_allgather_sequential", Ignored(STAGE_3)),
    ("allgather_sequential", Ignored(STAGE_3)),
    ("stage3_partition_stream_chunk_size", Ignored(STAGE_3)),
    ("partition_stream_chunk_size", Ignored(STAGE_3)),
    ("zero_hpz_partition_size", Ignored(STAGE_3)),
    ("zero_quantized_weights", Ignored(STAGE_3)),
    ("zero_quantized_nontrainable_weights", Ignored(STAGE_3)),
    ("mics_shard_size", Ignored(STAGE_3)),
    ("mics_hierarchical_params_gather", Ignored(STAGE_3)),
    ("memory_efficient_linear", Ignored(STAGE_3)),
    ("pipeline_loading_checkpoint", Ignored(STAGE_3)),
    ("override_module_apply", Ignored(STAGE_3)),
    ("save_muon_momentum_buffer_in_memory", Ignored(STAGE_3)),
    ("leaf_module", Ignored(STAGE_3)),
    (
        "zero_quantized_gradients",
        Refused(
            is_off,
            "set communication_data_type to bf16 to send half the bytes",
        ),
    ),
    (
        "zeropp_loco_param",
        Refused(
            is_off,
            "set communication_data_type to bf16 to send half the bytes",
        ),
    ),
    (
        "zenflow",
        Refused(is_off, "each step updates all parameters"),
    ),
];

/// `zero_optimization.offload_optimizer`
pub(super) const OFFLOAD: Keys = &[
    ("device", Read("\"none\" or \"cpu\"")),
    ("pin_memory", Ignored(BACKENDS_BUFFERS)),
    (
        "ratio",
        Read("the part of the state to offload, from 0 to 1"),
    ),
    ("nvme_path", Ignored("nothing is offloaded to a disk")),
    ("buffer_count", Ignored("nothing is offloaded to a disk")),
    ("pipeline", Ignored(TRANSFERS)),
    ("pipeline_read", Ignored(TRANSFERS)),
    ("pipeline_write", Ignored(TRANSFERS)),
    ("fast_init", Ignored("nothing is offloaded to a disk")),
    (
        "convert_grad_on_cpu",
        Ignored("low-precision gradients are widened within the update"),
    ),
    ("super_offload", Ignored(STAGE_3)),
    ("cpuadam_cores_perc", Ignored(STAGE_3)),
];

/// `optimizer` and `scheduler`
pub(super) const TYPED: Keys = &[
    ("type", Read("the name")),
    ("params", Read("an object")),
    (
        "legacy_fusion",
        Ignored("the optimizer is always fused where it can be"),
    ),
];

const FUSED: &str = "the optimizer is always fused where it can be";
const CLIPPING: &str = "set gradient_clipping instead";

/// `optimizer.params` of Adam and AdamW.
pub(super) const ADAM: Keys = &[
    ("lr", Read("the learning rate, such as 1e-4")),
    ("betas", Read("both decays, such as [0.9, 0.999]")),
    ("eps", Read("such as 1e-8")),
    ("weight_decay", Read("such as 0.01")),
    ("adam_w_mode", Read("true or false")),
    ("torch_adam", Ignored(FUSED)),
    ("fused", Ignored(FUSED)),
    ("foreach", Ignored(FUSED)),
    ("capturable", Ignored(FUSED)),
    (
        "fp32_optimizer_states",
        Refused(is_not_false, "optimizer state is f32: remove it"),
    ),
    (
        "bias_correction",
        Refused(is_not_false, "moments are always corrected: remove it"),
    ),
    (
        "amsgrad",
        Refused(
            is_off,
            "build the optimizer in the program and leave it out here",
        ),
    ),
    ("maximize", Refused(is_off, "negate the loss instead")),
    ("max_grad_norm", Refused(is_zero, CLIPPING)),
];

/// `optimizer.params` of SGD.
pub(super) const SGD: Keys = &[
    ("lr", Read("the learning rate, such as 0.1")),
    ("momentum", Read("such as 0.9")),
    ("dampening", Read("such as 0")),
    ("nesterov", Read("true or false")),
    ("weight_decay", Read("such as 1e-4")),
    ("fused", Ignored(FUSED)),
    ("foreach", Ignored(FUSED)),
    ("maximize", Refused(is_off, "negate the loss instead")),
    ("max_grad_norm", Refused(is_zero, CLIPPING)),
];

/// `optimizer.params` of Adagrad.
pub(super) const ADAGRAD: Keys = &[
    ("lr", Read("the learning rate, such as 0.01")),
    ("eps", Read("such as 1e-10")),
    ("weight_decay", Read("such as 0")),
    ("amsgrad", Ignored("Adagrad has none, as in DeepSpeed")),
    ("max_grad_norm", Refused(is_zero, CLIPPING)),
];

/// `scheduler.params` of WarmupLR and WarmupDecayLR.
pub(super) const WARMUP: Keys = &[
    ("warmup_min_lr", Read("the first learning rate, such as 0")),
    (
        "warmup_max_lr",
        Read("the highest learning rate, such as 1e-4"),
    ),
    (
        "warmup_num_steps",
        Read("the updates until it is reached, such as 1000"),
    ),
    ("warmup_type", Read("\"log\" or \"linear\"")),
    (
        "total_num_steps",
        Read("all updates of the training, such as 10000"),
    ),
    ("last_batch_iteration", Ignored(RECORDS)),
];

/// `scheduler.params` of WarmupCosineLR.
pub(super) const COSINE: Keys = &[
    (
        "warmup_min_ratio",
        Read("the first part of the learning rate, such as 0"),
    ),
    (
        "warmup_num_steps",
        Read("the updates until the whole of it, such as 1000"),
    ),
    ("warmup_type", Read("\"log\" or \"linear\"")),
    (
        "cos_min_ratio",
        Read("the last part of the learning rate, such as 0.0001"),
    ),
    (
        "total_num_steps",
        Read("all updates of the training, such as 10000"),
    ),
    ("last_batch_iteration", Ignored(RECORDS)),
];

fn is_off(value: &Json) -> bool {
    match value {
        Json::Null | Json::Bool(false) => true,
        Json::Object(entries) => {
            let enabled = entries.iter().find(|(key, _)| key == "enabled");
            enabled.map_or(entries.is_empty(), |(_, value)| is_off(value))
        }
        _ => false,
    }
}

fn is_not_false(value: &Json) -> bool {
    *value != Json::Bool(false)
}

fn is_zero(value: &Json) -> bool {
    matches!(value, Json::Null) || *value == Json::Number(0.0)
}

fn is_one(value: &Json) -> bool {
    matches!(value, Json::Null) || *value == Json::Number(1.0)
}

fn is_not_sum(value: &Json) -> bool {
    !matches!(value, Json::Text(text) if text.eq_ignore_ascii_case("sum"))
}

fn all_f32(value: &Json) -> bool {
    let f32 = |(_, value): &(String, Json)| match value {
        Json::Null => true,
        Json::Text(text) => text == "fp32",
        _ => false,
    };
    match value {
        Json::Null => true,
        Json::Object(entries) => entries.iter().all(f32),
        _ => false,
    }
}
