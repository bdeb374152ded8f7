//! Saved training state of all ranks: each rank writes its shard, and any number of ranks reads it
//! back.
//!
//! A *record* is a directory with the state after one step. It holds *tensors*, named
//! `section/path`, each cut into *slices* of flat elements. A *rank file* is the safetensors file
//! with the slices of one rank; the *manifest* is the JSON file that lists which slice is in which
//! file. `docs/sharded-records.md` describes the files.
//!
//! `save` writes and `load` reads records. `entry` and `manifest` are values, `directory` has names
//! and file-system operations, `joint` makes an error of one rank an error of all. Each operation
//! of a save is logged before it is made, at the level trace.

mod directory;
mod entry;
mod joint;
mod load;
mod manifest;
mod save;

pub use crate::error::RecordFault;
pub(crate) use directory::run;
pub use entry::{Entry, Failure, TensorSlice, TensorSpec};
pub(crate) use joint::end;
pub use load::{ShardedRecord, consolidate, consolidate_as, load_sharded};
pub use manifest::TrainingState;
pub(crate) use manifest::unite;
pub use save::{Keep, Saved, save_sharded};

pub use safetensors::Dtype;

/// The section of the model's tensors.
pub(crate) const MODEL: &str = "model/";
