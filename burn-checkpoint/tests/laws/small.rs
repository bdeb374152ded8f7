//! Many small operations under a budget: searches and replays cost in proportion to the operations.

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn_checkpoint::{MemoryBudget, Policy, Remat, RematStats, checkpoint_with, trace};
use burn_flex::Flex;

use crate::apart::InstallApart;
use crate::many::{Ctc, Lstm, Step};
use crate::models::generator;

type B = Autodiff<Remat<Flex>>;

/// The counters of a step under so many parts of the bytes that it takes without a limit.
fn limited(step: &impl Step<B>, fraction: f64) -> RematStats {
    let budget = MemoryBudget::fraction(fraction).expect("a fraction");
    let budget = budget.install_apart();
    let plain = step.run();
    budget.step();
    RematStats::reset_thread();
    let found = step.run();
    assert_eq!(plain, found);
    let stats = RematStats::of_thread();
    println!("{fraction}: {stats:?}");
    stats
}

/// Of a CTC loss a time step has 41 operations. A longer one takes no more of each time step, and
/// replays fewer operations than its forward pass has.
#[test]
fn searches_and_replays_grow_with_the_operations() {
    let _generator = generator();
    for (time, fraction) in [(50, 0.37), (60, 0.37), (100, 0.37), (100, 0.6), (200, 0.37)] {
        let stats = limited(&Ctc::new(time), fraction);
        let operations = 41 * time as u64;
        assert!(stats.replayed_operations < operations, "{stats:?}");
        assert!(
            2 * stats.searched_tensors < 5 * operations,
            "{time}: {stats:?}"
        );
        assert_eq!(stats.thrashing_steps, 0, "{time}");
    }
}

#[test]
fn an_lstm_under_a_budget() {
    let _generator = generator();
    let stats = limited(&Lstm::new(), 0.4);
    assert!(stats.replayed_operations < 850, "{stats:?}");
    assert!(
        stats.searched_tensors < 5 * stats.evicted_operations,
        "{stats:?}"
    );
    assert_eq!(stats.thrashing_steps, 0);
}

/// A budget begins without what the thread has recorded before, which differs between ranks:
/// neither numbers of operations nor sizes of results, which are larger than their operands here.
#[test]
fn what_is_evicted_is_that_of_the_budget_alone() {
    let column = Tensor::<B, 2>::ones([128, 1], &Default::default()).require_grad();
    let held = || column.clone().repeat_dim(1, 32).exp();
    let steps = || {
        let _budget = MemoryBudget::bytes(200_000).install_apart();
        [(); 4].map(|()| {
            RematStats::reset_thread();
            let held: Vec<_> = (0..11).map(|_| held()).collect();
            let product = column.clone().matmul(column.clone().transpose());
            let sums = held.into_iter().map(Tensor::sum);
            sums.fold(product.sum(), Tensor::add).backward();
            let stats = RematStats::of_thread();
            let counts = (stats.evicted_operations, stats.replayed_operations);
            (counts, stats.peak_bytes, stats.searched_tensors)
        })
    };
    let first = steps();
    assert!(first[0].0.0 > 0, "{first:?}");
    assert_eq!(first, steps());
}

/// A step that is the same program as the one before evicts the same tensors without a search; one
/// that is not searches as ever.
#[test]
fn a_step_repeats_the_evictions_of_the_one_before() {
    let _generator = generator();
    let programs = [Ctc::<B>::new(40), Ctc::new(50)];
    let plain = programs.each_ref().map(Step::run);
    let limit = 200_000;
    let _budget = MemoryBudget::bytes(limit).install_apart();
    let steps = [0, 0, 0, 0, 1, 1, 0, 1, 0, 0].map(|program| {
        RematStats::reset_thread();
        assert_eq!(programs[program].run(), plain[program]);
        let stats = RematStats::of_thread();
        assert!(stats.peak_bytes <= limit, "{stats:?}");
        let counts = (stats.evicted_operations, stats.replayed_operations);
        assert!(counts.0 > 100, "{stats:?}");
        (counts, stats.searched_tensors > 0)
    });
    // The sizes of results are learnt in the first step.
    let searches = steps.map(|(_, searches)| searches);
    let expected = [
        true, true, false, false, true, false, true, true, true, false,
    ];
    assert_eq!(searches, expected, "{steps:?}");
    let counts = steps.map(|(counts, _)| counts);
    assert!(
        counts[1..4].iter().all(|count| *count == counts[1]),
        "{steps:?}"
    );
    assert_eq!(counts[4], counts[5]);
    assert_eq!(counts[8], counts[9]);
    // In a trace gradients are nodes: the evictions are the same, as they have to be on all ranks
    // if one of them records.
    for traced in [true, false] {
        let recording = traced.then(trace::record);
        RematStats::reset_thread();
        assert_eq!(programs[0].run(), plain[0]);
        let stats = RematStats::of_thread();
        assert_eq!(stats.searched_tensors, 0, "{traced}");
        assert_eq!(
            (stats.evicted_operations, stats.replayed_operations),
            counts[9]
        );
        drop(recording);
    }
}

/// A view in a scope that keeps it is all that is left of zeros that backward made: it has their
/// bytes, traced or not.
#[test]
fn a_view_of_a_constant_counts_its_bytes() {
    for traced in [false, true] {
        let budget = MemoryBudget::bytes(u64::MAX / 2).install_apart();
        let _recording = traced.then(trace::record);
        let x = Tensor::<B, 1>::ones([4], &Default::default()).require_grad();
        let _grads = x.sum().backward();
        let zeros = Tensor::<Remat<Flex>, 2>::zeros([64, 64], &Default::default());
        let view = checkpoint_with(Policy::Keep, || zeros.reshape([4096]));
        let live = budget.live_bytes();
        drop::<Tensor<_, 1>>(view);
        assert_eq!(live - budget.live_bytes(), 16384, "{traced}");
    }
}

/// A limit that no step can keep, and that would have every operation of backward replay all of
/// forward.
#[test]
fn a_step_under_one_byte_ends() {
    let _generator = generator();
    let ctc = Ctc::<B>::new(60);
    let plain = ctc.run();
    RematStats::reset_thread();
    let budget = MemoryBudget::bytes(1).install_apart();
    assert_eq!(plain, ctc.run());
    let stats = RematStats::of_thread();
    println!("{stats:?}");
    let limit = budget.limit_bytes()[0].expect("a limit");
    assert!(
        limit > 1 && limit < 4 * stats.peak_bytes,
        "{limit}: {stats:?}"
    );
    assert!(stats.replayed_operations < 200 * 41 * 60, "{stats:?}");
}
