//! Training steps that all ranks take together, and validation, which they share.

use core::iter::from_fn;

use burn::data::dataloader::Progress;
use burn::module::AutodiffModule;
use burn::train::{
    EventProcessorTraining, InferenceStep, LearnerEvent, LearningComponentsTypes, TrainingItem,
    ValidLoader,
};

use super::driver::RankDriver;
use super::pace::StepClock;
use super::rank::{Batches, Rank, Rank0};
use super::status::StepStatus;
use super::stretch::{Ended, Stretch};
use super::{TrainInput, TrainItem, TrainMetrics, ValidItem};
use crate::UpdateError;

impl<LC: LearningComponentsTypes + 'static> Rank<LC> {
    /// Trains on this rank's part of `items`, to the end of the data or of the interval, or until
    /// interrupted.
    ///
    /// ```text
    /// loop:
    ///     batch = next, unless the interval ends here
    ///     exchange: has_batch; learning rate, items and interruption of the last step
    ///     stop where one is interrupted or has no batch
    ///     step
    /// ```
    pub(super) fn train(
        &mut self,
        driver: &dyn RankDriver<LC>,
        batches: &mut Batches<'_, LC>,
        stretch: &mut Stretch,
        items: usize,
    ) -> Result<Ended, UpdateError> {
        log::info!("Executing training step for epoch {}", stretch.number);
        let done = self.of_all_ranks(&batches.progress(), items);
        let pace = self.rank_0.as_ref().map(|_| self.run.pace.clone());
        let mut steps = Steps {
            items,
            done: 0,
            status: StepStatus::default(),
            progress: Progress::new(0, items),
            shown: Shown::default(),
            clock: StepClock::start(pace, done.items_processed),
        };
        loop {
            // The same on all ranks, as all make the same updates.
            let is_due = steps.done > 0 && self.is_due(driver, stretch);
            match self.next(batches, &mut steps, is_due)? {
                Next::Batch(batch) => self.step(driver, batch, batches, stretch, &mut steps),
                Next::None(ended) => return Ok(ended),
            }
        }
    }

    /// The next batch, if every rank has one and none is interrupted. Shows the items of the last
    /// step of the other ranks.
    fn next(
        &mut self,
        batches: &mut Batches<'_, LC>,
        steps: &mut Steps,
        is_due: bool,
    ) -> Result<Next<TrainInput<LC>>, UpdateError> {
        let mut status = core::mem::take(&mut steps.status);
        // Before the next batch is loaded, and after a step, as Burn does.
        if steps.done > 0 {
            status = status.interrupted(&self.run.interrupter);
        }
        let batch = match status.interrupted {
            None if !is_due => steps.clock.wait(|| batches.next()),
            _ => None,
        };
        status.has_batch = batch.is_some();
        // Learning rates are compared as part of the label, without a message of their own.
        let (epoch, lr) = (self.position.epoch, self.learner.lr_current());
        let label = format!("training, epoch {epoch}, step {}, lr {lr:?}", steps.done);
        let all = self.exchange(status, &label)?;
        for (_, item) in self.train_items.collect(&*self.group, &all)? {
            if let Some(rank_0) = &mut self.rank_0 {
                rank_0.show_train(item, &steps.progress, &steps.shown);
            }
        }
        if self.is_interrupted(&all) {
            return Ok(Next::None(Ended::Interrupted));
        }
        if is_due {
            return Ok(Next::None(Ended::Interval));
        }
        let has_batch = |status: &StepStatus| status.has_batch;
        match batch {
            Some(batch) if all.iter().all(has_batch) => return Ok(Next::Batch(batch)),
            _ if all.iter().any(has_batch) => burn_decorator::warn_user!(
                "epoch {epoch} ends after {} steps: a rank has no more batches",
                steps.done
            ),
            _ => {}
        }
        Ok(Next::None(Ended::Data))
    }

    /// Trains on a batch, and shows it.
    fn step(
        &mut self,
        driver: &dyn RankDriver<LC>,
        batch: TrainInput<LC>,
        batches: &Batches<'_, LC>,
        stretch: &mut Stretch,
        steps: &mut Steps,
    ) {
        self.seed();
        steps.done += 1;
        self.steps += 1;
        stretch.steps += 1;
        self.position.batches += 1;
        self.learner.lr_step();
        steps.progress = self.of_all_ranks(&batches.progress(), steps.items);
        let output = self.learner.train_step(batch);
        self.learner.optimizer_step(output.grads);
        steps.clock.step(steps.progress.items_processed);

        // Fewer than before if a scaler has undone an update.
        let updates = driver.updates();
        let made = updates.map(|all| all.saturating_sub(stretch.updates_before) as usize);
        match made {
            Some(made) => log::info!(
                "Micro-batch {}, {made} updates in epoch {}",
                self.steps,
                stretch.number
            ),
            None => log::info!("Iteration {}", stretch.steps),
        }
        steps.shown = Shown {
            progress: self.progress(driver, stretch),
            iteration: made.unwrap_or(stretch.steps),
            lr: self.learner.lr_current(),
        };
        let is_sent = self.run.train_metrics == TrainMetrics::AllRanks;
        match &mut self.rank_0 {
            Some(rank_0) => rank_0.show_train(output.item, &steps.progress, &steps.shown),
            None if is_sent => self.train_items.give(output.item),
            None => {}
        }
        steps.status = StepStatus {
            has_item: is_sent,
            ..StepStatus::default()
        };
    }

    /// This rank's progress, scaled to the `items` of all ranks.
    fn of_all_ranks(&self, own: &Progress, items: usize) -> Progress {
        if self.group.world_size() == 1 {
            return own.clone();
        }
        let done = own.items_processed as u128 * items as u128;
        let done = done.checked_div(own.items_total as u128);
        Progress::new(done.map_or(items, |done| done as usize), items)
    }

    /// Validates on all of the data, or until interrupted, with the averages of the weights if the
    /// optimizer keeps them. In each round every rank that has a
    /// batch validates one, and rank 0 gets the items in the order of ranks.
    ///
    /// Where parameters are gathered from all ranks when they are used, a rank without a batch
    /// computes one item of the data too, so that all ranks take part in the gathers, and drops the
    /// result.
    pub(super) fn validate(
        &mut self,
        epochs: &Progress,
        driver: &dyn RankDriver<LC>,
    ) -> Result<(), UpdateError> {
        let epoch = epochs.items_processed;
        log::info!("Executing validation step for epoch {epoch}");
        let model = match driver.averaged(&mut self.learner)? {
            Some(averaged) => averaged,
            None => self.learner.model().valid(),
        };
        let gathers_units = driver.gathers_parameters();
        let loader = self.valid.clone();
        let (items, mut batches) = (loader.num_items(), self.valid_batches(&loader)?);
        let mut iteration = 0;
        let mut shown = |item, done| {
            iteration += 1;
            let progress = Progress::new(done, items);
            TrainingItem::new(item, progress, epochs.clone(), Some(iteration), None)
        };
        let mut status = StepStatus::default();
        for round in 0.. {
            // After a step and before the next batch is loaded, as Burn does.
            let mut last = core::mem::take(&mut status).interrupted(&self.run.interrupter);
            let batch = match last.interrupted {
                None => batches.next(),
                Some(_) => None,
            };
            last.has_batch = batch.is_some();
            let label = format!("validation, epoch {epoch}, step {round}");
            let all = self.exchange(last, &label)?;
            for (rank, item) in self.valid_items.collect(&*self.group, &all)? {
                if let Some(rank_0) = &mut self.rank_0 {
                    rank_0.show_valid(shown(item, all[rank].done));
                }
            }
            let is_over = all.iter().all(|status| !status.has_batch);
            if self.is_interrupted(&all) || is_over {
                break;
            }
            let Some((batch, done)) = batch else {
                if gathers_units {
                    loader.slice(0, 1).iter().take(1).for_each(|batch| {
                        drop(model.step(batch));
                    });
                }
                continue;
            };
            (status.has_item, status.done) = (true, done);
            let item = model.step(batch);
            match &mut self.rank_0 {
                Some(rank_0) => rank_0.show_valid(shown(item, done)),
                None => self.valid_items.give(item),
            }
        }
        if let Some(rank_0) = &mut self.rank_0 {
            rank_0
                .processor
                .process_valid(LearnerEvent::EndEpoch(epoch));
            rank_0.settle_metrics();
        }
        Ok(())
    }

    /// This rank's batches, each with the number of items done after it.
    fn valid_batches<'a>(
        &self,
        loader: &'a ValidLoader<LC>,
    ) -> Result<ValidBatches<'a, LC>, UpdateError> {
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        let mut batches = loader.iter();
        if ranks == 1 {
            return Ok(Box::new(from_fn(move || {
                let batch = batches.next()?;
                Some((batch, batches.progress().items_processed))
            })));
        }
        // The batches of a single rank, assigned round-robin. A loader does not expose the batch
        // size, so the first batch is loaded.
        let first = batches.next().map(|_| batches.progress().items_processed);
        let label = "items in a batch to validate on";
        let lengths = self.group.gather_f64(label, first.unwrap_or(0) as f64)?;
        // The longest, as a loader with workers may deliver the short last batch first on some
        // ranks.
        let length = lengths.into_iter().fold(1.0, f64::max) as usize;
        let items = loader.num_items();
        let starts = (rank * length..items).step_by(ranks * length);
        let dealt = starts.flat_map(move |start| {
            let end = (start + length).min(items);
            let batches: Vec<_> = loader.slice(start, end).iter().collect();
            batches.into_iter().map(move |batch| (batch, end))
        });
        Ok(Box::new(dealt))
    }
}

