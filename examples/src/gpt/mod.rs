//! A GPT on real text, trained through Burn's `Learner` in the precision, and on the backend, that the command line says.
//!
//! From the command to the report:
//!
//! - [`options`]: the command line; [`job`]: the file of `--config`; [`settings`]: both; [`plan`]: how the steps fall into epochs;
//!   [`error`]: what can go wrong;
//! - [`text`]: the bytes; [`windows`]: which of them are a batch; [`loader`]: batches from several threads, in order;
//! - [`model`]: the transformer; [`step`]: its loss, and what the Learner asks of it; [`schedule`]: the learning rate; [`scheduler`]: DeepSpeed's;
//! - [`optimizer`]: the one that the settings name; [`placement`]: whole or sharded, on the device or on the host; [`held`]:
//!   what it came to hold; [`carry`]: from a run with its state in one place to one with it in another;
//! - [`precision`]: mixed precision, [`accumulation`]: windows of micro-batches, [`recompute`]: what becomes of activations,
//!   [`ranks`]: who trains: no other file knows about these, but for the scopes around the model's blocks;
//! - [`run_dir`]: records, and going on from them; [`metric`], [`history`], [`progress`]: what one sees of a run;
//! - [`mod@train`]: all of it put together; [`sample`], [`report`]: what is left at the end.

pub mod accumulation;
pub mod carry;
pub mod error;
pub mod held;
pub mod history;
pub mod job;
pub mod loader;
pub mod metric;
pub mod model;
pub mod optimizer;
pub mod options;
pub mod placement;
pub mod plan;
pub mod precision;
pub mod progress;
pub mod ranks;
pub mod recompute;
pub mod report;
pub mod run_dir;
pub mod sample;
pub mod schedule;
pub mod scheduler;
pub mod settings;
pub mod step;
pub mod text;
pub mod train;
pub mod windows;

use burn::prelude::Backend;

use crate::backend::OnBackend;
use error::GptError;
use options::Options;
use precision::Training;
use ranks::World;
use report::Report;
use settings::Settings;
use train::train;

/// Trains on the backend that the options name, and reports where rank 0 is: nothing in the other processes of a job.
///
/// # Errors
///
/// The options contradict each other or the file of `--config`, the backend is not compiled in, or the
/// [training](train()) fails.
pub fn run(options: &Options) -> Result<Option<Report>, GptError> {
    options.validate()?;
    let world = World::of(options)?;
    let settings = Settings::new(options, world.size())?;
    options.backend.run("gpt", Train(settings, world))?
}

struct Train(Settings, World);

impl OnBackend for Train {
    type Output = Result<Option<Report>, GptError>;

    fn run<B: Backend>(self, device: B::Device) -> Self::Output {
        train::<Training<B>>(self.0, self.1, device)
    }
}
