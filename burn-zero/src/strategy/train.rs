//! An epoch's training steps, which all ranks take together.

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::tensor::backend::Backend;
use burn::train::{EventProcessorTraining, LearnerEvent, LearningComponentsTypes, TrainingItem};

use super::rank::Rank;
use super::{StrategyError, Uneven};
use crate::ZeroError;
use crate::group::Agree;

impl<LC: LearningComponentsTypes> Rank<LC> {
    /// Trains on this rank's part of `items`, or until interrupted.
    pub(super) fn train(&mut self, epochs: &Progress, items: usize) -> Result<(), ZeroError> {
        let epoch = epochs.items_processed;
        log::info!("Executing training step for epoch {epoch}");
        let loader = self.train.clone();
        let mut pass = Pass::over(&*loader);
        let mut iteration = 0;
        loop {
            let mut batch = pass.next();
            if !self.all_go_on(batch.is_some(), iteration, epoch)? {
                break;
            }
            if batch.is_none() {
                batch = pass.repeat();
            }
            let Some(batch) = batch else { break };
            iteration += 1;
            self.learner.lr_step();
            log::info!("Iteration {iteration}");
            let progress = pass.progress_of(items);
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

    /// Whether there is a next step: every rank has a batch for it, or those that have none begin their data anew.
    fn all_go_on(&self, own: bool, steps: usize, epoch: usize) -> Result<bool, ZeroError> {
        if self.ranks() == 1 {
            return Ok(own);
        }
        let label = format!("whether there is a batch after step {steps} of epoch {epoch}");
        let have = self.group.gather_i64(&label, own.into())?;
        let Some(rank) = have.iter().position(|&has| has == 0) else {
            return Ok(true);
        };
        if !have.contains(&1) {
            return Ok(false);
        }
        match self.epochs.uneven {
            Uneven::Refuse => Err(StrategyError::RanOut { rank, steps, epoch }.into()),
            Uneven::Repeat if self.epochs.loaders.split_training() => Ok(true),
            Uneven::Repeat | Uneven::Drop => {
                log::warn!(
                    "epoch {epoch} ends after {steps} steps: rank {rank} has no more batches"
                );
                Ok(false)
            }
        }
    }
}

/// A rank's way through its data in an epoch.
struct Pass<'a, B: Backend, I> {
    loader: &'a dyn DataLoader<B, I>,
    batches: Box<dyn DataLoaderIterator<I> + 'a>,
    /// Whether the rank has gone through all of it.
    is_over: bool,
}

impl<'a, B: Backend, I> Pass<'a, B, I> {
    fn over(loader: &'a dyn DataLoader<B, I>) -> Self {
        Self {
            loader,
            batches: loader.iter(),
            is_over: false,
        }
    }

    /// The next batch, until all of the data was gone through.
    fn next(&mut self) -> Option<I> {
        if self.is_over {
            return None;
        }
        let batch = self.batches.next();
        self.is_over = batch.is_none();
        batch
    }

    /// The next batch after that: the data begins anew, as often as it must.
    fn repeat(&mut self) -> Option<I> {
        self.batches.next().or_else(|| {
            self.batches = self.loader.iter();
            self.batches.next()
        })
    }

    /// How far all ranks are with `items` of theirs, as far as this rank can tell.
    fn progress_of(&self, items: usize) -> Progress {
        match self.is_over {
            true => Progress::new(items, items),
            false => scaled(&self.batches.progress(), items),
        }
    }
}

/// This rank's progress as one over the `items` of all ranks.
pub(super) fn scaled(own: &Progress, items: usize) -> Progress {
    let done = own.items_processed as u128 * items as u128;
    let done = done.checked_div(own.items_total as u128);
    Progress::new(done.map_or(items, |done| done as usize), items)
}