impl<LC: LearningComponentsTypes> Rank0<LC> {
    fn show_train(&mut self, item: TrainItem<LC>, progress: &Progress, shown: &Shown) {
        let item = TrainingItem::new(
            item,
            progress.clone(),
            shown.progress.clone(),
            Some(shown.iteration),
            Some(shown.lr),
        );
        let event = LearnerEvent::ProcessedItem(item);
        self.processor.process_train(event);
    }

    fn show_valid(&mut self, item: TrainingItem<ValidItem<LC>>) {
        self.processor
            .process_valid(LearnerEvent::ProcessedItem(item));
    }

    /// Waits until the metrics of all items are logged, because early stopping and the choice of
    /// records read the log. Burn may decide without the last ones.
    ///
    /// The channel to the thread that computes metrics holds one event. So after two further events
    /// are accepted, all earlier ones have been processed. The events are starts of a validation,
    /// which metrics ignore.
    fn settle_metrics(&mut self) {
        for _ in 0..2 {
            self.processor.process_valid(LearnerEvent::Start);
        }
    }
}

/// Steps without a validation between them.
struct Steps {
    /// Items of an epoch, of all ranks.
    items: usize,
    done: usize,
    /// What the other ranks are told of the last one.
    status: StepStatus,
    /// Of the last one.
    progress: Progress,
    shown: Shown,
    clock: StepClock,
}

/// What comes after a step.
enum Next<T> {
    Batch(T),
    None(Ended),
}

/// What is shown with the items of a step.
struct Shown {
    /// The epoch or the interval.
    progress: Progress,
    /// Updates in it, or steps where updates are not counted.
    iteration: usize,
    lr: f64,
}

impl Default for Shown {
    fn default() -> Self {
        Self {
            progress: Progress::new(0, 0),
            iteration: 0,
            lr: 0.0,
        }
    }
}

type ValidInput<LC> = <<LC as LearningComponentsTypes>::InferenceModel as InferenceStep>::Input;
type ValidBatches<'a, LC> = Box<dyn Iterator<Item = (ValidInput<LC>, usize)> + 'a>;
