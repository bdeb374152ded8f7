//! Nothing stays from step to step.

use burn::backend::Autodiff;
use burn::tensor::backend::Backend;
use burn_checkpoint::Remat;
use examples::backend::BackendName;
use examples::gpt::model::{Activations, GptConfig};

use super::{Hold, Training, counters, in_use, turn};

/// Steps on a backend. On Flex burn-checkpoint's own tests take a thousand; on software Vulkan a step takes a tenth of a second.
fn steps(counters: BackendName) -> usize {
    match counters {
        BackendName::Vulkan => 30,
        BackendName::Flex => 200,
        BackendName::Cuda => 1000,
    }
}

/// The most that is in use after a step: of the first fifth, and of the others.
fn growth<I: Backend>(hold: Hold) -> (u64, u64) {
    type Managed<I> = Autodiff<Remat<I>>;
    let counters = counters::<I>();
    let config = GptConfig::new(4, 2, 1, 8).with_vocabulary(8);
    let training = Training::<Managed<I>>::new(&config, hold.activations(), 1);
    let _budget = hold.install();
    let (mut early, mut late) = (0, 0);
    let steps = steps(counters);
    training.steps(steps, |step| {
        let most = if step < steps / 5 {
            &mut early
        } else {
            &mut late
        };
        *most = in_use::<Managed<I>>(counters).max(*most);
    });
    (early, late)
}

/// A budget so small that much is evicted in every step.
const BUDGET_BYTES: u64 = 4 << 10;

fn steps_leave_nothing<I: Backend>() {
    let _turn = turn();
    for hold in [
        Hold::Scopes(Activations::Recompute),
        Hold::Scopes(Activations::Offload),
        Hold::Budget(BUDGET_BYTES),
    ] {
        let (early, late) = growth::<I>(hold);
        println!("{hold:?}: {early} bytes in the first fifth of the steps, {late} in the others");
        // Hash tables and vectors of the heap grow now and then.
        let slack = if counters::<I>() == BackendName::Flex {
            8 << 10
        } else {
            0
        };
        assert!(late <= early + slack, "{hold:?}: {early} {late}");
    }
}

tests::on_every_backend!(steps_leave_nothing);
