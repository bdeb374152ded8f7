//! What the examples that train share: `gpt`, `finetune`, the benchmark.
//!
//! [`options`]: those of memory and speed; [`deepspeed`]: a file of them; [`precision`]: the backend, and mixed precision;
//! [`recompute`]: what becomes of activations; [`ranks`]: who trains; [`without_data`]: an update run for its memory alone;
//! [`plan`]: the settings of it that fit; [`settings`]: what a run began with; [`report`]: how
//! figures are shown; [`error`]: what can go wrong.

pub mod deepspeed;
pub mod error;
pub mod options;
pub mod plan;
pub mod precision;
pub mod ranks;
pub mod recompute;
pub mod report;
pub mod settings;
pub mod without_data;
