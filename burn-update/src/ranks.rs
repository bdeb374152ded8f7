//! What the parts of an update ask the other ranks, where several train one model.

use core::fmt::Debug;

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
