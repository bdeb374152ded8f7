//! Ranks: threads of this process, or processes that a launcher started.

use std::sync::Arc;

use burn::prelude::{Backend, DeviceOps};
use burn::tensor::backend::DeviceId;
use burn_ranks::{launched, local_rank};
use burn_zero::{GroupOptions, ProcessGroup, SingleRank, ThreadGroup};

use super::error::TrainingError;

/// One of the ranks: the group with its number in it.
pub type Rank = Arc<dyn ProcessGroup>;

/// Number of ranks: of the launcher, or else of `--ranks`, by default 1. `example` is the program.
///
/// # Errors
///
/// [`TrainingError::Options`] if both name a number and differ, or if this build does not support
/// the launcher's ranks.
pub fn number_of_ranks(option: Option<usize>, example: &str) -> Result<usize, TrainingError> {
    let Some(processes) = launched() else {
        return Ok(option.unwrap_or(1));
    };
    if !cfg!(feature = "mpi") {
        return Err(TrainingError::Options(format!(
            "a launcher started {processes} processes, but this build knows no MPI: build it with\n    \
             cargo build --release -p examples --features mpi --example {example}"
        )));
    }
    match option {
        Some(ranks) if ranks != processes => Err(TrainingError::Options(format!(
            "--ranks {ranks}, but the launcher started {processes} processes, which are the ranks: leave --ranks out"
        ))),
        _ => Ok(processes),
    }
}

/// Runs each rank of this process, and returns what rank 0 returns, if it is one of them.
///
/// # Errors
///
/// That of the first rank; [`TrainingError::Ranks`] where the ranks cannot go on together.
pub fn run_ranks<R: Send>(
    ranks: usize,
    rank: impl Fn(Rank) -> Result<Option<R>, TrainingError> + Sync,
) -> Result<Option<R>, TrainingError> {
    #[cfg(feature = "mpi")]
    if launched().is_some() {
        let options = GroupOptions::default();
        return burn_zero::MpiGroup::run(options, |group| rank(Arc::new(group.clone())));
    }
    if ranks == 1 {
        return rank(Arc::new(SingleRank::new()));
    }
    let results = ThreadGroup::spawn(ranks, GroupOptions::default(), |group| {
        let result = rank(Arc::new(group.clone()));
        result.inspect_err(|error| group.abort(&error.to_string()))
    })?;
    // An error of one rank reaches the others as an error of the group, with its message.
    let results = results.into_iter().collect::<Result<Vec<_>, _>>();
    results.map(|mut results| results.swap_remove(0))
}

/// The rank's device: ranks are assigned in turn to the devices of the same kind as `device`.
pub fn device_of<B: Backend>(rank: &Rank, device: &B::Device) -> B::Device {
    let id = device.to_id();
    match B::device_count(id.type_id) {
        0 | 1 => device.clone(),
        devices => {
            let turn = local_rank().unwrap_or(rank.rank()) % devices;
            <B::Device>::from_id(DeviceId::new(id.type_id, turn as u16))
        }
    }
}
