//! AdamW with its state on the host, as an optimizer of modules.

mod device;
mod job;
mod optimizer;
mod pipeline;
mod placement;
mod record;
mod state;
mod step;

pub use optimizer::OffloadedAdamW;
pub use record::{EntryItem, OffloadRecord, Ranked, StateItem};
