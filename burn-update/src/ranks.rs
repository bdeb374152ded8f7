//! What the parts of an update ask the other ranks, where several train one model, and what a
//! training loop over ranks asks of an update.

use core::fmt::Debug;
use std::sync::Arc;

use burn::tensor::backend::DeviceId;
use burn_ranks::ProcessGroup;

use crate::UpdateError;

/// The ranks that train one model together: burn-zero's reduction brings them, and a part finds
/// them in [`Step::ranks`](crate::Step::ranks). Each question is a collective: all ranks ask it, in
/// the same order.
pub trait Ranks: Debug + Send + Sync {
    /// The names of the parameters with a non-finite gradient on any rank, from those of this rank:
    /// sorted, and the same on all of them. A part that skips a step or drops a micro-batch because
    /// of them asks it once for each decision, even if this rank found none.
    ///
    /// # Errors
    ///
    /// That a rank is lost, or that ranks ask different questions.
    fn non_finite_on_any(&self, own: Vec<String>) -> Result<Vec<String>, UpdateError>;

    /// The number of items (tokens) that normalizes reduced gradients, from that of this rank.
    ///
    /// # Errors
    ///
    /// That a rank is lost, or that ranks ask different questions.
    fn items(&self, own: f64) -> Result<f64, UpdateError>;
}

/// What the training loop of a Learner asks of the reduction over ranks in its update, which the
/// Learner does not expose: see [`Optimize::serve`](crate::Optimize::serve). All ranks ask the same,
/// in the same order.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LoopRequest {
    /// To take the ranks of this group, and to return the model on this rank's device, with rank 0's
    /// weights, and with leaves and running statistics of its own. State that was loaded is that of
    /// the whole model, and is cut to this rank's shards.
    Prepare {
        /// The ranks.
        group: Arc<dyn ProcessGroup>,
        /// This rank's device.
        device: DeviceId,
    },
    /// To give all ranks the running statistics of rank 0.
    ShareStatistics,
    /// To return a model that rank 0 uses alone, whole, and on rank 0 to
    /// [save](crate::Stateful::save) the state of all ranks until the record is written.
    BeginRecord,
    /// That the record is written: to return this rank's model for the next step.
    EndRecord,
    /// To return the trained model, on rank 0 with all parameters.
    Finish,
}
