//! A short training, for a trial.

use burn::{
    module::AutodiffModule, optim::Optimizer, tensor::backend::AutodiffBackend, train::TrainStep,
};

/// Micro-steps of a rehearsal: two windows of two.
const MICRO_STEPS: usize = 4;

/// Trains for a few micro-steps, as Burn's `Learner` does, and drops the result: a trial of
/// [`find_micro_batch`](super::find_micro_batch) then holds the same memory as the training.
///
/// The `optimizer` must be that of the training, new, and with windows of two micro-batches where the training has longer
/// ones. In the second window it holds all that it ever will (moments, sums, gradients), together with the activations. Make
/// model and optimizer for the rehearsal alone: handles such as a loss scale or
/// [`UpdateCounter`](crate::UpdateCounter) are shared by clones of an optimizer.
pub fn rehearse<B, M, O>(mut model: M, mut optimizer: O, micro_batch: impl Fn() -> M::Input)
where
    B: AutodiffBackend,
    M: AutodiffModule<B> + TrainStep,
    O: Optimizer<M, B>,
{
    for _ in 0..MICRO_STEPS {
        let output = model.step(micro_batch());
        // The learning rate does not change memory; with 0 nothing can diverge.
        model = model.clone().optimize(&mut optimizer, 0.0, output.grads);
    }
}
