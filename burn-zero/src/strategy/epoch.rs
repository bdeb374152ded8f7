//! An epoch: training steps that all ranks take together, and validation, which they share.

use core::iter::from_fn;

use burn::data::dataloader::{DataLoaderIterator, Progress};
use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::train::{
    EventProcessorTraining, InferenceStep, LearnerEvent, LearningComponentsTypes, TrainingItem,
    ValidLoader,
};
use burn_decorator::message::{self, Message};

use super::rank::{Rank, Rank0, StepStatus};
use super::{Loaders, TrainItem, Uneven, ValidItem};
use crate::ZeroError;
use crate::group::Agree;

impl<LC: LearningComponentsTypes + 'static> Rank<LC> {
    /// Trains on this rank's part of `items`, or until interrupted.
    ///
    /// ```text
    /// loop:
    ///     batch = next
    ///     exchange: has_batch; items, learning rate and interruption of the last step
    ///     stop where one is interrupted or has no batch
    ///     step
    /// ```
    pub(super) fn train(&mut self, epochs: &Progress, items: usize) -> Result<(), ZeroError> {
        let epoch = epochs.items_processed;
        log::info!("Executing training step for epoch {epoch}");
        let loader = self.train.clone();
        let mut batches = loader.iter();
        // Whether all of this rank's data was used once.
        let mut is_over = false;
        let mut steps = 0;
        let mut status = StepStatus::default();
        let mut progress = Progress::new(0, items);
        loop {
            // Before the next batch is loaded, and after a step, as Burn does.
            if steps > 0 {
                status = status.interrupted(&self.job.interrupter);
            }
            let mut batch = None;
            if status.interrupted.is_none() && !is_over {
                batch = batches.next();
                is_over = batch.is_none();
            }
            status.has_batch = batch.is_some();
            let label = format!("training, epoch {epoch}, step {steps}");
            let all = self.exchange(status, &label)?;
            let lr = self.learner.lr_current();
            for (_, item) in self.train_items.collect(&*self.group, &all)? {
                if let Some(rank_0) = &mut self.rank_0 {
                    rank_0.show_train(item, &progress, epochs, steps, lr);
                }
            }
            if self.is_interrupted(&all) || !self.all_go_on(&all, steps, epoch)? {
                break;
            }
            // A rank whose data is over repeats it.
            let batch = batch.or_else(|| batches.next()).or_else(|| {
                batches = loader.iter();
                batches.next()
            });
            let Some(batch) = batch else { break };
            steps += 1;
            self.learner.lr_step();
            log::info!("Iteration {steps}");
            progress = match is_over {
                true => Progress::new(items, items),
                false => scaled(&batches.progress(), items),
            };
            let output = self.learner.train_step(batch);
            self.learner.optimizer_step(output.grads);

            let lr = self.learner.lr_current();
            match &mut self.rank_0 {
                Some(rank_0) => rank_0.show_train(output.item, &progress, epochs, steps, lr),
                None => self.train_items.give(output.item),
            }
            status = StepStatus {
                has_item: true,
                lr: Some(lr.to_bits()),
                ..StepStatus::default()
            };
        }
        // Without a step there is no learning rate either.
        if steps > 0 {
            message::send(Message::Flush, || {
                self.learner.optimizer_step(GradientsParams::new());
            });
        }
        if let Some(rank_0) = &mut self.rank_0 {
            rank_0
                .processor
                .process_train(LearnerEvent::EndEpoch(epoch));
        }
        Ok(())
    }

    /// Whether there is a next step: every rank has a batch for it, or ranks without one repeat their data.
    fn all_go_on(&self, all: &[StepStatus], steps: usize, epoch: usize) -> Result<bool, ZeroError> {
        let Some(rank) = all.iter().position(|status| !status.has_batch) else {
            return Ok(true);
        };
        if all.iter().all(|status| !status.has_batch) {
            return Ok(false);
        }
        match self.job.uneven {
            Uneven::Refuse => Err(ZeroError::Strategy(format!(
                "rank {rank} has no batch left after {steps} steps of epoch {epoch}, but others have, and `Uneven::Refuse` asks for \
                 equally many"
            ))),
            Uneven::Repeat if self.job.loaders != Loaders::Whole => Ok(true),
            Uneven::Repeat | Uneven::Drop => {
                log::warn!(
                    "epoch {epoch} ends after {steps} steps: rank {rank} has no more batches"
                );
                Ok(false)
            }
        }
    }

    /// Validates on all of the data, or until interrupted. In each round every rank that has a batch validates one, and rank 0 gets the
    /// items in the order of ranks.
    pub(super) fn validate(&mut self, epochs: &Progress) -> Result<(), ZeroError> {
        let epoch = epochs.items_processed;
        log::info!("Executing validation step for epoch {epoch}");
        let model = self.learner.model().valid();
        let loader = self.job.valid.clone();
        let (items, mut batches) = self.valid_batches(&loader)?;
        let mut iteration = 0;
        let mut shown = |item, done| {
            iteration += 1;
            let progress = Progress::new(done, items);
            TrainingItem::new(item, progress, epochs.clone(), Some(iteration), None)
        };
        for round in 1.. {
            let mut status = StepStatus::default();
            if let Some((batch, done)) = batches.next() {
                (status.has_item, status.done) = (true, done);
                let item = model.step(batch);
                match &mut self.rank_0 {
                    Some(rank_0) => rank_0.show_valid(shown(item, done)),
                    None => self.valid_items.give(item),
                }
            }
            let label = format!("validation, epoch {epoch}, step {round}");
            let status = status.interrupted(&self.job.interrupter);
            let all = self.exchange(status, &label)?;
            for (rank, item) in self.valid_items.collect(&*self.group, &all)? {
                if let Some(rank_0) = &mut self.rank_0 {
                    rank_0.show_valid(shown(item, all[rank].done));
                }
            }
            let is_over = all.iter().all(|status| !status.has_item);
            if is_over || self.is_interrupted(&all) {
                break;
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

    /// The number of items of all ranks, and this rank's batches, each with the number of items done after it.
    fn valid_batches<'a>(
        &self,
        loader: &'a ValidLoader<LC>,
    ) -> Result<(usize, ValidBatches<'a, LC>), ZeroError> {
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        let own = loader.num_items();
        if ranks == 1 || !self.valid_items.are_shared() {
            // Only rank 0 validates. The others wait for each of its batches, so that no deadline passes.
            let batches: ValidBatches<'a, LC> = match rank {
                0 => with_progress(loader.iter(), own),
                _ => Box::new(core::iter::empty()),
            };
            return Ok((own, batches));
        }
        if self.job.loaders == Loaders::Split {
            let parts = self.group.gather_i64("items to validate on", own as i64)?;
            let items = parts.iter().sum::<i64>() as usize;
            return Ok((items, with_progress(loader.iter(), items)));
        }
        // The batches of a single rank, assigned round-robin. A loader does not expose the batch size, so the first batch is loaded.
        let mut batches = loader.iter();
        let first = batches.next().map(|_| batches.progress().items_processed);
        let label = "items in a batch to validate on";
        let lengths = self.group.gather_i64(label, first.unwrap_or(0) as i64)?;
        let length = lengths[0].max(1) as usize;
        let starts = (rank * length..own).step_by(ranks * length);
        let dealt = starts.flat_map(move |start| {
            let end = (start + length).min(own);
            let batches: Vec<_> = loader.slice(start, end).iter().collect();
            batches.into_iter().map(move |batch| (batch, end))
        });
        Ok((own, Box::new(dealt)))
    }
}

