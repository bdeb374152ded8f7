//! A short training, for a trial.

use burn::{module::AutodiffModule, tensor::backend::AutodiffBackend, train::TrainStep};
use burn_decorator::{module::independent, ranks::copy_for_rank};
use burn_update::Update;

/// The micro-steps of each window of a rehearsal.
const WINDOWS: [usize; 2] = [2; 2];

/// Trains for a few micro-steps, as Burn's `Learner` does, and drops the result: a trial of
/// [`find_micro_batch`](super::find_micro_batch) then holds the same memory as the training.
///
/// The `update` must be that of the training, new. A window that is longer than two micro-batches
/// ends after two, which take as much memory as more. In the second window the update holds all
/// that it ever will (moments, sums, gradients), together with the activations.
///
/// Given clones of a training's model and update, it leaves the training as it was: running
/// statistics, which Burn shares between clones, and handles such as a loss scale or an
/// [`UpdateCounter`](crate::UpdateCounter), which clones of an update share, are copied first.
/// Random numbers that the steps draw come from the backend's generator, which Burn 0.21 can seed
/// but not read: call `Backend::seed` after the rehearsal where those that follow matter.
///
/// # Panics
///
/// With the message of an [`UpdateError`](burn_update::UpdateError), as a step in the Learner.
pub fn rehearse<B, M>(model: M, update: Update<M, B>, micro_batch: impl Fn() -> M::Input)
where
    B: AutodiffBackend,
    M: AutodiffModule<B> + TrainStep + 'static,
{
    /// It does not change memory; with 0 nothing can diverge.
    const LEARNING_RATE: f64 = 0.0;

    let mut rehearsed = independent::<B, M>(&model);
    let mut rehearsed_update = copy_for_rank(|| update.clone());
    // The training does not hold them twice either.
    drop((model, update));
    for micro_steps in WINDOWS {
        for _ in 0..micro_steps {
            let output = rehearsed.step(micro_batch());
            let before = rehearsed.clone();
            rehearsed = before.optimize(&mut rehearsed_update, LEARNING_RATE, output.grads);
        }
        let flushed = rehearsed_update.flush(LEARNING_RATE, rehearsed);
        rehearsed = flushed.unwrap_or_else(|error| panic!("{error}"));
    }
}
