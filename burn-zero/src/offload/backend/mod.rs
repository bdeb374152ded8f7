//! Any of Burn's optimizers, on a backend of the host.

mod optimizer;
mod record;

pub use optimizer::{HostOffload, offload};
pub use record::HostRecord;
