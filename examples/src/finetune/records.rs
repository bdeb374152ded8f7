//! The records of a run, and going on from the last of them.

use std::path::PathBuf;

use burn::tensor::backend::AutodiffBackend;
use burn_zero::record::{Keep, TrainingState};
use burn_zero::{RankReduction, Recorder, Training};
use fs_err as fs;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::options::Options;
use super::text::Text;
use super::train::Tuned;
use crate::training::error::TrainingError;
use crate::training::ranks::Rank;
use crate::training::settings;

/// What is known of the updates that were made. `[updates]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// The loss on the held-out text before the first.
    pub valid_loss_before: f64,
    /// Of the tokens of each, before it.
    pub losses: Vec<f64>,
    /// Of each, before clipping; `None` where it was not finite, which f16 may do.
    pub gradient_norms: Vec<Option<f64>>,
    /// What each took.
    pub seconds: Vec<f64>,
    /// Of all updates and ranks.
    pub tokens: usize,
}

/// Where records are, and of what.
pub struct Records<'a> {
    options: &'a Options,
    recorder: Recorder,
}

impl<'a> Records<'a> {
    /// Of a prepared update.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Update`] before it is prepared.
    pub fn new(options: &'a Options, reduction: &RankReduction) -> Result<Self, TrainingError> {
        Ok(Self {
            options,
            recorder: reduction.recorder()?,
        })
    }

    /// The training after the updates of the last record.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Resume`] if there is none, or nothing is left to do;
    /// [`TrainingError::Record`] if it cannot be read or is of another model.
    pub fn load<B: AutodiffBackend>(
        &self,
        tuned: Tuned<B>,
        steps: usize,
    ) -> Result<(Tuned<B>, History), TrainingError> {
        let directory = directory(self.options);
        let place = directory.display();
        let training = Training {
            model: tuned.model,
            optimizer: tuned.update,
            scheduler: self.options.lr,
        };
        let (training, found) = self.recorder.load(&directory, None, training)?;
        let Some(found) = found else {
            return Err(TrainingError::Resume(format!(
                "there is no record in {place}; run with --save-every, without --resume, first"
            )));
        };
        if found.step as usize >= steps {
            return Err(TrainingError::Resume(format!(
                "all {steps} updates are in {place}"
            )));
        }
        let history = serde_json::from_value(Value::Object(found.user));
        let history = history.map_err(|error| {
            TrainingError::Resume(format!("{place} has no history of its updates: {error}"))
        })?;
        let tuned = Tuned {
            model: training.model,
            update: training.optimizer,
        };
        Ok((tuned, history))
    }

    /// Saves a record after an update, if one is due: the last two are kept.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Record`].
    pub fn save_if_due<B: AutodiffBackend>(
        &self,
        tuned: &Tuned<B>,
        history: &History,
    ) -> Result<(), TrainingError> {
        let updates = history.losses.len();
        let is_due = |every: usize| updates.is_multiple_of(every);
        if !self.options.save_every.is_some_and(is_due) {
            return Ok(());
        }
        let training = Training {
            model: &tuned.model,
            optimizer: &tuned.update,
            scheduler: &self.options.lr,
        };
        let user = match serde_json::to_value(history) {
            Ok(Value::Object(user)) => user,
            _ => Map::new(),
        };
        let state = TrainingState {
            user,
            ..TrainingState::at_step(updates as u64)
        };
        let directory = directory(self.options);
        self.recorder
            .save(&directory, training, state, Keep::default())?;
        Ok(())
    }
}

/// Prepares the directory of a new run, and removes an earlier one's records from it; or, to resume,
/// checks that the run there can go on with these settings.
///
/// # Errors
///
/// [`TrainingError::Io`], [`TrainingError::Resume`].
pub fn open(options: &Options, text: &Text, rank: &Rank) -> Result<(), TrainingError> {
    let now = settings(
        options,
        text,
        options.batch * options.accum * rank.world_size(),
    );
    if options.resume {
        let then = settings::begun(&options.output)?;
        return settings::check(&options.output, &then, &now);
    }
    if rank.rank() == 0 {
        let records = directory(options);
        if records.exists() {
            fs::remove_dir_all(records)?;
        }
        settings::begin(&options.output, &now)?;
    }
    Ok(())
}

fn directory(options: &Options) -> PathBuf {
    options.output.join("records")
}

/// What must stay the same. The number of sequences in an update must, but not how they fall into
/// micro-batches and ranks.
fn settings(options: &Options, text: &Text, update_sequences: usize) -> Value {
    let tokens = text.train.iter().flat_map(|sequence| &sequence.tokens);
    let hash = tokens.fold(0_u64, |state, token| {
        burn_decorator::split_mix::output(state, u64::from(*token))
    });
    json!({
        "--model": options.model,
        "--steps": options.steps,
        "--context": options.context,
        "--schedule": options.schedule,
        "--lr": options.lr,
        "--beta-1": options.beta_1,
        "--beta-2": options.beta_2,
        "--epsilon": options.epsilon,
        "--weight-decay": options.weight_decay,
        "--clip": options.clip,
        "--seed": options.seed,
        "--no-shuffle": options.no_shuffle,
        "what is trained": format!("{:?}", options.tuning),
        "sequences in an update": update_sequences,
        "sequences of the text": text.train.len(),
        "hash of the text": hash,
    })
}
