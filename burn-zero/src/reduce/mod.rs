//! Gradients of all ranks becoming one: which rank gets which part, and who carries them while backward goes on.

mod exchange;
mod gauge;
mod layout;
mod moment;
mod reduced;
mod worker;

pub(crate) use exchange::{Arriving, Exchange, Timing};
pub(crate) use layout::{Layout, Parameter};
pub(crate) use moment::Moment;
pub(crate) use reduced::Reduced;
