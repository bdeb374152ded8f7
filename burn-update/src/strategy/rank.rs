//! One rank's training: Burn's loop over epochs, or over intervals of updates, with the same
//! decisions on all ranks.

use std::sync::Arc;

use burn::data::dataloader::{DataLoaderIterator, Progress};
use burn::tensor::Device;
use burn::tensor::backend::{Backend, DeviceOps};
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, Interrupter, Learner, LearnerEvent,
    LearningCheckpointer, LearningComponentsTypes, SupervisedTrainingEventProcessor, TrainLoader,
    TrainingBackend, TrainingModel, ValidLoader,
};
use burn_decorator::split_mix;
use burn_ranks::{ProcessGroup, finish_first};
use parking_lot::Mutex;

use super::driver::{Counting, Driver, EpochTail, Position, RankDriver, WriteRecord};
use super::items::Items;
use super::pace::Pace;
use super::status::StepStatus;
use super::stretch::{Ended, Stretch};
use super::{TrainInput, TrainItem, TrainMetrics, ValidItem};
use crate::UpdateError;

/// The state of a rank's training.
pub(super) struct Rank<LC: LearningComponentsTypes> {
    pub(super) group: Arc<dyn ProcessGroup>,
    pub(super) device: Device<TrainingBackend<LC>>,
    pub(super) learner: Learner<LC>,
    /// This rank's part of the training data.
    pub(super) train: TrainLoader<LC>,
    /// All of the data, of which each rank validates its share.
    pub(super) valid: ValidLoader<LC>,
    pub(super) train_items: Items<TrainItem<LC>>,
    pub(super) valid_items: Items<ValidItem<LC>>,
    pub(super) run: Run<LC>,
    /// On rank 0 only.
    pub(super) rank_0: Option<Rank0<LC>>,
    /// Where the next batch is.
    pub(super) position: Position,
    /// Since this training began or was resumed.
    pub(super) steps: u64,
}

/// What is the same on all ranks.
pub(super) struct Run<LC: LearningComponentsTypes> {
    pub(super) driver: Arc<dyn Driver<LC>>,
    pub(super) interrupter: Interrupter,
    pub(super) store: Arc<EventStoreClient>,
    /// The number of the first validation and record: Burn's epoch.
    pub(super) first: usize,
    /// The last epoch, unless the training ends by updates.
    pub(super) last_epoch: usize,
    pub(super) counting: Counting,
    pub(super) tail: EpochTail,
    /// Of the backend's generator, if each step draws numbers of its own.
    pub(super) seed: Option<u64>,
    /// What rank 0 measures.
    pub(super) pace: Pace,
    /// Of the training data, as a text to compare; empty for a loader of Burn's.
    pub(super) order: Arc<str>,
    /// Whether the loader begins with the epoch that a training is resumed in.
    pub(super) begins_at_epoch: bool,
    /// Where in its data the training is resumed, if the record says it.
    pub(super) resumed_at: Option<Position>,
    pub(super) train_metrics: TrainMetrics,
}

impl<LC: LearningComponentsTypes> Clone for Run<LC> {
    fn clone(&self) -> Self {
        Self {
            driver: self.driver.clone(),
            interrupter: self.interrupter.clone(),
            store: self.store.clone(),
            pace: self.pace.clone(),
            order: self.order.clone(),
            ..*self
        }
    }
}

/// Rank 0's renderer, loggers, records and early stopping.
pub(super) struct Rank0<LC: LearningComponentsTypes> {
    pub(super) processor: SupervisedTrainingEventProcessor<LC>,
    pub(super) checkpoints: Option<Checkpoints<LC>>,
    pub(super) early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
}

/// The batches of an epoch of a rank's part.
pub(super) type Batches<'a, LC> = dyn DataLoaderIterator<TrainInput<LC>> + 'a;

/// The result of a training.
pub(super) type Trained<LC> = (
    TrainingModel<LC>,
    Option<SupervisedTrainingEventProcessor<LC>>,
);

