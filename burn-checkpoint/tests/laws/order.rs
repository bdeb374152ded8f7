//! What a budget evicts first: no operation runs over and over again.

use burn::backend::Autodiff;
use burn::tensor::{Distribution, Tensor};
use burn_checkpoint::{MemoryBudget, Remat, RematStats};
use burn_flex::Flex;

use crate::apart::InstallApart;

type B = Autodiff<Remat<Flex>>;

const BLOCKS: usize = 40;

/// Blocks on a stream that autodiff does not save: it saves what exponentials give. `depth` of them
/// are in a block.
fn loss(x: Tensor<B, 2>, depth: usize) -> Tensor<B, 1> {
    let block = |x: Tensor<B, 2>| {
        let inner = (0..depth).fold(x.clone() * 0.1, |x, _| (x * 0.1).exp());
        x + inner * 0.01
    };
    (0..BLOCKS).fold(x, |x, _| block(x)).sum()
}

/// The operations that the second step replays, of how many that forward has, at most so many of
/// the bytes live.
fn replayed(depth: usize, fraction: f64) -> (u64, u64) {
    let device = Default::default();
    let budget = MemoryBudget::fraction(fraction).expect("a fraction");
    let budget = budget.install_apart();
    let x = Tensor::<B, 2>::random([16, 16], Distribution::Default, &device).require_grad();
    for _ in 0..2 {
        RematStats::reset_thread();
        let grads = loss(x.clone(), depth).backward();
        assert!(x.grad(&grads).is_some());
        drop(grads);
        budget.step();
    }
    let stats = RematStats::of_thread();
    assert!(stats.evicted_operations > 0, "{stats:?}");
    let operations = BLOCKS * (2 * depth + 3);
    (stats.replayed_operations, operations as u64)
}

/// Each block starts from the stream, of which nobody holds anything: if it were not kept in
/// places, a block would start from the first one.
#[test]
fn a_stream_that_nobody_holds_is_kept_where_replays_start() {
    for percent in [60, 40, 25] {
        let (replayed, operations) = replayed(1, f64::from(percent) / 100.0);
        println!("{percent} %: {replayed} replays of {operations} operations");
        assert!(replayed <= 2 * operations, "{percent} %: {replayed}");
    }
}

/// Of deeper blocks no operation runs more than once more.
#[test]
fn what_came_back_is_not_evicted_before_its_use() {
    for percent in [60, 40, 25] {
        let (replayed, operations) = replayed(8, f64::from(percent) / 100.0);
        println!("{percent} %: {replayed} replays of {operations} operations");
        assert!(replayed <= operations, "{percent} %: {replayed}");
    }
}
