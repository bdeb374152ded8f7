//! Activation recomputation for Burn: a tensor that is not resident knows how to come back.

pub mod plan;
#[cfg(feature = "plot")]
pub mod plot;
pub mod trace;
