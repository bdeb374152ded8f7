//! Whole trainings with the crates of this workspace, and what a step of one takes.

pub mod backend;
pub mod bench;
pub mod fit;
pub mod gpt;
pub mod pools;
