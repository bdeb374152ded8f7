//! The table of all keys of DeepSpeed 0.19.8's JSON, with their treatment here.

use serde_json::Value;

/// A line of the table, for one of its names.
pub(super) struct Key {
    pub(super) name: &'static str,
    /// - `section`: an object, with a table of its own;
    /// - `read`, by this crate or the program; `read or default`: `"auto"` is the default if the program does not fill it in;
    /// - `ignored`: listed as ignored;
    /// - `refused ..`: an error, because it would change the training, unless its value has no effect
    ///   ([`is_harmless`](Self::is_harmless)).
    pub(super) rule: &'static str,
    /// Why it is ignored, or what to do instead.
    pub(super) reason: &'static str,
}

/// The keys of a section; none if there is no such section.
pub(super) fn keys(section: &str) -> impl Iterator<Item = Key> {
    let sections = TABLE.split("\n[").filter_map(|text| text.split_once("]\n"));
    let found = sections.filter(move |(path, _)| *path == section);
    let lines = found.flat_map(|(_, lines)| lines.lines());
    let lines = lines.filter_map(|line| line.split_once(": "));
    lines.flat_map(|(rule, rest)| {
        let (names, reason) = rest.split_once(" | ").unwrap_or((rest, ""));
        names.split(' ').map(move |name| Key { name, rule, reason })
    })
}

impl Key {
    /// Whether a value of a refused key has no effect.
    pub(super) fn is_harmless(&self, value: &Value) -> bool {
        match (self.rule, value) {
            ("refused if sum", value) => !value
                .as_str()
                .is_some_and(|text| text.eq_ignore_ascii_case("sum")),
            (_, Value::Null) => true,
            ("refused unless 1", value) => *value == 1,
            ("refused unless off", Value::Bool(on)) => !on,
            ("refused unless off", Value::Object(entries)) => match entries.get("enabled") {
                Some(enabled) => self.is_harmless(enabled),
                None => entries.is_empty(),
            },
            ("refused unless f32", Value::Object(entries)) => {
                let mut values = entries.values();
                values.all(|value| value.is_null() || *value == "fp32")
            }
            _ => false,
        }
    }
}

/// Sections by the paths of their objects. A line has a rule, the names and the reason.
const TABLE: &str = "
[]
section: zero_optimization
read or default: train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
read: communication_data_type fp16 bf16 bfloat16 optimizer scheduler
ignored: steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level timers comms_logger flops_profiler tensorboard wandb comet \
    csv_monitor monitor_config | logging: use the Learner's metrics and loggers
ignored: checkpoint nebula datastates_ckpt | records are saved and loaded by this crate's own functions
ignored: prescale_gradients gradient_predivide_factor | gradients are summed in f32 and divided once
ignored: disable_allgather | gradients are always reduced and parameters gathered in whole flat buckets
ignored: compile graph_harvesting | Burn's backends compile by themselves
ignored: aio | nothing is offloaded to a disk
ignored: dataloader_drop_last | the data pipeline is the program's own
ignored: cuda_visible_devices | the program names its devices
ignored: sparse_gradients | gradients are dense in Burn
ignored: vocabulary_size | DeepSpeed only warns about it
ignored: managed_gradient_accumulation | burn_accum::MultiSteps accumulates
ignored: use_data_before_expert_parallelism | there is no expert parallelism
ignored: seq_parallel_communication_data_type | there is no sequence parallelism
ignored: zero_allow_untested_optimizer | optimizers that cannot be sharded exactly are found by a trial, and refused
ignored: zero_force_ds_cpu_optimizer | the state of AdamW alone is kept in host memory, by OffloadedAdamW
ignored: activation_checkpointing | checkpoints are scopes in the program: burn_checkpoint::checkpoint(..)
ignored: autotuning | nothing is tuned: see burn_zero::estimate and burn_accum::find_micro_batch
refused if sum: gradient_allreduce_op | gradients are averaged over ranks: scale the loss instead
refused unless f32: data_types | gradients accumulate, and parameters stay, in f32: remove it
refused unless off: amp | NVIDIA's Apex: enable fp16 or bf16 instead
refused unless off: torch_autocast | enable fp16 or bf16 instead, which is autocast over f32 parameters here
refused unless off: elasticity | the number of ranks is fixed while a job runs; its record loads at any other number
refused unless off: tensor_parallel expert_parallel pipeline | ranks share data only
refused unless 1: sequence_parallel_size | ranks share data only
refused unless off: sparse_attention | attention is the model's own
refused unless off: progressive_layer_drop | dropping layers is the model's own
refused unless off: curriculum_learning data_efficiency | the data pipeline is the program's own
refused unless off: compression_training quantize_training weight_quantization eigenvalue | train without it
refused unless off: hybrid_engine | there is no inference engine
[zero_optimization]
section: offload_optimizer offload_param
read: stage
read or default: reduce_bucket_size allgather_bucket_size cpu_offload cpu_offload_param
ignored: stage3_prefetch_bucket_size prefetch_bucket_size | ranks gather one unit ahead, whatever its size
ignored: stage3_param_persistence_threshold param_persistence_threshold stage3_model_persistence_threshold model_persistence_threshold | a small \
    parameter is gathered in the buckets of its unit, so it costs no collective of its own
