//! One rank's training: Burn's loop, in which all ranks take each decision together.

use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn::module::{AutodiffModule, Module};
use burn::optim::GradientsParams;
use burn::tensor::{Device, backend::DeviceOps};
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, InferenceStep, Interrupter, Learner,
    LearnerEvent, LearningCheckpointer, LearningComponentsTypes, SupervisedTrainingEventProcessor,
    TrainLoader, TrainingBackend, TrainingItem, TrainingModel, ValidLoader,
};

use super::items::Items;
use super::records;
use super::word::{Word, Words};
use super::{StrategyError, TrainItem, Uneven, ValidItem};
use crate::ZeroError;
use crate::group::{Agree, ProcessGroup};
use crate::optimizer::seat::{Answer, Leave, Seat, Setting};
use crate::optimizer::{attach_to, prepare};

/// What each rank has.
pub(super) struct Rank<LC: LearningComponentsTypes> {
    pub(super) group: Arc<dyn ProcessGroup>,
    pub(super) device: Device<TrainingBackend<LC>>,
    pub(super) learner: Learner<LC>,
    /// This rank's part.
    pub(super) train: TrainLoader<LC>,
    /// All of it, of which this rank validates its share.
    pub(super) valid: ValidLoader<LC>,
    pub(super) train_items: Items<TrainItem<LC>>,
    pub(super) valid_items: Items<ValidItem<LC>>,
    pub(super) interrupter: Interrupter,
    pub(super) store: Arc<EventStoreClient>,
    pub(super) epochs: Epochs,
    pub(super) epoch_end: Option<EpochEnd<LC>>,
    /// Rank 0 has it.
    pub(super) front: Option<Front<LC>>,
}

/// What all ranks must have alike.
#[derive(Clone, Copy)]
pub(super) struct Epochs {
    pub(super) first: usize,
    pub(super) last: usize,
    pub(super) uneven: Uneven,
}

/// What the user sees, and what is decided by it.
pub(super) struct Front<LC: LearningComponentsTypes> {
    pub(super) processor: SupervisedTrainingEventProcessor<LC>,
    pub(super) checkpointer: Option<LearningCheckpointer<LC>>,
    pub(super) early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
}

/// Asks for something at the end of each epoch.
pub(super) type EpochEnd<LC> =
    Arc<dyn Fn(&Device<TrainingBackend<LC>>) -> GradientsParams + Send + Sync>;

/// What is left of a training.
pub(super) type Trained<LC> = (
    TrainingModel<LC>,
    Option<SupervisedTrainingEventProcessor<LC>>,
);

impl<LC: LearningComponentsTypes> Rank<LC> {
    /// # Errors
    ///
    /// Those of the strategy, of sharding and of the group.
    pub(super) fn run(mut self) -> Result<Trained<LC>, ZeroError> {
        self.train = self.train.to_device(&self.device);
        self.valid = self.valid.to_device(self.device.inner());
        self.learner.fork(&self.device);
        self.check()?;
        let seat = Seat::new(self.group.clone());
        let leave = self.sit_down(&seat)?;

        for epoch in self.epochs.first..=self.epochs.last {
            let progress = Progress::new(epoch, self.epochs.last);
            self.train(&progress)?;
            if self.is_interrupted()? {
                break;
            }
            self.validate(&progress)?;
            self.save(epoch, &seat)?;
            if self.stops_early(epoch)? {
                break;
            }
        }
        drop(leave);
        Ok((
            self.learner.model(),
            self.front.map(|front| front.processor),
        ))
    }

    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn ranks(&self) -> usize {
        self.group.world_size()
    }

    fn check(&self) -> Result<(), ZeroError> {
        let Epochs {
            first,
            last,
            uneven,
        } = self.epochs;
        let (train, valid) = (self.train.num_items(), self.valid.num_items());
        let text = format!(
            "epochs {first} to {last}, {train} items to train on and {valid} to validate on, Uneven::{uneven:?}"
        );
        self.group.agree_equal("training", &text)
    }

    /// The learner's optimizer gets its ranks, and the learner the weights of rank 0.
    fn sit_down(&mut self, seat: &Arc<Seat>) -> Result<Leave, ZeroError> {
        let leave = seat.put();
        records::ask(&self.learner, &self.store);
        let mut answers = seat.take_answers();
        let found = answers.len();
        let (Some(answer), 1) = (answers.pop(), found) else {
            let optimizer = core::any::type_name::<LC::Optimizer>();
            return Err(StrategyError::NoZeroOptimizer { optimizer, found }.into());
        };
        let Answer {
            optimizer,
            sharding,
            tried,
        } = answer;
        let text = format!("{sharding:?} of {optimizer}");
        self.group.agree_equal("sharding", &text)?;

        let (model, exchange) =
            prepare::<TrainingBackend<LC>, _>(self.learner.model(), &self.group, &sharding, tried)?;
        if self.ranks() > 1 {
            self.learner.load_model(model.into_record());
        }
        let model = self.learner.model();
        let ids = attach_to::<TrainingBackend<LC>, _>(&exchange, self.ranks(), &model);
        seat.set(Setting { exchange, ids });
        Ok(leave)
    }