impl<LC: LearningComponentsTypes + 'static> Rank<LC> {
    /// What the loop asks of its Learner's optimizer.
    pub(super) fn driver(&self) -> Box<dyn RankDriver<LC>> {
        let (group, device) = (self.group.clone(), self.device.clone());
        self.run.driver.of_rank(group, device)
    }

    /// # Errors
    ///
    /// Those of the strategy, of the optimizer and of the group.
    #[expect(clippy::boxed_local, reason = "a model is large by value")]
    pub(super) fn run(
        mut self: Box<Self>,
        driver: &dyn RankDriver<LC>,
    ) -> Result<Trained<LC>, UpdateError> {
        self.train = self.train.to_device(&self.device);
        self.valid = self.valid.to_device(self.device.inner());
        let items = self.check()?;
        self.train_all(driver, items)?;
        let model = self.learner.model();
        Ok((model, self.rank_0.map(|rank_0| rank_0.processor)))
    }

    /// Prepares the model and trains to the end.
    ///
    /// ```text
    /// for each epoch:                        # a pass over the data
    ///     until the data ends:
    ///         train: to the end of the data, or of an interval of updates
    ///         the data has ended: apply an open window
    ///         an interval has ended, or, without intervals, the data: validate, record, stop early
    /// ```
    fn train_all(&mut self, driver: &dyn RankDriver<LC>, items: usize) -> Result<(), UpdateError> {
        driver.prepare(&mut self.learner)?;
        let mut stretch = Stretch::new(self.run.first, self.updates(driver));
        let mut goes_on = !self.is_over(driver);
        let loader = self.train.clone();
        self.skip_epochs(&loader);
        while goes_on {
            let mut batches = loader.iter();
            self.skip_batches(&mut *batches)?;
            while goes_on {
                let ended = self.train(driver, &mut *batches, &mut stretch, items)?;
                if ended != Ended::Interval {
                    self.end_data(driver, ended)?;
                }
                driver.set_position(self.position);
                goes_on = ended != Ended::Interrupted && !self.is_over(driver);
                if self.is_closed(driver, &stretch, ended) {
                    goes_on &= self.close(driver, &stretch)?;
                    stretch = Stretch::new(stretch.number + 1, self.updates(driver));
                }
                if ended == Ended::Data {
                    break;
                }
            }
        }
        if self.run.tail == EpochTail::Carry && self.steps > 0 {
            driver.flush(&mut self.learner);
        }
        driver.finish(&mut self.learner)
    }

    /// The data of an epoch has ended, or the training is interrupted: applies an open window. The
    /// next batch is the first one of the next epoch.
    ///
    /// # Errors
    ///
    /// [`UpdateError::Strategy`] if the training is to end by updates, and there is nothing to make
    /// one of.
    fn end_data(&mut self, driver: &dyn RankDriver<LC>, ended: Ended) -> Result<(), UpdateError> {
        // Without a step there is no learning rate either.
        if self.run.tail == EpochTail::Apply && self.steps > 0 {
            driver.flush(&mut self.learner);
        }
        if ended == Ended::Data {
            if let (Some(until), 0) = (self.run.counting.until, self.position.batches) {
                return Err(UpdateError::Strategy(format!(
                    "the training is to make {until} updates, but a rank has no batch of the data: check the loader"
                )));
            }
            self.position = Position::epoch(self.position.epoch + 1);
        }
        Ok(())
    }

    /// Whether the epoch ends here, or the interval of updates that is in its place: with the update
    /// that ends an epoch it may, and with the last epoch it does, unless it has just ended.
    fn is_closed(&self, driver: &dyn RankDriver<LC>, stretch: &Stretch, ended: Ended) -> bool {
        let is_by_updates = self.run.counting.interval.is_some();
        // The record was made with the last batch of an epoch, which was closed then.
        let is_resumed = self.run.resumed_at.is_some_and(|at| at.batches > 0);
        match ended {
            Ended::Data if is_resumed && self.steps == 0 => false,
            Ended::Data if is_by_updates => {
                stretch.steps > 0 && (self.is_over(driver) || self.is_due(driver, stretch))
            }
            _ => true,
        }
    }

    /// Whether the training has reached its last update or its last epoch.
    fn is_over(&self, driver: &dyn RankDriver<LC>) -> bool {
        match self.run.counting.until {
            Some(until) => self.updates(driver) >= until,
            None => self.position.epoch > self.run.last_epoch,
        }
    }

    /// Whether the training, or an interval, ends with the last update.
    pub(super) fn is_due(&self, driver: &dyn RankDriver<LC>, stretch: &Stretch) -> bool {
        let Counting { until, interval } = self.run.counting;
        if until.is_none() && interval.is_none() {
            return false;
        }
        let updates = self.updates(driver);
        let made = updates.saturating_sub(stretch.updates_before);
        until.is_some_and(|until| updates >= until)
            || interval.is_some_and(|interval| made >= interval.get())
    }

    /// Updates since the training began.
    pub(super) fn updates(&self, driver: &dyn RankDriver<LC>) -> u64 {
        driver.updates().unwrap_or(self.steps)
    }

    /// Ends an epoch, or an interval that takes its place. Returns whether the training goes on.
    fn close(
        &mut self,
        driver: &dyn RankDriver<LC>,
        stretch: &Stretch,
    ) -> Result<bool, UpdateError> {
        let number = stretch.number;
        if let Some(rank_0) = &mut self.rank_0 {
            let end = LearnerEvent::EndEpoch(number);
            rank_0.processor.process_train(end);
        }
        // The same model is validated, recorded and returned.
        driver.share_statistics(&mut self.learner)?;
        let status = StepStatus::default().interrupted(&self.run.interrupter);
        let all = self.exchange(status, "end of the epoch")?;
        if self.is_interrupted(&all) {
            let reason = self.run.interrupter.get_message();
            let reason = reason.as_deref().unwrap_or("Reason unknown");
            log::info!("Training interrupted: {reason}");
            return Ok(false);
        }
        let progress = self.progress(driver, stretch);
        self.validate(&progress, driver)?;
        self.save(number, driver)?;
        Ok(!self.stops_early(number)?)
    }

    /// The number of the epoch or interval, of as many as there will be: where only updates say
    /// when the training ends, an estimate.
    pub(super) fn progress(&self, driver: &dyn RankDriver<LC>, stretch: &Stretch) -> Progress {
        let number = stretch.number;
        let Counting { until, interval } = self.run.counting;
        let total = match (until, interval) {
            (None, None) => self.run.last_epoch,
            (Some(until), Some(interval)) => until.div_ceil(interval.get()) as usize,
            (Some(until), None) => {
                let made = self.updates(driver).max(1);
                (number as u64 * until).div_ceil(made) as usize
            }
            (None, Some(_)) => {
                let epoch = self.position.epoch.min(self.run.last_epoch).max(1);
                (number * self.run.last_epoch).div_ceil(epoch)
            }
        };
        let total = match (until, interval) {
            (None, None) => total,
            _ => total.max(number),
        };
        Progress::new(number, total)
    }

    /// Begins as many epochs of the data as were trained on, so that a loader that shuffles goes on
    /// with the order of the epoch that the training is resumed in.
    fn skip_epochs(&self, loader: &TrainLoader<LC>) {
        let Some(resumed_at) = self.run.resumed_at.filter(|_| !self.run.begins_at_epoch) else {
            return;
        };
        for _ in 1..resumed_at.epoch {
            // A loader with a worker draws the order when the worker begins.
            drop(loader.iter().next());
        }
    }

    /// Leaves out the batches of this epoch that were trained on.
    ///
    /// # Errors
    ///
    /// [`UpdateError::Strategy`] if there are fewer.
    fn skip_batches(&self, batches: &mut Batches<'_, LC>) -> Result<(), UpdateError> {
        let Position {
            epoch,
            batches: done,
        } = self.position;
        let skipped = batches.take(done).count();
        if skipped == done {
            return Ok(());
        }
        Err(UpdateError::Strategy(format!(
            "the record was made after {done} batches of epoch {epoch}, but the data has only {skipped}: resume with the data, \
             the size of batches and the number of ranks that the training had"
        )))
    }

    /// Seeds the backend for the next step.
    pub(super) fn seed(&self) {
        let Some(seed) = self.run.seed else { return };
        let Position { epoch, batches } = self.position;
        let place = [epoch, batches, self.group.rank()];
        let of_step = place
            .into_iter()
            .fold(seed, |seed, number| split_mix::output(seed, number as u64));
        TrainingBackend::<LC>::seed(&self.device, of_step);
    }

    /// Checks that the ranks' trainings agree. Returns the number of items of all ranks in an
    /// epoch.
    fn check(&self) -> Result<usize, UpdateError> {
        let (train, valid) = (self.train.num_items(), self.valid.num_items());
        let text = format!(
            "epochs {} to {}, {train} items to train on{} and {valid} to validate on{}",
            self.run.first, self.run.last_epoch, self.run.order, self.run.counting
        );
        self.group.agree_equal("training", &text)?;
        Ok(train * self.group.world_size())
    }

    /// The statuses of all ranks, in their order. One collective.
    ///
    /// # Errors
    ///
    /// Those of the group, also for a label that differs.
    pub(super) fn exchange(
        &self,
        status: StepStatus,
        label: &str,
    ) -> Result<Vec<StepStatus>, UpdateError> {
        let group = &self.group;
        if group.world_size() == 1 {
            return Ok(vec![status]);
        }
        let bytes = serde_json::to_vec(&status).expect("a status has only plain fields");
        let all = group.gather_bytes(label, bytes)?;
        let all = all.iter().map(|bytes| serde_json::from_slice(bytes));
        let all: Result<_, _> = all.collect();
        Ok(all.expect("ranks run the same program"))
    }

    /// Whether any rank was interrupted. If so, this rank is interrupted too, with the same reason.
    pub(super) fn is_interrupted(&self, all: &[StepStatus]) -> bool {
        let reason = all.iter().find_map(|status| status.interrupted.as_deref());
        if let (Some(reason), false) = (reason, self.run.interrupter.should_stop()) {
            let reason = Some(reason).filter(|reason| !reason.is_empty());
            self.run.interrupter.stop(reason);
        }
        reason.is_some()
    }

    /// Lets rank 0 write a record, if it has a checkpointer, whose strategy decides whether one is
    /// due.
    fn save(&mut self, number: usize, driver: &dyn RankDriver<LC>) -> Result<(), UpdateError> {
        let store = &self.run.store;
        let own = self.rank_0.as_ref();
        let own = own.and_then(|rank_0| rank_0.checkpoints.as_ref());
        if !self
            .group
            .agree_any("whether there are records", own.is_some())?
        {
            return Ok(());
        }
        // The checkpointer's background thread reads the model that it was given here.
        let mut write = own.map(|own| move |learner: &_| own.write(learner, number, store));
        let write = write.as_mut().map(|write| write as WriteRecord<'_, LC>);
        driver.record(&mut self.learner, write)
    }

    /// Whether to stop early, as rank 0 decides.
    fn stops_early(&mut self, epoch: usize) -> Result<bool, UpdateError> {
        let rank_0 = self.rank_0.as_mut();
        let early_stopping = rank_0.and_then(|rank_0| rank_0.early_stopping.as_mut());
        let store = &self.run.store;
        let own = early_stopping.is_some_and(|stopping| stopping.should_stop(epoch, store));
        Ok(self.group.agree_any("early stopping", own)?)
    }
}

