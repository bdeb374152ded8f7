//! What the loop asks of an [`Update`]. The Learner does not expose it: a request travels as an
//! entry of the gradients of a step that has no others.

use core::cell::Cell;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::tensor::Device;
use burn::tensor::backend::{AutodiffBackend, Device as _};
use burn::train::{Learner, LearningComponentsTypes, TrainingBackend, TrainingComponents};
use burn_decorator::gauge::Gauge;
use burn_ranks::ProcessGroup;

use super::driver::{Driver, Position, RankDriver, WriteRecord};
use crate::arrived::Request;
use crate::short_name::short_name;
use crate::{LoopRequest, Stateful, Update, UpdateError, UpdateProgress, UpdateStrategy};

impl<M, B> Update<M, B>
where
    M: AutodiffModule<B> + 'static,
    B: AutodiffBackend,
{
    /// The training loop of Burn's Learner for this update: ask for it before the update moves into
    /// the Learner. It has one rank, and more by [`UpdateStrategy::threads`] or
    /// [`UpdateStrategy::process`] if the update reduces its gradients over ranks (burn-zero's
    /// `.reduce_in_learner(settings)`).
    pub fn strategy<LC>(&self) -> UpdateStrategy<LC>
    where
        LC: LearningComponentsTypes<Backend = B> + 'static,
    {
        let gauges = self.stateful().into_iter().flat_map(Stateful::gauges);
        UpdateStrategy::driven(OfUpdate {
            progress: self.progress(),
            reduces: self.reduces(),
            gauges: gauges.collect(),
        })
    }
}

/// What the loop asks of the update with this progress.
struct OfUpdate {
    progress: UpdateProgress,
    /// Whether it reduces gradients over ranks.
    reduces: bool,
    /// Of its parts.
    gauges: Vec<Gauge>,
}

impl<LC: LearningComponentsTypes + 'static> Driver<LC> for OfUpdate {
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
        if world_size > 1 && !self.reduces {
            return Err(UpdateError::Strategy(format!(
                "{world_size} ranks, but this update reduces no gradients over ranks: each would train a model of its own; give it burn-zero's \
                 `.reduce_in_learner(ZeroSettings::stage(Stage::Gradients))?`"
            )));
        }
        Ok(())
    }

    fn of_rank(
        &self,
        group: Arc<dyn ProcessGroup>,
        device: Device<TrainingBackend<LC>>,
    ) -> Box<dyn RankDriver<LC>> {
        let progress = self.progress.clone();
        if self.reduces {
            Box::new(OverRanks::<TrainingBackend<LC>> {
                progress,
                group,
                device,
                gathers_parameters: Cell::new(false),
            })
        } else {
            Box::new(OnOneRank::<TrainingBackend<LC>> { progress, device })
        }
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

/// Sends a request to the update with this progress. Returns whether it has got it.
fn send<LC>(
    request: Request,
    progress: &UpdateProgress,
    learner: &mut Learner<LC>,
    device: &Device<TrainingBackend<LC>>,
) -> bool
where
    LC: LearningComponentsTypes,
{
    type Inner<LC> = <TrainingBackend<LC> as AutodiffBackend>::InnerBackend;
    let before = progress.answers();
    learner.optimizer_step(request.as_gradients::<Inner<LC>>(device));
    progress.answers() > before
}

/// Applies an open window of the update with this progress.
fn flush<LC: LearningComponentsTypes>(
    progress: &UpdateProgress,
    learner: &mut Learner<LC>,
    device: &Device<TrainingBackend<LC>>,
) {
    let is_answered = send(Request::Flush, progress, learner, device);
    assert!(
        is_answered,
        "the update has answered when the training began"
    );
}

/// The model of the averages of the update with this progress, if it has any.
///
/// # Errors
///
/// Those of [`Update::averaged`].
fn averaged<LC: LearningComponentsTypes + 'static>(
    progress: &UpdateProgress,
    learner: &mut Learner<LC>,
    device: &Device<TrainingBackend<LC>>,
) -> Result<Option<LC::InferenceModel>, UpdateError> {
    send(Request::Average, progress, learner, device);
    let averaged = progress.take_averaged().transpose()?;
    Ok(averaged.map(|model| {
        let model = model.downcast::<LC::InferenceModel>();
        *model.expect("the update is of the Learner's model")
    }))
}

