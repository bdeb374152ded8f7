//! AdamW with its state on the host, as an optimizer of modules.

mod device;
mod optimizer;
mod pipeline;
mod placement;
mod record;
mod state;

pub use optimizer::OffloadedAdamW;
pub use record::{EntryItem, OffloadRecord, Ranked, StateItem};
