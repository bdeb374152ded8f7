//! Which micro-batches are non-finite, on any rank.

use burn::{
    module::AutodiffModule,
    tensor::{Tensor, backend::AutodiffBackend},
};
use burn_decorator::gradient::non_finite_on_any_rank;
use burn_decorator::non_finite::{Inspection, Probe, non_finite_paths};

use crate::arrived::Arrived;

/// The result of one host read of a micro-step.
pub(crate) struct Findings {
    /// Paths of the parameters with a non-finite gradient on any rank: in module order, or in that of their names if there are
    /// several ranks.
    pub(crate) culprits: Vec<String>,
    /// The values of the counts, from the same host read.
    pub(crate) counts: Vec<f64>,
}

/// Finds non-finite gradients on all ranks and, in the same host read, reads the `counts` that were taken out of them. It reduces each
/// gradient to a sum, and checks exactly only where a sum is not finite.
pub(crate) fn inspect<B, M>(
    module: &M,
    arrived: &Arrived,
    counts: Vec<Tensor<B::InnerBackend, 1>>,
) -> Findings
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    let sums = Inspection::new::<B, M>(module, arrived, Probe::Sum);
    let (finite, counts) = sums.has_finite_sums(counts);
    let culprits = match finite {
        true => Vec::new(),
        false => non_finite_paths::<B, M>(module, arrived),
    };
    // All ranks drop a micro-batch, or none: otherwise their parameters would differ.
    let culprits = non_finite_on_any_rank(culprits);
    Findings { culprits, counts }
}
