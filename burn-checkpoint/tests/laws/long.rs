//! Very many tensors: time must not grow faster than their number.

use burn::tensor::{Tensor, TensorData};
use burn_checkpoint::{MemoryBudget, Remat, RematStats};
use burn_flex::Flex;

use crate::apart::InstallApart;

/// Bytes of a tensor; those of one number are taken for a step's results.
const BYTES: u64 = 16;

/// A chain whose every tensor is held, as a tape does, under a budget for so many of them; read
/// from the last to the first.
fn held(length: usize, live: usize) -> RematStats {
    RematStats::reset_thread();
    let budget = MemoryBudget::bytes(live as u64 * BYTES).install_apart();
    let x = Tensor::<Remat<Flex>, 1>::from_floats([1.0, 2.0, 3.0, 4.0], &Default::default());
    let mut tape = vec![x];
    for index in 0..length {
        let x = tape[index].clone();
        tape.push(if index % 2 == 0 { x + 1.0 } else { x * 0.5 });
    }
    assert!(budget.peak_bytes() <= live as u64 * BYTES);
    let mut expected = vec![[1.0f32, 2.0, 3.0, 4.0]];
    for index in 0..length {
        let step = |x: f32| if index % 2 == 0 { x + 1.0 } else { x * 0.5 };
        expected.push(expected[index].map(step));
    }
    while let (Some(found), Some(expected)) = (tape.pop(), expected.pop()) {
        assert_eq!(found.into_data(), TensorData::from(expected));
    }
    RematStats::of_thread()
}

#[test]
fn a_hundred_thousand_live_tensors_under_a_budget() {
    let stats = held(200_000, 100_000);
    println!("{stats:?}");
    // Every other tensor is dropped, and computed once more when it is read.
    assert!(
        (100_000..130_000).contains(&stats.evicted_operations),
        "{stats:?}"
    );
    assert!(
        (100_000..200_000).contains(&stats.replayed_operations),
        "{stats:?}"
    );
    assert_eq!(stats.live_bytes, 0);
}

#[test]
fn few_of_many_under_a_budget() {
    let stats = held(10_000, 1_000);
    println!("{stats:?}");
    assert!(stats.replayed_operations < 2 * 10_000, "{stats:?}");
}

/// Which tensors are evicted depends on nothing but the program.
#[test]
fn many_are_evicted_alike_in_every_run() {
    let counts = |stats: RematStats| (stats.evicted_operations, stats.replayed_operations);
    assert_eq!(counts(held(12_000, 5_000)), counts(held(12_000, 5_000)));
}
