//! What dropout's draws hold beside recomputed blocks.

use burn::backend::Autodiff;
use burn::tensor::backend::Backend;
use burn_checkpoint::{Remat, RematStats};
use examples::gpt::model::GptConfig;
use examples::training::recompute::Checkpoint;

use super::{Training, counters, in_use, turn};

/// Bytes that the tape holds after the forward pass of the gpt example's model, four recomputed
/// blocks: on the device, and as they are counted.
fn held<I: Backend>(dropout: f64) -> (u64, u64) {
    type B<I> = Autodiff<Remat<I>>;
    let config = GptConfig::new(256, 4, 2, 64)
        .with_vocabulary(16)
        .with_dropout(dropout);
    let training = Training::<B<I>>::new(&config, Checkpoint::Block, 4);
    drop(training.loss().backward());
    RematStats::reset_thread();
    let before = in_use::<B<I>>(counters::<I>());
    let loss = training.loss();
    let held = in_use::<B<I>>(counters::<I>()) - before;
    let counted = RematStats::of_thread().live_bytes;
    drop(loss.backward());
    (held, counted)
}

fn dropout_adds_at_most_a_tenth<I: Backend>() {
    let _turn = turn();
    let (without, counted_without) = held::<I>(0.0);
    let (with, counted_with) = held::<I>(0.1);
    let name = I::name(&I::Device::default());
    println!(
        "{name}: {without} B without, {with} B with; counted {counted_without}, {counted_with}"
    );
    // A bit for each of 4 x 256 x 64 numbers: two draws a block and one of the embedding.
    assert_eq!(counted_with - counted_without, 9 * 4 * 256 * 64 / 8);
    assert!(with as f64 <= 1.10 * without as f64, "{with} of {without}");
}

tests::on_counted_backends!(dropout_adds_at_most_a_tenth);
