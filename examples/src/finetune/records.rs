//! The records of a run, and going on from the last of them.

use std::path::PathBuf;

use burn::tensor::backend::AutodiffBackend;
use burn_decorator::split_mix;
use burn_zero::record::{Keep, TrainingState};
use burn_zero::{RankReduction, Recorder, Training};
use fs_err as fs;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::options::Options;
use super::text::{Sequence, Text};
use super::train::Tuned;
use crate::llm::ADAPTER_SETTINGS;
use crate::training::error::TrainingError;
use crate::training::precision::Amp;
use crate::training::settings;

/// What is known of the updates that were made. `[updates]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// The loss on the held-out text before the first; `None` where it was not finite.
    pub valid_loss_before: Option<f64>,
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
    /// [`TrainingError::Resume`] if there is none; [`TrainingError::Record`] if it cannot be read or
    /// is of another model.
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
        if found.step as usize > steps {
            let (step, directory) = (found.step, place);
            return Err(TrainingError::Resume(format!(
                "the record in {directory} is of update {step}, after the last of {steps}"
            )));
        }
        let user = serde_json::from_value(Value::Object(found.user));
        let history = user.map_err(|error| {
            TrainingError::Resume(format!("{place} has no history of its updates: {error}"))
        })?;
        let tuned = Tuned {
            model: training.model,
            update: training.optimizer,
        };
        Ok((tuned, history))
    }

    /// Saves a record after an update, if one is due: the last two are kept. `history` is the same
    /// on all ranks.
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
        let Ok(Value::Object(user)) = serde_json::to_value(history) else {
            unreachable!("a struct of numbers is an object")
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

/// The settings that a run has from its begin to its end.
pub struct Settings<'a> {
    options: &'a Options,
    now: Value,
}

impl<'a> Settings<'a> {
    /// Of a run of so many updates, of so many sequences each. To resume, checks that the run in the
    /// output can go on with them; otherwise, that no records of another run are there. All ranks
    /// do so alike.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Io`], [`TrainingError::Options`], [`TrainingError::Resume`].
    pub fn checked(
        options: &'a Options,
        text: &Text,
        steps: usize,
        update_sequences: usize,
    ) -> Result<Self, TrainingError> {
        let now = settings(options, text, steps, update_sequences);
        if options.resume {
            let then = settings::begun(&options.output)?;
            settings::check(&options.output, &then, &now)?;
        } else {
            let records = directory(options);
            let has_records = fs::read_dir(&records).is_ok_and(|mut all| all.next().is_some());
            if has_records {
                return Err(TrainingError::Options(format!(
                    "{} has the records of an earlier run: --resume goes on from them; for a new run give another --output, or move them away",
                    records.display()
                )));
            }
        }
        Ok(Self { options, now })
    }

    /// Notes the settings of a new run; one rank does.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Io`].
    pub fn begin(&self) -> Result<(), TrainingError> {
        if self.options.resume {
            return Ok(());
        }
        settings::begin(&self.options.output, &self.now)
    }
}

fn directory(options: &Options) -> PathBuf {
    options.output.join("records")
}

/// What must stay the same. The number of sequences in an update must, but not how they fall into
/// micro-batches and ranks.
fn settings(options: &Options, text: &Text, steps: usize, update_sequences: usize) -> Value {
    let absolute = |path: &PathBuf| fs::canonicalize(path).unwrap_or_else(|_| path.clone());
    let adapter = options.tuning.adapter.as_ref().map(|adapter| {
        // Its scale and dropout are in no record.
        fs::read_to_string(adapter.join(ADAPTER_SETTINGS)).unwrap_or_default()
    });
    json!({
        "--model": absolute(&options.model).display().to_string(),
        "--steps": steps,
        "--context": options.context,
        "--packing": options.packing(),
        "--schedule": options.schedule,
        "--lr": options.lr,
        "--beta-1": options.beta_1,
        "--beta-2": options.beta_2,
        "--epsilon": options.epsilon,
        "--weight-decay": options.weight_decay,
        "--clip": options.clip,
        "--seed": options.seed,
        "--no-shuffle": options.no_shuffle,
        // The records of a run in f16 have a scale, those of others none.
        "--amp f16": options.memory.amp() == Amp::F16,
        "what is trained": format!("{:?}", options.tuning),
        "settings of the adapter": adapter,
        "sequences in an update": update_sequences,
        "sequences of the text": text.train.len(),
        "hash of the text": hash(&text.train),
        "hash of what is held out": hash(&text.valid),
    })
}

/// Of tokens, of where documents begin, and of what the loss has.
fn hash(sequences: &[Sequence]) -> u64 {
    sequences.iter().fold(0, |state, sequence| {
        let Sequence {
            tokens,
            boundaries,
            counted,
        } = sequence;
        let lengths = [tokens.len(), boundaries.len()].map(|length| length as u64);
        let tokens = tokens.iter().map(|token| u64::from(*token));
        let boundaries = boundaries.iter().map(|place| *place as u64);
        let counted = counted.iter().flatten().map(|counted| u64::from(*counted));
        let all = lengths.into_iter().chain(tokens).chain(boundaries);
        all.chain(counted).fold(state, split_mix::output)
    })
}
