//! A GPT on real text, trained through Burn's `Learner` in the precision, and on the backend, that the command line says.
//!
//! From the command to the report:
//!
//! - [`options`]: the command line; [`plan`]: how its steps fall into epochs; [`error`]: what can go wrong;
//! - [`text`]: the bytes; [`windows`]: which of them are a batch; [`loader`]: batches from several threads, in order;
//! - [`model`]: the transformer; [`step`]: its loss, and what the Learner asks of it; [`schedule`]: the learning rate;
//! - [`precision`]: mixed precision, and [`accumulation`]: windows of micro-batches, which no other file knows about;
//! - [`run_dir`]: records, and going on from them; [`metric`], [`history`], [`progress`]: what one sees of a run;
//! - [`mod@train`]: all of it put together; [`sample`], [`report`]: what is left at the end.

pub mod accumulation;
pub mod error;
pub mod history;
pub mod loader;
pub mod metric;
pub mod model;
pub mod options;
pub mod plan;
pub mod precision;
pub mod progress;
pub mod report;
pub mod run_dir;
pub mod sample;
pub mod schedule;
pub mod step;
pub mod text;
pub mod train;
pub mod windows;

use burn::prelude::Backend;

use crate::backend::OnBackend;
use error::GptError;
use options::Options;
use precision::Training;
use report::Report;
use train::train;

/// Trains on the backend that the options name.
///
/// # Errors
///
/// The options contradict each other, the backend is not compiled in, or the [training](train()) fails.
pub fn run(options: &Options) -> Result<Report, GptError> {
    options.validate()?;
    options.backend.run("gpt", Train(options))?
}

struct Train<'a>(&'a Options);

impl OnBackend for Train<'_> {
    type Output = Result<Report, GptError>;

    fn run<B: Backend>(self, device: B::Device) -> Self::Output {
        train::<Training<B>>(self.0, device)
    }
}
