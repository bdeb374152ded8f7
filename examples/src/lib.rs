//! Whole trainings with the crates of this workspace, and the time and memory of their steps.

pub mod attend;
pub mod backend;
pub mod finetune;
pub mod first_kernel;
pub mod gpt;
pub mod llm;
pub mod memory_plot;
pub mod pools;
pub mod training;
