//! The state of any of Burn's optimizers by names: a record taken apart into its tensors and the rest, and put together again.
//!
//! A record is a tree of maps in which parameters are known by ids, which differ between processes. `apart.rs` makes paths of
//! the ids and takes the tensors out, as pieces that any number of ranks can take their parts of; `together.rs` is the way
//! back, for any layout. `naming.rs` has the ids, `tensors.rs` tensors that came, `dtype.rs` their types in files.

mod apart;
mod bytes;
mod dtype;
mod naming;
mod tensors;
mod together;

use std::collections::HashMap;

use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::backend::Backend;
use ciborium::Value;
use serde_json::Value as Json;

use apart::Apart;
pub use bytes::tensor_bytes;
pub(crate) use dtype::{from_file, in_file, to_file};
pub(crate) use naming::Naming;
pub(crate) use tensors::{Loaded, Pieces, by_name};
use together::{Source, Together};

use crate::ZeroOptimizerError;
use crate::record::Piece;
use crate::reduce::Layout;

/// A record as Burn serializes it.
pub(crate) type Item<R, B> = <R as Record<B>>::Item<FullPrecisionSettings>;

/// The section of the optimizer's tensors, and that of windows that are not complete.
const OPTIMIZER: &str = "optimizer";
pub(crate) const WINDOW: &str = "window";

/// Marks a map whose keys are paths of parameters, and whose tensors are cut over ranks.
const PARAMETERS: &str = "$parameters";
/// Marks a map whose keys are paths of parameters, and whose tensors are this rank's alone.
const LOCAL: &str = "$local";
/// Marks the place of a tensor; holds its type.
const TENSOR: &str = "$tensor";

/// A record without its tensors, and the tensors: of each cut one the elements of this rank's shard, and all that are this
/// rank's alone.
///
/// # Errors
///
/// [`ZeroOptimizerError::State`].
pub(crate) fn take_apart<B: Backend, R: Record<B>>(
    record: R,
    layout: &Layout,
    naming: Naming,
) -> Result<(Json, Pieces), ZeroOptimizerError> {
    let item: Item<R, B> = record.into_item();
    let tree = Value::serialized(&item).map_err(refuse)?;
    drop(item);
    let mut apart = Apart::new(layout, naming);
    let tree = apart.walk(tree, None, &mut Vec::new())?;
    Ok((tree, apart.taken))
}

/// The pieces that a record of a layout takes, and their parameters. `local` has the shapes of tensors that are this rank's
/// alone, by names.
///
/// # Errors
///
/// [`ZeroOptimizerError::State`].
pub(crate) fn wanted(
    tree: &Json,
    layout: &Layout,
    naming: Naming,
    local: HashMap<String, Vec<usize>>,
) -> Result<Vec<(usize, Piece)>, ZeroOptimizerError> {
    let pieces = Vec::new();
    let mut together = Together::new(layout, naming, Source::Wanted { pieces, local });
    together.walk(tree, None, &mut Vec::new())?;
    Ok(together.into_wanted())
}

/// A record from its tensors, as far as a layout holds them, and the rest.
///
/// # Errors
///
/// [`ZeroOptimizerError::State`].
pub(crate) fn put_together<B: Backend, R: Record<B>>(
    tree: &Json,
    layout: &Layout,
    naming: Naming,
    tensors: HashMap<String, Loaded>,
    device: &B::Device,
) -> Result<R, ZeroOptimizerError> {
    let mut together = Together::new(layout, naming, Source::Loaded(tensors));
    let tree = together.walk(tree, None, &mut Vec::new())?;
    let item: Item<R, B> = tree.deserialized().map_err(refuse)?;
    Ok(R::from_item(item, device))
}

pub(crate) fn refuse(reason: impl ToString) -> ZeroOptimizerError {
    ZeroOptimizerError::State {
        reason: reason.to_string(),
    }
}