ignored: stage3_max_live_parameters max_live_parameters | a rank holds the unit in use and the next one, whatever their size
ignored: stage3_max_reuse_distance max_reuse_distance | a unit is freed when another is used
ignored: stage3_module_granularity_threshold module_granularity_threshold leaf_module | units are the repeated blocks of the module, by path
ignored: sub_group_size | AdamW on the host updates one parameter after the other
ignored: stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save | Burn's records \
    have whole parameters
ignored: stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params stage3_allgather_sequential allgather_sequential \
    stage3_partition_stream_chunk_size partition_stream_chunk_size zero_hpz_partition_size mics_shard_size \
    mics_hierarchical_params_gather | ranks gather a unit from all ranks
ignored: memory_efficient_linear pipeline_loading_checkpoint override_module_apply save_muon_momentum_buffer_in_memory | of PyTorch's modules
ignored: overlap_comm | stage 2 always reduces gradients while backward goes on, the other stages do in the step
ignored: cpu_offload_use_pin_memory | transfers go through the backend's own buffers, and whether those are page-locked is its choice
ignored: contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions round_robin_gradients legacy_stage1 | gradients are \
    always reduced and parameters gathered in whole flat buckets
ignored: load_from_fp32_weights | records are saved and loaded by this crate's own functions
ignored: elastic_checkpoint | records load at any number of ranks
ignored: ignore_unused_parameters | a parameter without a gradient takes part with zeros
ignored: enable_sanity_checks | collectives are always checked across ranks
ignored: log_trace_cache_warnings | logging: use the Learner's metrics and loggers
refused unless off: zero_quantized_weights zero_quantized_nontrainable_weights | under autocast parameters are gathered in the low type, in half the bytes
refused unless off: zero_quantized_gradients zeropp_loco_param | set communication_data_type to bf16 to send half the bytes
refused unless off: zenflow | each step updates all parameters
[zero_optimization.offload_optimizer]
read or default: device
refused unless 1: ratio | the state of all parameters is in host memory, or of none
ignored: pin_memory | transfers go through the backend's own buffers, and whether those are page-locked is its choice
ignored: nvme_path buffer_count fast_init | nothing is offloaded to a disk
ignored: pipeline pipeline_read pipeline_write | transfers and updates always overlap
ignored: convert_grad_on_cpu | low-precision gradients are widened within the update
ignored: super_offload cpuadam_cores_perc | of stage 3, as in DeepSpeed
[zero_optimization.offload_param]
read or default: device
ignored: pin_memory | transfers go through the backend's own buffers, and whether those are page-locked is its choice
ignored: nvme_path buffer_count buffer_size max_in_cpu | nothing is offloaded to a disk
";
