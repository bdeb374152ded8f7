//! The passes over the data: Burn's loop, reimplemented because its own is private.

use burn::{
    data::dataloader::Progress,
    module::AutodiffModule,
    train::{
        EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent,
        LearningComponentsTypes, SupervisedTrainingEventProcessor, TrainLoader, TrainingItem,
        ValidLoader,
    },
};

use super::EpochTail;
use crate::{UpdateCounter, flush};

/// A training that is going on.
pub(super) struct Training<LC: LearningComponentsTypes> {
    pub(super) learner: Learner<LC>,
    pub(super) train: TrainLoader<LC>,
    pub(super) valid: ValidLoader<LC>,
    pub(super) processor: SupervisedTrainingEventProcessor<LC>,
    pub(super) interrupter: Interrupter,
    pub(super) updates: UpdateCounter,
    /// Since this training began or was resumed.
    pub(super) micro_batches: u64,
}

impl<LC: LearningComponentsTypes> Training<LC> {
    /// Trains on all of the data, or until interrupted. `epochs` tells the number of this one.
    pub(super) fn train(&mut self, epochs: &Progress, tail: EpochTail) {
        let epoch = epochs.items_processed;
        log::info!("Executing training step for epoch {epoch}");
        let updates_before = self.updates.updates();

        // A clone, because the pass borrows `self`.
        let loader = self.train.clone();
        let mut batches = loader.iter();
        while let Some(batch) = batches.next() {
            self.micro_batches += 1;
            self.learner.lr_step();
            let progress = batches.progress();
            let output = self.learner.train_step(batch);
            self.learner.optimizer_step(output.grads);

            // Fewer than before if a scaler has undone an update of the last epoch.
            let updates = self.updates.updates().saturating_sub(updates_before);
            log::info!(
                "Micro-batch {}, {updates} updates in epoch {epoch}",
                self.micro_batches
            );
            let item = TrainingItem::new(
                output.item,
                progress,
                epochs.clone(),
                Some(updates as usize),
                Some(self.learner.lr_current()),
            );
            self.processor
                .process_train(LearnerEvent::ProcessedItem(item));
            if self.interrupter.should_stop() {
                break;
            }
        }
        if tail == EpochTail::Apply {
            self.apply_window();
        }
        self.processor.process_train(LearnerEvent::EndEpoch(epoch));
    }

    /// Whether to stop; the reason goes to the log.
    pub(super) fn is_interrupted(&self) -> bool {
        let interrupted = self.interrupter.should_stop();
        if interrupted {
            let reason = self.interrupter.get_message();
            let reason = reason.unwrap_or_else(|| "Reason unknown".to_owned());
            log::info!("Training interrupted: {reason}");
        }
        interrupted
    }

    /// Applies the partial window, at the learning rate of its last micro-batch. Does nothing if
    /// this training had no micro-batch, because then there is no learning rate.
    pub(super) fn apply_window(&mut self) {
        if self.micro_batches == 0 {
            return;
        }
        // Regardless of the counter: a scaler with deferred detection may undo an update, which
        // opens the window again.
        flush(|nothing| self.learner.optimizer_step(nothing));
    }

    /// Validates on all of the data, or until interrupted.
    pub(super) fn validate(&mut self, epochs: &Progress) {
        let epoch = epochs.items_processed;
        log::info!("Executing validation step for epoch {epoch}");
        let model = self.learner.model().valid();

        let loader = self.valid.clone();
        let mut batches = loader.iter();
        let mut iteration = 0;
        while let Some(batch) = batches.next() {
            let progress = batches.progress();
            iteration += 1;
            let item = TrainingItem::new(
                model.step(batch),
                progress,
                epochs.clone(),
                Some(iteration),
                None,
            );
            self.processor
                .process_valid(LearnerEvent::ProcessedItem(item));
            if self.interrupter.should_stop() {
                break;
            }
        }
        self.processor.process_valid(LearnerEvent::EndEpoch(epoch));
        self.settle_metrics();
    }

    /// Waits until the loggers have the metrics of all items, because early stopping and the choice
    /// of records read them there; Burn may decide without the last ones. Burn's file logger may
    /// still be read before it has written.
    ///
    /// The channel to the thread that computes metrics holds one event, so it accepts the second
    /// event here only when all events before the first have been handled. `Start` of a validation
    /// has no effect on metrics.
    fn settle_metrics(&mut self) {
        for _ in 0..2 {
            self.processor.process_valid(LearnerEvent::Start);
        }
    }
}
