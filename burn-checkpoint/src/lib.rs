//! Activation recomputation for Burn: a tensor that is not resident knows how to come back.

mod budget;
mod call;
mod context;
mod decorator;
mod error;
mod handle;
mod host;
mod kind;
mod ledger;
mod node;
mod op;
mod outputs;
mod policy;
mod recipe;
mod replay;
mod scope;
mod stats;
pub mod trace;
mod verify;

pub use decorator::Remat;
pub use error::RematError;
pub use handle::{Handle, Managed};
pub use op::{OpInfo, Work, op_table};
pub use outputs::Outputs;
pub use policy::{Fate, PerOperation, Policy};
pub use scope::{checkpoint, checkpoint_labelled, checkpoint_with};
pub use stats::RematStats;
pub use verify::Verify;

/// The kinds of tensors.
pub mod kinds {
    pub use crate::kind::{Bool, Float, Int, Kind, Quant, Value};
}
