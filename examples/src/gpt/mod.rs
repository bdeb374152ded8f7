//! A GPT on real text, trained through Burn's `Learner` in the precision, and on the backend, that
//! the command line says.
//!
//! From the command to the report:
//!
//! - [`options`]: the command line; [`job`]: with the file of `--config`;
//! - [`text`]: the bytes; [`loader`]: batches of them;
//! - [`model`]: the transformer; [`step`]: its loss, and what the Learner asks of it;
//! - [`rehearsal`]: the largest micro-batch that fits, the memory of a step;
//! - [`mod@train`]: all of it put together in the Learner, with precision, optimizer and ranks from
//!   [`training`](crate::training); [`resume`]: its records, [`log`]: its metrics; [`sample`],
//!   [`report`]: the end.

pub mod job;
pub mod loader;
pub mod log;
pub mod model;
pub mod options;
pub mod rehearsal;
pub mod report;
pub mod resume;
pub mod sample;
pub mod step;
pub mod text;
pub mod train;

use burn::prelude::Backend;

use crate::backend::OnBackend;
use crate::training::error::TrainingError;
use crate::training::precision::Training;
use crate::training::ranks::number_of_ranks;
use job::Job;
use options::Options;
use report::Report;

/// Trains on the backend that the options name, and reports where rank 0 is: nothing in the other
/// processes of a job.
///
/// # Errors
///
/// The options contradict each other or the file of `--config`, the backend is not compiled in, or
/// the [training](train::train) fails.
pub fn run(options: &Options) -> Result<Option<Report>, TrainingError> {
    options.validate()?;
    let job = Job::new(options, number_of_ranks(options.memory.ranks, "gpt")?)?;
    options.memory.backend.run("gpt", Train(options, job))?
}

struct Train<'a>(&'a Options, Job);

impl OnBackend for Train<'_> {
    type Output = Result<Option<Report>, TrainingError>;

    fn run<B: Backend>(self, device: B::Device) -> Self::Output {
        train::train::<Training<B>>(self.0, self.1, device)
    }
}
