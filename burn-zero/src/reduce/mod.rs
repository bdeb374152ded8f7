//! The reduction of gradients over ranks, bucket by bucket, overlapped with backward.

mod landing;
mod layout;
mod memory_tracker;
mod reduced;
mod reducer;
mod step_tag;
mod sum;

pub(crate) use layout::{Layout, Parameter};
pub(crate) use reduced::Reduced;
pub(crate) use reducer::{Arriving, GradientReducer, Timing};
pub(crate) use step_tag::StepTag;
