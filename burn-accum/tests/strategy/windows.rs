//! Updates in windows, and what their records say of them.

use burn::{optim::Optimizer, tensor::backend::AutodiffBackend};
use burn_accum::{AccumConfig, Accumulation, UpdateCounter};
use burn_update::Update;
use serde_json::Value;

use crate::{learner::Directory, model::Model};

/// An update, and the handle to the counters of its windows.
pub struct Windows<B: AutodiffBackend> {
    pub update: Update<Model<B>, B>,
    pub counter: UpdateCounter,
}

/// An update in windows.
pub fn in_windows<B: AutodiffBackend>(
    optimizer: impl Optimizer<Model<B>, B> + 'static,
    config: AccumConfig,
) -> Windows<B> {
    let windows = Accumulation::new(config).unwrap();
    let counter = windows.updates();
    let update = Update::new(optimizer).accumulate(windows).unwrap();
    Windows { update, counter }
}

/// A counter of the windows in an update's record.
pub fn recorded(directory: &Directory, epoch: usize, name: &str) -> Value {
    let (_, _, record) = directory.records(epoch);
    record["item"]["parts"]["accumulate"]["values"][name]["Integer"].clone()
}