/// The error of a request that has reached no update of the strategy.
fn other_update<LC: LearningComponentsTypes>() -> UpdateError {
    UpdateError::Strategy(format!(
        "the strategy was made by another update than the Learner's, whose optimizer is {}: `let strategy = update.strategy();`, \
         then `Learner::new(model, update, schedule)` with this update",
        short_name::<LC::Optimizer>()
    ))
}

/// What the loop asks of an update without a reduction, on its one rank.
struct OnOneRank<B: AutodiffBackend> {
    progress: UpdateProgress,
    device: Device<B>,
}

impl<LC: LearningComponentsTypes + 'static> RankDriver<LC> for OnOneRank<TrainingBackend<LC>> {
    fn prepare(&self, learner: &mut Learner<LC>) -> Result<(), UpdateError> {
        learner.fork(&self.device);
        if send(Request::Answer, &self.progress, learner, &self.device) {
            Ok(())
        } else {
            Err(other_update::<LC>())
        }
    }

    fn updates(&self) -> Option<u64> {
        Some(self.progress.updates())
    }

    fn set_position(&self, position: Position) {
        self.progress.set_position(Some(position));
    }

    fn flush(&self, learner: &mut Learner<LC>) {
        flush(&self.progress, learner, &self.device);
    }

    fn averaged(
        &self,
        learner: &mut Learner<LC>,
    ) -> Result<Option<LC::InferenceModel>, UpdateError> {
        averaged(&self.progress, learner, &self.device)
    }
}

/// What the loop asks of an update that reduces gradients, on one of its ranks.
struct OverRanks<B: AutodiffBackend> {
    /// Of the rank's own copy of the update.
    progress: UpdateProgress,
    group: Arc<dyn ProcessGroup>,
    device: Device<B>,
    /// As the update's last answer says.
    gathers_parameters: Cell<bool>,
}

impl<B: AutodiffBackend> OverRanks<B> {
    /// Asks the reduction in the update.
    ///
    /// # Errors
    ///
    /// What the reduction says; [`UpdateError::Strategy`] if the request has reached no update.
    fn ask<LC>(&self, request: LoopRequest, learner: &mut Learner<LC>) -> Result<(), UpdateError>
    where
        LC: LearningComponentsTypes<Backend = B>,
    {
        self.progress.ask(request);
        send(Request::Ranks, &self.progress, learner, &self.device);
        let served = self.progress.take_served();
        let served = served.unwrap_or_else(|| Err(other_update::<LC>()))?;
        self.gathers_parameters.set(served.gathers_parameters);
        Ok(())
    }
}

impl<LC: LearningComponentsTypes + 'static> RankDriver<LC> for OverRanks<TrainingBackend<LC>> {
    fn prepare(&self, learner: &mut Learner<LC>) -> Result<(), UpdateError> {
        let prepare = LoopRequest::Prepare {
            group: self.group.clone(),
            device: self.device.to_id(),
        };
        self.ask(prepare, learner)
    }

    fn updates(&self) -> Option<u64> {
        Some(self.progress.updates())
    }

    fn set_position(&self, position: Position) {
        self.progress.set_position(Some(position));
    }

    fn flush(&self, learner: &mut Learner<LC>) {
        flush(&self.progress, learner, &self.device);
    }

    fn averaged(
        &self,
        learner: &mut Learner<LC>,
    ) -> Result<Option<LC::InferenceModel>, UpdateError> {
        averaged(&self.progress, learner, &self.device)
    }

    fn share_statistics(&self, learner: &mut Learner<LC>) -> Result<(), UpdateError> {
        self.ask(LoopRequest::ShareStatistics, learner)
    }

    fn gathers_parameters(&self) -> bool {
        self.gathers_parameters.get()
    }

    fn record(
        &self,
        learner: &mut Learner<LC>,
        write: Option<WriteRecord<'_, LC>>,
    ) -> Result<(), UpdateError> {
        self.ask(LoopRequest::BeginRecord, learner)?;
        if let Some(write) = write {
            write(learner);
        }
        self.group.barrier("rank 0 has written its record")?;
        self.ask(LoopRequest::EndRecord, learner)
    }

    fn finish(&self, learner: &mut Learner<LC>) -> Result<(), UpdateError> {
        self.ask(LoopRequest::Finish, learner)
    }
}