    /// Trains on this rank's part, or until interrupted.
    fn train(&mut self, epochs: &Progress) -> Result<(), ZeroError> {
        let epoch = epochs.items_processed;
        log::info!("Executing training step for epoch {epoch}");
        let loader = self.train.clone();
        let mut batches = loader.iter();
        let mut iteration = 0;
        loop {
            let batch = batches.next();
            if !self.all_have_one(batch.is_some(), iteration, epoch)? {
                break;
            }
            let Some(batch) = batch else { break };
            iteration += 1;
            self.learner.lr_step();
            log::info!("Iteration {iteration}");
            let progress = self.of_all(batches.progress());
            let output = self.learner.train_step(batch);
            self.learner.optimizer_step(output.grads);

            let lr = self.learner.lr_current();
            let show = |item| {
                let (progress, epochs) = (progress.clone(), epochs.clone());
                TrainingItem::new(item, progress, epochs, Some(iteration), Some(lr))
            };
            match &mut self.front {
                Some(front) => front.show_train(show(output.item)),
                None => self.train_items.give(output.item),
            }
            let words = self.exchange("training", epoch, iteration, 1, Some(lr))?;
            for item in self.train_items.collect(&*self.group, &words)? {
                if let Some(front) = &mut self.front {
                    front.show_train(show(item));
                }
            }
            if words.stop(&self.interrupter) {
                break;
            }
        }
        // Without a step there is no learning rate either.
        if let Some(epoch_end) = self.epoch_end.clone().filter(|_| iteration > 0) {
            self.learner.optimizer_step(epoch_end(&self.device));
        }
        if let Some(front) = &mut self.front {
            front.processor.process_train(LearnerEvent::EndEpoch(epoch));
        }
        Ok(())
    }

    /// Whether every rank has a batch for the next step.
    fn all_have_one(&self, own: bool, steps: usize, epoch: usize) -> Result<bool, ZeroError> {
        if self.ranks() == 1 {
            return Ok(own);
        }
        let label = format!("whether there is a batch after step {steps} of epoch {epoch}");
        let have = self.group.gather_i64(&label, own.into())?;
        let Some(rank) = have.iter().position(|&has| has == 0) else {
            return Ok(true);
        };
        if have.contains(&1) {
            if self.epochs.uneven == Uneven::Refuse {
                return Err(StrategyError::RanOut { rank, steps, epoch }.into());
            }
            log::warn!("epoch {epoch} ends after {steps} steps: rank {rank} has no more batches");
        }
        Ok(false)
    }

    /// Progress over the parts of all ranks, which are equally long.
    fn of_all(&self, own: Progress) -> Progress {
        let ranks = self.ranks();
        Progress::new(own.items_processed * ranks, own.items_total * ranks)
    }

    /// What all say after a step.
    fn exchange(
        &self,
        what: &str,
        epoch: usize,
        iteration: usize,
        items: usize,
        lr: Option<f64>,
    ) -> Result<Words, ZeroError> {
        let own = Word::new(items, lr, &self.interrupter);
        let label = format!("{what}, epoch {epoch}, step {iteration}");
        Words::exchange(&*self.group, &label, own)
    }

    /// Whether any rank was interrupted; the reason goes to the log.
    fn is_interrupted(&self) -> Result<bool, ZeroError> {
        let words = Words::exchange(
            &*self.group,
            "end of the epoch",
            Word::new(0, None, &self.interrupter),
        )?;
        let interrupted = words.stop(&self.interrupter);
        if interrupted {
            let reason = self.interrupter.get_message();
            let reason = reason.unwrap_or_else(|| "Reason unknown".to_owned());
            log::info!("Training interrupted: {reason}");
        }
        Ok(interrupted)
    }

    /// Validates on all of the data, or until interrupted.
    fn validate(&mut self, epochs: &Progress) -> Result<(), ZeroError> {
        let epoch = epochs.items_processed;
        log::info!("Executing validation step for epoch {epoch}");
        if self.ranks() > 1 && self.valid_items.are_shared() {
            self.validate_together(epochs)?;
        } else {
            self.validate_alone(epochs)?;
        }
        if let Some(front) = &mut self.front {
            front.processor.process_valid(LearnerEvent::EndEpoch(epoch));
            front.settle_metrics();
        }
        Ok(())
    }

