//! Validation, shared between ranks.

use burn::data::dataloader::Progress;
use burn::module::AutodiffModule;
use burn::train::{EventProcessorTraining, InferenceStep, LearnerEvent, LearningComponentsTypes};

use super::Loaders;
use super::rank::Rank;
use super::train::scaled;
use crate::ZeroError;
use crate::group::Agree;

impl<LC: LearningComponentsTypes> Rank<LC> {
    /// Validates on all of the data, or until interrupted.
    pub(super) fn validate(&mut self, epochs: &Progress) -> Result<(), ZeroError> {
        let epoch = epochs.items_processed;
        log::info!("Executing validation step for epoch {epoch}");
        if self.ranks() == 1 || !self.valid_items.are_shared() {
            self.validate_alone(epochs)?;
        } else if self.epochs.loaders == Loaders::Split {
            self.validate_parts(epochs)?;
        } else {
            self.validate_together(epochs)?;
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

    /// Each rank validates its own part, a batch a round while it has any. Rank 0 gets the items of a round rank by rank.
    fn validate_parts(&mut self, epochs: &Progress) -> Result<(), ZeroError> {
        let epoch = epochs.items_processed;
        let model = self.learner.model().valid();
        let loader = self.valid.clone();
        let mut batches = loader.iter();
        let own = loader.num_items() as i64;
        let parts = self.group.gather_i64("items to validate on", own)?;
        let items = parts.iter().sum::<i64>() as usize;
        let mut iteration = 0;
        for round in 1.. {
            let item = batches.next().map(|batch| model.step(batch));
            let given = usize::from(item.is_some());
            let progress = scaled(&batches.progress(), items);
            let mut shown = Vec::new();
            match &self.front {
                Some(_) => shown.extend(item),
                None => item
                    .into_iter()
                    .for_each(|item| self.valid_items.give(item)),
            }
            let words = self.exchange("validation", epoch, round, given, None)?;
            shown.extend(self.valid_items.collect(&*self.group, &words)?);
            if let Some(front) = &mut self.front {
                for item in shown {
                    iteration += 1;
                    front.show_valid(item, progress.clone(), epochs, iteration);
                }
            }
            let is_over = (0..self.ranks()).all(|rank| words.items(rank) == 0);
            if is_over || words.stop(&self.interrupter) {
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
}
