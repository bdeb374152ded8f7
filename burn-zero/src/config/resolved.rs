//! A configuration that is ready to run.

use std::fmt;

use serde::Serialize;

use super::{
    BatchSizes, LossScaling, OptimizerConfig, OptimizerOffload, Precision, SchedulerConfig,
    ZeroConfig,
};

/// A [`ZeroConfig`] for a known number of ranks: all values checked, all batch sizes known. Its display is the report that
/// training prints at the start.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ResolvedConfig {
    /// The configuration.
    pub config: ZeroConfig,
    /// All batch sizes.
    pub batch: BatchSizes,
}

impl fmt::Display for ResolvedConfig {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, batch } = self;
        let BatchSizes {
            train,
            micro,
            steps,
            world_size,
        } = batch;
        let ranks = if *world_size == 1 { "rank" } else { "ranks" };
        writeln!(formatter, "{} over {world_size} {ranks}", config.stage)?;
        writeln!(
            formatter,
            "  batch              {train} = {micro} a micro-batch x {steps} accumulated x {world_size} {ranks}"
        )?;
        writeln!(formatter, "  precision          {}", config.precision)?;
        match config.gradient_clipping {
            None => writeln!(formatter, "  gradient clipping  none")?,
            Some(norm) => writeln!(formatter, "  gradient clipping  to a global norm of {norm}")?,
        }
        writeln!(
            formatter,
            "  optimizer state    {}",
            config.offload_optimizer
        )?;
        let settings = config.settings();
        let when = if config.stage.shards_gradients() {
            "during backward"
        } else {
            "in the step"
        };
        writeln!(
            formatter,
            "  communication      gradients {when}, in {}; {} elements a bucket",
            settings.communication_dtype, settings.bucket_elements
        )?;
        if let Some(optimizer) = &config.optimizer {
            writeln!(formatter, "  optimizer          {optimizer}")?;
        }
        if let Some(scheduler) = &config.scheduler {
            writeln!(formatter, "  learning rate      {scheduler}")?;
        }
        for ignored in &config.ignored {
            writeln!(
                formatter,
                "  ignored            {}: {}",
                ignored.path, ignored.reason
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => formatter.write_str("f32"),
            Self::Bf16 => formatter.write_str("bf16 under autocast, f32 parameters"),
            Self::F16(scaling) => {
                write!(formatter, "f16 under autocast, f32 parameters, {scaling}")
            }
        }
    }
}

impl fmt::Display for LossScaling {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed { scale } => write!(formatter, "losses times {scale}"),
            Self::Dynamic {
                initial_scale,
                window,
                hysteresis,
                min_scale,
            } => write!(
                formatter,
                "losses times {initial_scale} at first, doubled after {window} finite steps, halved at overflow {hysteresis}, \
                 at least {min_scale}"
            ),
        }
    }
}

impl fmt::Display for OptimizerOffload {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => formatter.write_str("on the device"),
            Self::Host { ratio } => {
                write!(formatter, "in host memory, {} % of it", ratio * 100.0)
            }
        }
    }
}

impl fmt::Display for OptimizerConfig {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Adam(params) => write!(formatter, "Adam {params:?}"),
            Self::AdamW(params) => write!(formatter, "AdamW {params:?}"),
            Self::Sgd(params) => write!(formatter, "SGD {params:?}"),
            Self::Adagrad(params) => write!(formatter, "Adagrad {params:?}"),
        }
    }
}

impl fmt::Display for SchedulerConfig {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{self:?}")
    }
}
