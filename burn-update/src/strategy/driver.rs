//! What the loop asks of the optimizer inside a Learner, which the Learner does not expose.

use core::fmt;
use core::num::NonZeroU64;
use std::sync::Arc;

use burn::tensor::Device;
use burn::train::{Learner, LearningComponentsTypes, TrainingBackend, TrainingComponents};
use burn_decorator::gauge::Gauge;
use burn_ranks::ProcessGroup;

use crate::UpdateError;

/// What the loop of an [`UpdateStrategy`](crate::UpdateStrategy) asks of a Learner's optimizer: one
/// value for a training, which makes one [`RankDriver`] for each rank.
///
/// `update.strategy()` has that of an [`Update`](crate::Update).
pub trait Driver<LC: LearningComponentsTypes>: Send + Sync {
    /// Checks what `SupervisedTraining` was given, before anything is started.
    ///
    /// # Errors
    ///
    /// Why it cannot be trained.
    fn check(
        &self,
        components: &TrainingComponents<LC>,
        world_size: usize,
    ) -> Result<(), UpdateError>;

    /// What the loop of one rank asks. Called on the rank's thread, where clones of handles that the
    /// Learner shares are the rank's own.
    fn of_rank(
        &self,
        group: Arc<dyn ProcessGroup>,
        device: Device<TrainingBackend<LC>>,
    ) -> Box<dyn RankDriver<LC>>;

    /// Where the training begins in the data, if the optimizer's record says so; otherwise it
    /// begins with an epoch, as Burn's.
    fn position(&self) -> Option<Position> {
        None
    }

    /// What a training shows of the optimizer.
    fn gauges(&self) -> Vec<Gauge> {
        Vec::new()
    }
}

/// What the loop asks on one rank. All ranks make the same calls in the same order, so each may
/// make collectives.
pub trait RankDriver<LC: LearningComponentsTypes> {
    /// Puts the Learner's model on the rank's device, ready for its first step.
    ///
    /// # Errors
    ///
    /// Why this optimizer cannot train it.
    fn prepare(&self, learner: &mut Learner<LC>) -> Result<(), UpdateError>;

    /// Updates since the training began, those before a resumption included, the same on all ranks;
    /// `None` if each step is one.
    fn updates(&self) -> Option<u64> {
        None
    }

    /// Notes where the training is in the data, for a record that is made now.
    fn set_position(&self, position: Position) {
        let _ = position;
    }

    /// Applies a window that is not complete, with its true weights. By default there are no
    /// windows.
    fn flush(&self, learner: &mut Learner<LC>) {
        let _ = learner;
    }

    /// After the last step before a validation or a record: gives all ranks the same running
    /// statistics.
    ///
    /// # Errors
    ///
    /// Those of the group.
    fn share_statistics(&self, learner: &mut Learner<LC>) -> Result<(), UpdateError> {
        let _ = learner;
        Ok(())
    }

    /// Whether a forward pass gathers parameters from all ranks, so that all must make it.
    fn gathers_parameters(&self) -> bool {
        false
    }

    /// The model to validate with in place of the Learner's: that of the averages, if the optimizer
    /// keeps averages of the weights and has made an update.
    ///
    /// # Errors
    ///
    /// Those of the group.
    fn averaged(
        &self,
        learner: &mut Learner<LC>,
    ) -> Result<Option<LC::InferenceModel>, UpdateError> {
        let _ = learner;
        Ok(None)
    }

    /// Calls `write`, which only rank 0 has, with a Learner whose record is that of all ranks.
    ///
    /// # Errors
    ///
    /// Those of the group, and of the record.
    fn record(
        &self,
        learner: &mut Learner<LC>,
        write: Option<WriteRecord<'_, LC>>,
    ) -> Result<(), UpdateError> {
        if let Some(write) = write {
            write(learner);
        }
        Ok(())
    }

    /// Makes the model that the training returns, on rank 0 with all parameters.
    ///
    /// # Errors
    ///
    /// Those of the group.
    fn finish(&self, learner: &mut Learner<LC>) -> Result<(), UpdateError> {
        let _ = learner;
        Ok(())
    }
}

/// Writes a record of a Learner, if one is due.
pub type WriteRecord<'a, LC> = &'a mut dyn FnMut(&Learner<LC>);

/// Where a training is in its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The pass over the data, counted from 1.
    pub epoch: usize,
    /// Batches of a rank's part that were trained on in it.
    pub batches: usize,
}

impl Position {
    /// The beginning of an epoch.
    pub fn epoch(epoch: usize) -> Self {
        Self { epoch, batches: 0 }
    }
}

/// What happens to a window that is not complete when an epoch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EpochTail {
    /// It is an update, of the micro-batches that are in it (Accelerate, Lightning; these divide by
    /// the full length). The default.
    #[default]
    Apply,
    /// It continues in the next epoch (DeepSpeed), and the record holds it. Use it where epochs
    /// only interrupt an endless stream to validate and to save. A window open at the end of
    /// training is applied to the returned model, and also remains in the record: training that is
    /// resumed continues as if it had not ended. Resumed with nothing left to do, it returns the
    /// model without that window, since there is no learning rate to apply it with.
    Carry,
}

/// When a training ends, and how often it is validated and recorded, if not by epochs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counting {
    /// Updates after which it ends.
    pub(super) until: Option<u64>,
    /// Updates that take the place of an epoch.
    pub(super) interval: Option<NonZeroU64>,
}

/// As the end of a text that ranks compare; empty for a training by epochs.
impl fmt::Display for Counting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(until) = self.until {
            write!(f, ", until {until} updates")?;
        }
        if let Some(interval) = self.interval {
            write!(f, ", in intervals of {interval} updates")?;
        }
        Ok(())
    }
}
