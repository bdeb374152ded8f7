//! Whole trainings with the crates of this workspace.

pub mod gpt;
