//! A scope, a policy and a budget each lower what is in use, after a forward pass and at a step's
//! peak.

use burn::backend::Autodiff;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_checkpoint::{Remat, RematStats};
use examples::training::recompute::Checkpoint;

use super::{Hold, Training, counters, idle, in_use, most_in_use, turn};

/// Bytes in use beyond what was there before.
#[derive(Clone, Copy, Debug)]
struct Bytes {
    /// After the forward pass: what the tape holds.
    forward: u64,
    /// The peak of three steps; on a device, a lower bound of it.
    peak: u64,
    /// After backward, once the gradients are gone.
    left: u64,
}

/// Bytes in use in a forward and backward pass over six blocks.
fn measure<I: Backend, B: AutodiffBackend<Device = I::Device>>(hold: Hold) -> Bytes {
    let counters = counters::<I>();
    let (training, budget) = Training::<B>::warm(hold);
    let before = in_use::<B>(counters);
    let beyond = |now: u64| now.saturating_sub(before);
    let loss = training.loss();
    let forward = beyond(in_use::<B>(counters));
    drop(loss.backward());
    drop(loss);
    let left = beyond(in_use::<B>(counters));

    let before = idle::<B>(counters);
    let most = most_in_use(counters, move || {
        for _ in 0..3 {
            drop(training.loss().backward());
            in_use::<B>(counters);
        }
    });
    let peak = most - before;
    drop(budget);
    Bytes {
        forward,
        peak,
        left,
    }
}

fn scopes_and_budgets_lower_what_is_in_use<I: Backend>() {
    let _turn = turn();
    let part = |bytes: u64, of: u64| bytes as f64 / of as f64;
    let of = |activations| measure::<I, Autodiff<Remat<I>>>(Hold::Scopes(activations));

    let plain = measure::<I, Autodiff<I>>(Hold::Scopes(Checkpoint::None));
    let unused = of(Checkpoint::None);
    let recompute = of(Checkpoint::Block);
    let keep_compute = of(Checkpoint::KeepCompute);
    let offload = of(Checkpoint::Offload);
    RematStats::reset_thread();
    let budget = measure::<I, Autodiff<Remat<I>>>(Hold::Budget(plain.forward / 2));
    assert!(RematStats::of_thread().evicted_operations > 0);
    println!(
        "{}: plain {plain:?}\nunused {unused:?}\nrecompute {recompute:?}\nkeep-compute {keep_compute:?}\noffload {offload:?}\nbudget {budget:?}",
        I::name(&I::Device::default())
    );

    // A handle is some bytes of the heap.
    assert!(part(unused.forward, plain.forward) < 1.05);
    assert!(part(recompute.forward, plain.forward) < 0.35);
    assert!(part(keep_compute.forward, plain.forward) < 0.75);
    // The limit is on tensors; recipes are on the heap.
    assert!(part(budget.forward, plain.forward) < 0.60);
    if counters::<I>() != examples::backend::BackendName::Flex {
        // Flex's tensors are in host memory to begin with.
        assert!(part(offload.forward, plain.forward) < 0.35);
    }
    // Backward brings back what it needs, at most a block at a time. The peak of the plain training
    // is at least what its tape holds, even if the samples missed it.
    for lower in [recompute, keep_compute, budget] {
        assert!(part(lower.peak, plain.forward) < 0.9, "{lower:?}");
    }
    for none in [plain, unused, recompute, keep_compute, offload] {
        assert!(part(none.left, plain.forward) < 0.01, "{none:?}");
    }
    // A budget's records of freed tensors stay on the heap until it cleans up.
    assert!(part(budget.left, plain.forward) < 0.05, "{budget:?}");
}

tests::on_counted_backends!(scopes_and_budgets_lower_what_is_in_use);
