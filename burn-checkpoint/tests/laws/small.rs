//! Many small operations under a budget: searches and replays cost in proportion to the operations.

use burn::backend::Autodiff;
use burn_checkpoint::{MemoryBudget, Remat, RematStats};
use burn_flex::Flex;

use crate::many::{Ctc, Lstm, Step};
use crate::models::generator;

type B = Autodiff<Remat<Flex>>;

/// The counters of a step under so many parts of the bytes that it takes without a limit.
fn limited(step: &impl Step<B>, fraction: f64) -> RematStats {
    let budget = MemoryBudget::fraction(fraction).expect("a fraction");
    let budget = budget.install();
    let plain = step.run();
    budget.step();
    RematStats::reset_thread();
    let found = step.run();
    assert_eq!(plain, found);
    let stats = RematStats::of_thread();
    println!("{fraction}: {stats:?}");
    stats
}

/// Of a CTC loss a time step has 41 operations. A longer one takes no more of each time step.
#[test]
fn searches_and_replays_grow_with_the_operations() {
    let _generator = generator();
    for (time, fraction) in [(50, 0.37), (60, 0.37), (100, 0.37), (100, 0.6), (200, 0.37)] {
        let stats = limited(&Ctc::new(time), fraction);
        assert!(
            stats.replayed_operations < 3 * 41 * time as u64 / 2,
            "{time}: {stats:?}"
        );
        assert!(
            stats.searched_tensors < 5 * stats.evicted_operations,
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

/// A limit that no step can keep, and that would have every operation of backward replay all of forward.
#[test]
fn a_step_under_one_byte_ends() {
    let _generator = generator();
    let ctc = Ctc::<B>::new(60);
    let plain = ctc.run();
    RematStats::reset_thread();
    let budget = MemoryBudget::bytes(1).install();
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
