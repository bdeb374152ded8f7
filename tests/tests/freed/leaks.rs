//! No memory stays in use from step to step.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor, activation};
use burn_checkpoint::{MemoryBudget, Remat, RematStats, checkpoint};
use examples::backend::BackendName;
use examples::gpt::model::GptConfig;
use examples::training::recompute::Checkpoint;

use super::{Hold, Training, counters, in_use, turn};

type Managed<I> = Autodiff<Remat<I>>;

/// The most that is in use after a step: of the first fifth, and of the others.
#[derive(Default)]
struct Most {
    early: u64,
    late: u64,
}

impl Most {
    fn see<B: Backend>(&mut self, counters: BackendName, step: usize, steps: usize) {
        let most = if step < steps / 5 {
            &mut self.early
        } else {
            &mut self.late
        };
        *most = in_use::<B>(counters).max(*most);
    }

    /// Fails if more is in use later than at first.
    fn assert_flat(&self, what: &str, counters: BackendName) {
        let Self { early, late } = self;
        println!("{what}: {early} bytes in the first fifth of the steps, {late} in the others");
        // Hash tables and vectors of the heap grow now and then.
        let slack = if counters == BackendName::Flex {
            8 << 10
        } else {
            0
        };
        assert!(*late <= early + slack, "{what}: {early} {late}");
    }
}

/// A budget so small that much of a GPT's step is evicted.
const BUDGET_BYTES: u64 = 4 << 10;

/// Of a GPT, whose step takes a tenth of a second on software Vulkan.
fn steps_leave_nothing<I: Backend>() {
    let _turn = turn();
    let counters = counters::<I>();
    let steps = match counters {
        BackendName::Vulkan => 20,
        BackendName::Flex | BackendName::Tch => 200,
        BackendName::Cuda => 1000,
    };
    for hold in [
        Hold::Scopes(Checkpoint::Block),
        Hold::Scopes(Checkpoint::Offload),
        Hold::Budget(BUDGET_BYTES),
    ] {
        let config = GptConfig::new(4, 2, 1, 8).with_vocabulary(8);
        let training = Training::<Managed<I>>::new(&config, hold.checkpoint(), 1);
        let _budget = hold.install();
        let mut most = Most::default();
        training.steps(steps, |step| {
            most.see::<Managed<I>>(counters, step, steps);
        });
        most.assert_flat(&format!("{hold:?}"), counters);
    }
}

/// Two layers with dropout between them.
#[derive(Module, Debug)]
struct TwoLayers<B: Backend> {
    input: Linear<B>,
    dropout: Dropout,
    output: Linear<B>,
}

impl<B: Backend> TwoLayers<B> {
    fn init() -> Self {
        let device = B::Device::default();
        Self {
            input: LinearConfig::new(16, 32).init(&device),
            dropout: DropoutConfig::new(0.1).init(),
            output: LinearConfig::new(32, 16).init(&device),
        }
    }

    /// Of new random inputs.
    fn loss(&self) -> Tensor<B, 1> {
        let x = Tensor::<B, 2>::random([8, 16], Distribution::Default, &Default::default());
        let x = activation::gelu(self.input.forward(x));
        let y = self.output.forward(self.dropout.forward(x));
        (y.clone() * y).mean()
    }
}

/// Of a model of two layers, in a scope and under a budget. A step is a few kernels, so software
/// Vulkan takes many.
fn many_steps_leave_nothing<I: Backend>() {
    let _turn = turn();
    let counters = counters::<I>();
    let steps = match counters {
        BackendName::Vulkan => 250,
        BackendName::Flex | BackendName::Tch | BackendName::Cuda => 1000,
    };
    for budget in [None, Some(2 << 10)] {
        let _budget = budget.map(|bytes| MemoryBudget::bytes(bytes).install());
        RematStats::reset_thread();
        let mut model = TwoLayers::<Managed<I>>::init();
        let mut optimizer = SgdConfig::new().init();
        let mut most = Most::default();
        for step in 0..steps {
            let loss = match budget {
                None => checkpoint(|| model.loss()),
                Some(_) => model.loss(),
            };
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(1e-3, model, gradients);
            most.see::<Managed<I>>(counters, step, steps);
        }
        most.assert_flat(&format!("budget {budget:?}"), counters);
        let replayed = RematStats::of_thread().replayed_operations;
        assert!(replayed >= steps as u64, "{replayed} in {steps} steps");
    }
}

/// Over Fusion a tensor that is dropped during a panic would never be freed.
fn panics_leave_nothing<I: Backend>() {
    let _turn = turn();
    let counters = counters::<I>();
    let config = GptConfig::new(32, 2, 1, 8).with_vocabulary(8);
    let training = Training::<Managed<I>>::new(&config, Checkpoint::Block, 1);
    drop(training.loss().backward());
    let fails = |name: &str, fail: &dyn Fn()| {
        // The first time the message is made, on the heap.
        let mut left = [0, 0];
        for left in &mut left {
            // A backtrace keeps what it has read of the program.
            let prints = take_hook();
            set_hook(Box::new(|_| ()));
            let caught = catch_unwind(AssertUnwindSafe(fail));
            set_hook(prints);
            assert!(caught.is_err(), "{name}");
            // Autodiff forgets what was never differentiated with the next backward pass.
            drop(training.loss().backward());
            *left = in_use::<Managed<I>>(counters);
        }
        println!("{name}: {left:?}");
        let slack = if counters == BackendName::Flex {
            8 << 10
        } else {
            0
        };
        assert!(left[1] <= left[0] + slack, "{name}: {left:?}");
    };
    fails("a step", &|| {
        let _loss = training.loss();
        panic!("of the user");
    });
    fails("a strict budget", &|| {
        let _budget = MemoryBudget::bytes(BUDGET_BYTES).strict().install();
        drop(training.loss().backward());
    });
}

tests::on_counted_backends!(
    steps_leave_nothing,
    many_steps_leave_nothing,
    panics_leave_nothing
);
