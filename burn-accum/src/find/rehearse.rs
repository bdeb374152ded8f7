//! A short training, for a trial.

use burn::{
    module::AutodiffModule, optim::Optimizer, tensor::backend::AutodiffBackend, train::TrainStep,
};

use crate::flush;

/// The micro-steps of each window of a rehearsal.
const WINDOWS: [usize; 2] = [2; 2];

/// Trains for a few micro-steps, as Burn's `Learner` does, and drops the result: a trial of
/// [`find_micro_batch`](super::find_micro_batch) then holds the same memory as the training.
///
/// The `optimizer` must be that of the training, new. A window that is longer than two micro-batches ends after two, which take as much
/// memory as more. In the second window the optimizer holds all that it ever will (moments, sums, gradients), together with the activations. Make
/// model and optimizer for the rehearsal alone: handles such as a loss scale or
/// [`UpdateCounter`](crate::UpdateCounter) are shared by clones of an optimizer.
pub fn rehearse<B, M, O>(mut model: M, mut optimizer: O, micro_batch: impl Fn() -> M::Input)
where
    B: AutodiffBackend,
    M: AutodiffModule<B> + TrainStep,
    O: Optimizer<M, B>,
{
    for micro_steps in WINDOWS {
        // The learning rate does not change memory; with 0 nothing can diverge.
        let mut optimize = |model: &M, grads| model.clone().optimize(&mut optimizer, 0.0, grads);
        for _ in 0..micro_steps {
            let output = model.step(micro_batch());
            model = optimize(&model, output.grads);
        }
        model = flush(|nothing| optimize(&model, nothing));
    }
}