/// Burn's checkpointer, which writes records in the background. Before the process ends because of
/// a fault, files that are being written are finished, so that none is cut off and no complete one
/// is deleted for an incomplete one.
pub(super) struct Checkpoints<LC: LearningComponentsTypes> {
    checkpointer: Arc<Mutex<Option<LearningCheckpointer<LC>>>>,
    /// Called before the process ends, for as long as this is alive.
    finish: Arc<dyn Fn() + Send + Sync>,
}

impl<LC: LearningComponentsTypes + 'static> Checkpoints<LC> {
    pub(super) fn new(checkpointer: LearningCheckpointer<LC>) -> Self {
        let checkpointer = Arc::new(Mutex::new(Some(checkpointer)));
        let held = checkpointer.clone();
        // Dropping the checkpointer waits for its writes. The lock waits for a running `write`.
        let finish: Arc<dyn Fn() + Send + Sync> = Arc::new(move || drop(held.lock().take()));
        finish_first(&finish);
        Self {
            checkpointer,
            finish,
        }
    }

    /// Writes the records of an epoch, if the user's strategy wants them, and deletes old ones.
    /// Returns while they are written.
    pub(super) fn write(&self, learner: &Learner<LC>, epoch: usize, store: &EventStoreClient) {
        if let Some(checkpointer) = &mut *self.checkpointer.lock() {
            checkpointer.checkpoint(learner, epoch, store);
        }
    }
}

impl<LC: LearningComponentsTypes> Drop for Checkpoints<LC> {
    fn drop(&mut self) {
        (self.finish)();
    }
}