    /// Rank 0 validates; the others wait for the end of each batch, so that no deadline passes.
    fn validate_alone(&mut self, epochs: &Progress) -> Result<(), ZeroError> {
        let epoch = epochs.items_processed;
        let model = self.learner.model().valid();
        let loader = self.valid.clone();
        let mut batches = (self.rank() == 0).then(|| loader.iter());
        let mut iteration = 0;
        loop {
            let batch = batches.as_mut().and_then(Iterator::next);
            let items = usize::from(batch.is_some());
            iteration += 1;
            if let (Some(batch), Some(batches), Some(front)) = (batch, &batches, &mut self.front) {
                let progress = batches.progress();
                let item = model.step(batch);
                front.show_valid(item, progress, epochs, iteration);
            }
            let words = self.exchange("validation", epoch, iteration, items, None)?;
            if words.items(0) == 0 || words.stop(&self.interrupter) {
                return Ok(());
            }
        }
    }

    /// Each rank validates one batch after the other of those that one rank alone would have, dealt in turn.
    fn validate_together(&mut self, epochs: &Progress) -> Result<(), ZeroError> {
        let epoch = epochs.items_processed;
        let model = self.learner.model().valid();
        let items = self.valid.num_items();
        let length = self.valid_batch()?;
        let (ranks, rank) = (self.ranks(), self.rank());
        let mut iteration = 0;
        for round in 0..items.div_ceil(length).div_ceil(ranks) {
            let first = |rank: usize| ((round * ranks + rank) * length).min(items);
            let mut given = 0;
            if first(rank) < items {
                let batch = self.valid.slice(first(rank), first(rank + 1));
                for batch in batch.iter() {
                    let item = model.step(batch);
                    given += 1;
                    match &mut self.front {
                        Some(front) => {
                            iteration += 1;
                            let progress = Progress::new(first(1), items);
                            front.show_valid(item, progress, epochs, iteration);
                        }
                        None => self.valid_items.give(item),
                    }
                }
            }
            let words = self.exchange("validation", epoch, round + 1, given, None)?;
            let mut others = self.valid_items.collect(&*self.group, &words)?.into_iter();
            if let Some(front) = &mut self.front {
                for rank in 1..ranks {
                    for item in others.by_ref().take(words.items(rank)) {
                        iteration += 1;
                        let progress = Progress::new(first(rank + 1), items);
                        front.show_valid(item, progress, epochs, iteration);
                    }
                }
            }
            if words.stop(&self.interrupter) {
                break;
            }
        }
        Ok(())
    }

    /// Items in a batch of the validation data, found by loading the first: a loader does not say.
    fn valid_batch(&self) -> Result<usize, ZeroError> {
        let mut batches = self.valid.iter();
        let own = batches
            .next()
            .map_or(0, |_| batches.progress().items_processed);
        let all = self
            .group
            .gather_i64("items in a batch to validate on", own as i64)?;
        Ok(all[0].max(1) as usize)
    }

    /// Rank 0 writes, if it is the time.
    fn save(&mut self, epoch: usize, seat: &Seat) -> Result<(), ZeroError> {
        let (learner, store) = (&self.learner, &*self.store);
        match &mut self.front {
            Some(Front {
                checkpointer: Some(checkpointer),
                ..
            }) => seat.announce(|| checkpointer.checkpoint(learner, epoch, store)),
            Some(_) => seat.announce(|| ()),
            None => seat.attend(|| records::ask(learner, store)),
        }
    }

    /// Rank 0 decides.
    fn stops_early(&mut self, epoch: usize) -> Result<bool, ZeroError> {
        let early_stopping = self
            .front
            .as_mut()
            .and_then(|front| front.early_stopping.as_mut());
        let own = early_stopping.is_some_and(|stopping| stopping.should_stop(epoch, &self.store));
        self.group.agree_any("early stopping", own)
    }
}

impl<LC: LearningComponentsTypes> Front<LC> {
    fn show_train(&mut self, item: TrainingItem<TrainItem<LC>>) {
        self.processor
            .process_train(LearnerEvent::ProcessedItem(item));
    }

    fn show_valid(
        &mut self,
        item: ValidItem<LC>,
        progress: Progress,
        epochs: &Progress,
        iteration: usize,
    ) {
        let item = TrainingItem::new(item, progress, epochs.clone(), Some(iteration), None);
        self.processor
            .process_valid(LearnerEvent::ProcessedItem(item));
    }

    /// Waits until the metrics of all items are with the loggers, where early stopping and the choice of records look for
    /// them; Burn may decide without the last ones.
    ///
    /// The channel to the thread that computes metrics holds one event. So a second more is only accepted when all
    /// before the first have been dealt with. Metrics do nothing at the start of a validation.
    fn settle_metrics(&mut self) {
        for _ in 0..2 {
            self.processor.process_valid(LearnerEvent::Start);
        }
    }
}