impl<LC: LearningComponentsTypes> Rank0<LC> {
    fn show_train(
        &mut self,
        item: TrainItem<LC>,
        progress: &Progress,
        epochs: &Progress,
        steps: usize,
        lr: f64,
    ) {
        let (progress, epochs) = (progress.clone(), epochs.clone());
        let item = TrainingItem::new(item, progress, epochs, Some(steps), Some(lr));
        let event = LearnerEvent::ProcessedItem(item);
        self.processor.process_train(event);
    }

    fn show_valid(&mut self, item: TrainingItem<ValidItem<LC>>) {
        self.processor
            .process_valid(LearnerEvent::ProcessedItem(item));
    }

    /// Waits until the metrics of all items are logged, because early stopping and the choice of records read them there. Burn may
    /// decide without the last ones.
    ///
    /// The channel to the thread that computes metrics holds one event. So after two further events are accepted, all
    /// earlier ones have been processed. The events are starts of a validation, which metrics ignore.
    fn settle_metrics(&mut self) {
        for _ in 0..2 {
            self.processor.process_valid(LearnerEvent::Start);
        }
    }
}

type ValidInput<LC> = <<LC as LearningComponentsTypes>::InferenceModel as InferenceStep>::Input;
type ValidBatches<'a, LC> = Box<dyn Iterator<Item = (ValidInput<LC>, usize)> + 'a>;

/// The batches, each with the loader's progress scaled to the `items` of all ranks.
fn with_progress<'a, I: 'a>(
    mut batches: Box<dyn DataLoaderIterator<I> + 'a>,
    items: usize,
) -> Box<dyn Iterator<Item = (I, usize)> + 'a> {
    Box::new(from_fn(move || {
        let batch = batches.next()?;
        let progress = scaled(&batches.progress(), items);
        Some((batch, progress.items_processed))
    }))
}

/// This rank's progress scaled to the `items` of all ranks.
fn scaled(own: &Progress, items: usize) -> Progress {
    let done = own.items_processed as u128 * items as u128;
    let done = done.checked_div(own.items_total as u128);
    Progress::new(done.map_or(items, |done| done as usize), items)
}
