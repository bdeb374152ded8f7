//! Gradients of all ranks becoming one: which rank gets which part, and who carries them while backward goes on.

mod layout;
mod memory_tracker;
mod reduced;
mod reducer;
mod step_tag;
mod worker;

pub(crate) use layout::{Layout, Parameter};
pub(crate) use reduced::Reduced;
pub(crate) use reducer::{Arriving, GradientReducer, Timing};
pub(crate) use step_tag::StepTag;
