//! A short training, for a trial.

use burn::{
    module::AutodiffModule, optim::Optimizer, tensor::backend::AutodiffBackend, train::TrainStep,
};
use burn_decorator::{module::independent, ranks::copy_for_rank};

use crate::flush;

/// The micro-steps of each window of a rehearsal.
const WINDOWS: [usize; 2] = [2; 2];

/// Trains for a few micro-steps, as Burn's `Learner` does, and drops the result: a trial of
/// [`find_micro_batch`](super::find_micro_batch) then holds the same memory as the training.
///
/// The `optimizer` must be that of the training, new. A window that is longer than two
/// micro-batches ends after two, which take as much memory as more. In the second window the
/// optimizer holds all that it ever will (moments, sums, gradients), together with the activations.
///
/// Given clones of a training's model and optimizer, it leaves the training as it was: running
/// statistics, which Burn shares between clones, and handles such as a loss scale or an
/// [`UpdateCounter`](crate::UpdateCounter), which clones of an optimizer share, are copied first.
/// Random numbers that the steps draw come from the backend's generator, which Burn 0.21 can seed
/// but not read: call `Backend::seed` after the rehearsal where those that follow matter.
pub fn rehearse<B, M, O>(model: M, optimizer: O, micro_batch: impl Fn() -> M::Input)
where
    B: AutodiffBackend,
    M: AutodiffModule<B> + TrainStep,
    O: Optimizer<M, B>,
{
    let mut rehearsed = independent::<B, M>(&model);
    let mut rehearsed_optimizer = copy_for_rank(|| optimizer.clone());
    // The training does not hold them twice either.
    drop((model, optimizer));
    for micro_steps in WINDOWS {
        // The learning rate does not change memory; with 0 nothing can diverge.
        let optimizer = &mut rehearsed_optimizer;
        let mut optimize = |model: &M, grads| model.clone().optimize(optimizer, 0.0, grads);
        for _ in 0..micro_steps {
            let output = rehearsed.step(micro_batch());
            rehearsed = optimize(&rehearsed, output.grads);
        }
        rehearsed = flush(|nothing| optimize(&rehearsed, nothing));
    }
}
