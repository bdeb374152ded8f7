//! Guards: of several of one kind the newest is in force, whichever goes first.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::Tensor;
use burn_checkpoint::trace::{EventKind, record};
use burn_checkpoint::{MemoryBudget, Remat, RematStats, checkpoint};
use burn_flex::Flex;

use crate::apart::InstallApart;

type Vector = Tensor<Remat<Flex>, 1>;

const BYTES: u64 = 256;

fn input() -> Vector {
    Tensor::ones([64], &Default::default())
}

/// Makes a tensor of [`BYTES`] that stays and five that can come back: how many were evicted, and
/// how many of the six are there.
fn evicted() -> (u64, u64) {
    RematStats::reset_thread();
    let x = input();
    let held: Vec<_> = (0..5).map(|_| x.clone().cos()).collect();
    let stats = RematStats::of_thread();
    drop(held);
    (stats.evicted_operations, stats.live_bytes / BYTES)
}

fn nothing_is_in_force() -> bool {
    evicted() == (0, 0)
}

fn budget(tensors: u64) -> MemoryBudget {
    MemoryBudget::bytes(tensors * BYTES)
}

/// How a budget is changed.
#[test]
fn a_budget_that_is_reassigned() {
    let mut budget_of_now = budget(100).install_apart();
    assert_eq!(evicted(), (0, 6));
    budget_of_now = {
        let next = budget(2).install_apart();
        drop(budget_of_now);
        next
    };
    assert_eq!(evicted(), (4, 2));
    assert_eq!(budget_of_now.limit_bytes(), [Some(2 * BYTES)]);
    drop(budget_of_now);
    assert!(nothing_is_in_force());
}

#[test]
fn budgets_that_go_in_any_order() {
    let limits = [4, 100, 2];
    let alone = limits.map(|tensors| {
        let _budget = budget(tensors).install_apart();
        evicted()
    });
    assert!(alone[0].0 > 0 && alone[1].0 == 0 && alone[2].0 > alone[0].0);
    for order in [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ] {
        let mut guards = limits.map(|tensors| Some(budget(tensors).install_apart()));
        for gone in order {
            let newest = guards.iter().rposition(Option::is_some).expect("one");
            assert_eq!(evicted(), alone[newest], "{order:?}: {newest}");
            guards[gone] = None;
        }
        assert!(nothing_is_in_force(), "{order:?}");
    }
}

#[test]
fn a_panic_between_budgets() {
    let mut outer = budget(3).install_apart();
    let caught = catch_unwind(AssertUnwindSafe(|| {
        let _inner = budget(2).install_apart();
        outer = budget(100).install_apart();
        panic!("of the user");
    }));
    assert!(caught.is_err());
    assert_eq!(evicted().0, 0, "the one that was put in the outer's place");
    drop(outer);
    assert!(nothing_is_in_force());
}

fn allocations(events: &[burn_checkpoint::trace::Event]) -> usize {
    let alloc =
        |event: &&burn_checkpoint::trace::Event| matches!(event.kind, EventKind::Alloc { .. });
    events.iter().filter(alloc).count()
}

/// So many operations, in a scope.
fn run(operations: usize) {
    let x = input();
    checkpoint(|| (0..operations).fold(x, |x, _| x.cos()));
}

#[test]
fn a_recording_within_another_is_its_own() {
    let outer = record();
    run(1);
    let inner = record();
    run(2);
    assert_eq!(allocations(&inner.finish()), 2);
    run(4);
    assert_eq!(allocations(&outer.finish()), 5);
}

#[test]
fn a_recording_that_is_reassigned() {
    let first = record();
    let second = record();
    drop(first);
    run(2);
    assert_eq!(allocations(&second.take()), 2);
    drop(second);
    let third = record();
    assert!(third.take().is_empty());
}
