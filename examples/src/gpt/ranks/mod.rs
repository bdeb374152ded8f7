//! Ranks: threads of this process, or processes that a launcher started.

mod figures;

use std::sync::Arc;

use burn::prelude::{Backend, DeviceOps};
use burn::tensor::backend::DeviceId;
use burn_zero::group::{launched, local_rank};
use burn_zero::{Agree, GroupOptions, ProcessGroup, SingleRank, ThreadGroup};

use super::error::GptError;
use super::options::Options;

pub use figures::{Expected, RankFigures};

/// The ranks of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum World {
    /// This many threads of this process.
    Threads(usize),
    /// This many processes, of which this is one.
    Processes(usize),
}

impl World {
    /// The ranks of the launcher, or else of the options.
    ///
    /// # Errors
    ///
    /// [`GptError::Options`] if both name a number and differ, or if this build does not support the launcher's ranks.
    pub fn of(options: &Options) -> Result<Self, GptError> {
        let Some(processes) = launched() else {
            return Ok(Self::Threads(options.ranks.unwrap_or(1)));
        };
        if !cfg!(feature = "mpi") {
            return Err(GptError::Options(format!(
                "a launcher started {processes} processes, but this build knows no MPI: build it with\n    \
                 cargo build --release -p examples --features mpi --example gpt"
            )));
        }
        match options.ranks {
            Some(ranks) if ranks != processes => Err(GptError::Options(format!(
                "--ranks {ranks}, but the launcher started {processes} processes, which are the ranks: leave --ranks out"
            ))),
            _ => Ok(Self::Processes(processes)),
        }
    }

    /// Number of ranks.
    pub fn size(self) -> usize {
        match self {
            Self::Threads(ranks) | Self::Processes(ranks) => ranks,
        }
    }

    /// Runs each rank of this process, and returns what rank 0 returns, if it is one of them.
    ///
    /// # Errors
    ///
    /// The error of the first rank that has one of its own; [`GptError::Ranks`] where the ranks cannot go on together.
    pub fn run<R: Send>(
        self,
        rank: impl Fn(Rank) -> Result<Option<R>, GptError> + Sync,
    ) -> Result<Option<R>, GptError> {
        match self {
            Self::Threads(1) => rank(Rank(Arc::new(SingleRank::new()))),
            Self::Threads(ranks) => {
                let run = |group: ThreadGroup| {
                    let result = rank(Rank(Arc::new(group.clone())));
                    result.inspect_err(|error| group.abort(&error.to_string()))
                };
                let results = ThreadGroup::spawn(ranks, GroupOptions::default(), run)?;
                first_of(results)
            }
            Self::Processes(_) => run_process(rank),
        }
    }
}

#[cfg(feature = "mpi")]
fn run_process<R>(
    rank: impl Fn(Rank) -> Result<Option<R>, GptError>,
) -> Result<Option<R>, GptError> {
    burn_zero::MpiGroup::run(GroupOptions::default(), |group| {
        rank(Rank(Arc::new(group.clone())))
    })
}

#[cfg(not(feature = "mpi"))]
fn run_process<R>(_: impl Fn(Rank) -> Result<Option<R>, GptError>) -> Result<Option<R>, GptError> {
    unreachable!("without MPI no world is one of processes")
}

/// The error to report: an error of one rank reaches the others as an error of the group, so one of the former kind comes first.
fn first_of<R>(results: Vec<Result<Option<R>, GptError>>) -> Result<Option<R>, GptError> {
    let is_own = |result: &Result<_, GptError>| match result {
        Err(GptError::Ranks(burn_zero::ZeroError::Group(_))) | Ok(_) => false,
        Err(_) => true,
    };
    let own = results.iter().position(is_own);
    let failed = own.or_else(|| results.iter().position(Result::is_err));
    let mut results = results.into_iter();
    results.nth(failed.unwrap_or(0)).unwrap_or(Ok(None))
}

/// One of the ranks.
#[derive(Clone, Debug)]
pub struct Rank(Arc<dyn ProcessGroup>);

impl Rank {
    /// Whether this is rank 0, which prints and writes.
    pub fn is_first(&self) -> bool {
        self.0.rank() == 0
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.0.world_size()
    }

    /// The group that it is in.
    pub fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.0
    }

    /// Checks that all ranks have the same `text`.
    ///
    /// # Errors
    ///
    /// [`GptError::Ranks`].
    pub fn check_same(&self, what: &str, text: &str) -> Result<(), GptError> {
        Ok(self.0.agree_equal(what, text)?)
    }

    /// Returns the `number` of rank 0 on all ranks.
    ///
    /// # Errors
    ///
    /// [`GptError::Ranks`].
    pub fn number_of_first(&self, what: &str, number: usize) -> Result<usize, GptError> {
        Ok(self.0.gather_f64(what, number as f64)?[0] as usize)
    }

    /// The rank's device: ranks are assigned in turn to the devices of the same kind as `device`.
    pub fn device<B: Backend>(&self, device: &B::Device) -> B::Device {
        let id = device.to_id();
        match B::device_count(id.type_id) {
            0 | 1 => device.clone(),
            devices => {
                let turn = local_rank().unwrap_or(self.0.rank()) % devices;
                <B::Device>::from_id(DeviceId::new(id.type_id, turn as u16))
            }
        }
    }
}
