//! Saved training state of all ranks: each writes its part, any number of ranks reads it back.
//!
//! A *record* is saved training state. It holds *tensors*, named `section/path`, each cut into *pieces* of flat elements;
//! a *part* is the file of one rank with its pieces; the *manifest* says what is where. `docs/sharded-records.md`
//! describes the files.
//!
//! `save` and `load` are the two directions, `consolidate` makes one ordinary file, `inspect` lists. `entry`, `state` and
//! `manifest` are values; `part` writes a file and `parts` reads them; `layout` has the names, `agree` is how ranks fail
//! together, `storage` what a save does to the file system.

mod agree;
mod assemble;
mod consolidate;
mod entry;
mod error;
mod inspect;
mod layout;
mod load;
mod manifest;
mod part;
mod parts;
mod report;
mod save;
mod state;
mod storage;
#[cfg(test)]
mod tests;

pub(crate) use agree::{agree, split};
pub use consolidate::consolidate;
pub use entry::{Entry, Failure, Piece, TensorSpec};
pub use error::RecordError;
pub use inspect::{Completeness, RecordInfo, Records, inspect};
pub use load::{ShardedRecord, load_sharded};
pub use save::{Keep, Saved, save_sharded};
pub use state::TrainingState;

pub use safetensors::Dtype;
