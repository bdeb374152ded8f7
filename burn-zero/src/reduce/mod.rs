//! The reduction of gradients over ranks, bucket by bucket, overlapped with backward.

mod layout;
mod memory_tracker;
mod reducer;

pub(crate) use layout::{Layout, ParameterSpec, StepTag};
pub(crate) use reducer::{GradientReducer, Owner};
