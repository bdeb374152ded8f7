//! GPT-2's initial weights.

use burn::module::{Initializer, Module, ModuleVisitor, Param};
use burn::prelude::*;

/// Embeddings and projections (Radford et al. 2019).
pub(super) const WEIGHT: Initializer = Initializer::Normal {
    mean: 0.0,
    std: 0.02,
};

/// For the projections that write to the residual stream: scaled so that the variance of the sum of all branches does not grow
/// with the depth.
pub(super) fn residual_weight(layers: usize) -> Initializer {
    let branches = 2 * layers;
    Initializer::Normal {
        mean: 0.0,
        std: 0.02 / (branches as f64).sqrt(),
    }
}

/// Draws every weight now.
///
/// Burn draws a parameter at its first use, and a clone made before that draws values of its own: a model that is
/// cloned, trained or saved must have been drawn.
pub(super) fn draw_weights<B: Backend, M: Module<B>>(module: &M) {
    struct Draw;
    impl<B: Backend> ModuleVisitor<B> for Draw {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            param.val();
        }
    }
    module.visit(&mut Draw);
}
