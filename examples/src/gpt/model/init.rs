//! GPT-2's initial weights.

use burn::module::Initializer;

/// Embeddings and projections (Radford et al. 2019).
pub(super) const WEIGHT: Initializer = Initializer::Normal {
    mean: 0.0,
    std: 0.02,
};

/// For the projections that write to the residual stream: scaled so that the variance of the sum of
/// all branches does not grow with the depth.
pub(super) fn residual_weight(layers: usize) -> Initializer {
    let branches = 2 * layers;
    Initializer::Normal {
        mean: 0.0,
        std: 0.02 / (branches as f64).sqrt(),
    }
}
