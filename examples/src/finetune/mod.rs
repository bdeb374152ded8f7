//! Continues the training of a language model that others have published, on text of one's own.
//!
//! From the command to the report:
//!
//! - [`options`]: the command line, [`config`]: a DeepSpeed file that it names;
//! - [`text`]: tokens of the files, packed into sequences; [`chat`]: those of conversations;
//!   [`order`]: which an update reads;
//! - [`tuning`]: which parameters are trained, adapters among them;
//! - [`plan`]: the settings that fit into `--memory`;
//! - [`mod@train`]: the loop, with precision, optimizer and ranks from
//!   [`training`](crate::training) and the model from [`llm`](crate::llm);
//! - [`records`]: those that `--resume` goes on from;
//! - [`progress`], [`report`]: what it prints and writes.

pub mod chat;
pub mod config;
pub mod options;
pub mod order;
pub mod plan;
pub mod progress;
pub mod records;
pub mod report;
pub mod text;
pub mod train;
pub mod tuning;

use burn::prelude::Backend;
use burn_estimate::measure;

use crate::backend::OnBackend;
use crate::training::error::TrainingError;
use crate::training::precision::Training;
use options::Options;
use report::Report;

/// Trains on the backend that the options name, and reports where rank 0 is: nothing in the other
/// processes of a job.
///
/// # Errors
///
/// The model or the text cannot be read or do not fit each other, the backend is not compiled in,
/// or the [training](train::train) fails.
pub fn run(options: &Options) -> Result<Option<Report>, TrainingError> {
    options.memory.backend.run("finetune", Train(options))?
}

/// Rows and columns of the products that a device's speed is measured by.
const MEASURED_SIZE: usize = 1024;

struct Train<'a>(&'a Options);

impl OnBackend for Train<'_> {
    type Output = Result<Option<Report>, TrainingError>;

    fn run<B: Backend>(self, device: B::Device) -> Self::Output {
        let profile = || measure::<B>(&device, MEASURED_SIZE);
        train::train::<Training<B>>(self.0, device.clone(), profile)
    }
}
