//! A branch of the tape that no loss reaches: until the next backward pass Burn keeps the tensors
//! that the branch saved. `Remat` keeps those of them that are resident, and no more.

use burn::backend::Autodiff;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_checkpoint::Remat;
use examples::training::recompute::Checkpoint;

use super::{Hold, Training, counters, in_use, turn};

/// Bytes in use beyond what was there before.
#[derive(Clone, Copy, Debug)]
struct Bytes {
    /// While the branch's end is held.
    held: u64,
    /// After it was dropped.
    dropped: u64,
    /// After a backward pass from another loss, once its gradients are gone.
    swept: u64,
}

/// A forward pass whose loss is dropped, and then one that has a backward pass.
fn measure<I: Backend, B: AutodiffBackend<Device = I::Device>>(hold: Hold) -> Bytes {
    let counters = counters::<I>();
    let (training, budget) = Training::<B>::warm(hold);
    let before = in_use::<B>(counters);
    let beyond = |now: u64| now.saturating_sub(before);
    let loss = training.loss();
    let held = beyond(in_use::<B>(counters));
    drop(loss);
    let dropped = beyond(in_use::<B>(counters));
    drop(training.loss().backward());
    let swept = beyond(in_use::<B>(counters));
    drop(budget);
    Bytes {
        held,
        dropped,
        swept,
    }
}

fn dead_branches_hold_no_more_than_burns<I: Backend>() {
    let _turn = turn();
    let managed = |hold| measure::<I, Autodiff<Remat<I>>>(hold);
    let plain = measure::<I, Autodiff<I>>(Hold::Scopes(Checkpoint::None));
    println!("plain {plain:?}");
    assert!(plain.held > 1 << 20, "{plain:?}");
    // Burn's own behaviour: the next backward pass sweeps the tape, not earlier.
    assert!(plain.dropped > plain.held / 10 * 9, "{plain:?}");
    assert!(plain.swept < plain.held / 100, "{plain:?}");

    let scopes = |activations| (Hold::Scopes(activations), 1.0);
    for (hold, part) in [
        scopes(Checkpoint::None),
        (Hold::Scopes(Checkpoint::Block), 0.35),
        (Hold::Scopes(Checkpoint::KeepCompute), 0.75),
        scopes(Checkpoint::Offload),
        (Hold::Budget(plain.held / 2), 0.60),
    ] {
        let bytes = managed(hold);
        println!("{hold:?} {bytes:?}");
        // Handles and recipes take some bytes of the heap per operation.
        let of_plain = |bytes: u64| bytes as f64 / plain.dropped as f64;
        assert!(of_plain(bytes.dropped) < part + 0.05, "{hold:?}: {bytes:?}");
        assert!(of_plain(bytes.swept) < 0.05, "{hold:?}: {bytes:?}");
    }
}

tests::on_counted_backends!(dead_branches_hold_no_more_than_burns);
