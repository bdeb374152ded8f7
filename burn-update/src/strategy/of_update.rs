//! What the loop asks of an [`Update`]. The Learner does not expose it: a request travels as an
//! entry of the gradients of a step that has no others.

use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::tensor::Device;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{Learner, LearningComponentsTypes, TrainingBackend, TrainingComponents};
use burn_decorator::gauge::Gauge;
use burn_decorator::message::short_name;
use burn_ranks::ProcessGroup;

use super::driver::{Driver, Position, RankDriver};
use crate::arrived::Request;
use crate::{Stateful, Update, UpdateError, UpdateProgress, UpdateStrategy};

impl<M, B> Update<M, B>
where
    M: AutodiffModule<B> + 'static,
    B: AutodiffBackend,
{
    /// The training loop of Burn's Learner for this update, with one rank: ask for it before the
    /// update moves into the Learner. See [`UpdateStrategy`].
    pub fn strategy<LC>(&self) -> UpdateStrategy<LC>
    where
        LC: LearningComponentsTypes<Backend = B>,
    {
        let gauges = self.stateful().into_iter().flat_map(Stateful::gauges);
        UpdateStrategy::driven(OfUpdate {
            progress: self.progress(),
            gauges: gauges.collect(),
        })
    }
}

/// What the loop asks of the update with this progress.
struct OfUpdate {
    progress: UpdateProgress,
    /// Of its parts.
    gauges: Vec<Gauge>,
}

impl<LC: LearningComponentsTypes> Driver<LC> for OfUpdate {
    fn check(
        &self,
        components: &TrainingComponents<LC>,
        world_size: usize,
    ) -> Result<(), UpdateError> {
        if let Some(steps) = components.grad_accumulation {
            return Err(UpdateError::Strategy(format!(
                "the Learner accumulates gradients itself (`grads_accumulation({steps})`), before the update sees them, and drops what \
                 is left at the end of an epoch: remove it, and give the update `.accumulate(AccumConfig::mean({steps}))`"
            )));
        }
        if world_size > 1 {
            return Err(UpdateError::Strategy(format!(
                "{world_size} ranks, but this update reduces no gradients over ranks: each would train a model of its own; use burn-zero's \
                 `ZeroOptimizer` and `ZeroStrategy`"
            )));
        }
        Ok(())
    }

    fn of_rank(
        &self,
        _: Arc<dyn ProcessGroup>,
        device: Device<TrainingBackend<LC>>,
    ) -> Box<dyn RankDriver<LC>> {
        Box::new(OfUpdateOn::<TrainingBackend<LC>> {
            progress: self.progress.clone(),
            device,
        })
    }

    fn position(&self) -> Option<Position> {
        self.progress.position()
    }

    fn gauges(&self) -> Vec<Gauge> {
        let progress = self.progress.clone();
        let read = move || progress.updates() as f64;
        let about = "Updates of the model, without steps that were skipped";
        let updates = Gauge::new("Updates", about, read(), read);
        let mut all = vec![updates.unit("updates").rising()];
        all.extend(self.gauges.iter().cloned());
        all
    }
}

/// What the loop asks of it on its one rank.
struct OfUpdateOn<B: AutodiffBackend> {
    progress: UpdateProgress,
    device: Device<B>,
}

impl<B: AutodiffBackend> OfUpdateOn<B> {
    /// Sends a request. Returns whether the update has got it.
    fn ask<LC>(&self, request: Request, learner: &mut Learner<LC>) -> bool
    where
        LC: LearningComponentsTypes<Backend = B>,
    {
        let before = self.progress.answers();
        learner.optimizer_step(request.as_gradients::<B::InnerBackend>(&self.device));
        self.progress.answers() > before
    }
}

impl<LC: LearningComponentsTypes> RankDriver<LC> for OfUpdateOn<TrainingBackend<LC>> {
    fn prepare(&self, learner: &mut Learner<LC>) -> Result<(), UpdateError> {
        learner.fork(&self.device);
        if self.ask(Request::Answer, learner) {
            return Ok(());
        }
        Err(UpdateError::Strategy(format!(
            "the strategy was made by another update than the Learner's, whose optimizer is {}: `let strategy = update.strategy();`, \
             then `Learner::new(model, update, schedule)` with this update",
            short_name::<LC::Optimizer>()
        )))
    }

    fn updates(&self) -> Option<u64> {
        Some(self.progress.updates())
    }

    fn set_position(&self, position: Position) {
        self.progress.set_position(Some(position));
    }

    fn flush(&self, learner: &mut Learner<LC>) {
        let is_answered = self.ask(Request::Flush, learner);
        assert!(
            is_answered,
            "the update has answered when the training began"
        );
    }
}
