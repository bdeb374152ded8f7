//! What a module keeps from a forward pass, such as batch norm's running statistics, outlives its
//! step: it must hold neither what the step held nor make later ones run more. Bytes of the heap,
//! so a process of its own.

#[path = "operations/probe/mod.rs"]
mod probe;

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Barrier;

use burn::backend::Autodiff;
use burn::data::dataloader::Progress;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, PaddingConfig2d};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Distribution, Tensor};
use burn::train::metric::{Metric, MetricMetadata};
use burn_checkpoint::{
    HoldersMetric, MemoryBudget, Policy, Recorder, Remat, RematStats, SavePolicy, Work, apart,
    checkpoint_with, end_step, record_all, recorder, unrecorded,
};
use burn_flex::Flex;
use parking_lot::{Mutex, MutexGuard};
use peak_alloc::PeakAlloc;

use probe::{Probe, take_counts};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type Plain = Autodiff<Probe<Flex>>;
type Managed = Autodiff<Remat<Probe<Flex>>>;

const BLOCKS: usize = 8;

/// An activation: 16 images of 8 channels and 16 x 16 pixels.
const ACTIVATION_BYTES: u64 = 128 << 10;

/// The heap and Flex's generator are the process's: tests take turns.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock();
    // What kernels set up once.
    steps::<Plain>(1, None, Input::Drawn, || {});
    turn
}

struct Block<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm<B>,
}

impl<B: Backend> Block<B> {
    fn new(device: &B::Device) -> Self {
        let conv = Conv2dConfig::new([8, 8], [3, 3])
            .with_padding(PaddingConfig2d::Same)
            .init(device);
        // Parameters are drawn when they are used first.
        let _ = (conv.weight.val(), conv.bias.as_ref().map(|bias| bias.val()));
        let norm = BatchNormConfig::new(8).init(device);
        Self { conv, norm }
    }

    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        burn::tensor::activation::relu(self.norm.forward(self.conv.forward(x)))
    }
}

/// How a step begins.
#[derive(Clone, Copy)]
enum Input {
    /// Random numbers, made on the device.
    Drawn,
    /// One batch for all steps.
    Same,
}

/// Of each step how often a convolution ran forward, and KiB of the heap after it, beyond what was
/// there before the first.
fn steps<B: AutodiffBackend>(
    steps: usize,
    policy: Option<&Policy>,
    input: Input,
    after: impl Fn(),
) -> Vec<(usize, usize)> {
    let device = Default::default();
    B::seed(&device, 3);
    let blocks: Vec<_> = (0..BLOCKS).map(|_| Block::<B>::new(&device)).collect();
    let draw = || Tensor::<B, 4>::random([16, 8, 16, 16], Distribution::Default, &device);
    let batch = Tensor::from_data(draw().into_data(), &device);
    // What autodiff and the allocator set up once, and what no loss reached, is not the steps'.
    let sweep = || {
        drop(
            Tensor::<B, 1>::zeros([2], &device)
                .require_grad()
                .exp()
                .sum()
                .backward(),
        )
    };
    sweep();
    take_counts();
    let before = HEAP.current_usage();
    let step = |_| {
        let mut x = match input {
            Input::Drawn => draw(),
            Input::Same => batch.clone(),
        };
        for block in &blocks {
            x = match policy {
                Some(policy) => checkpoint_with(policy.clone(), || block.forward(x)),
                None => block.forward(x),
            };
        }
        drop(x.powf_scalar(2.0).mean().backward());
        after();
        let convolutions = take_counts()["conv2d"];
        sweep();
        let kept = HEAP.current_usage().saturating_sub(before) >> 10;
        (convolutions, kept)
    };
    (0..steps).map(step).collect()
}

/// The running statistics of a block are two vectors of 8; the rest is what autodiff's and the
/// recipes' bookkeeping leaves.
const KEPT_KIB: usize = 64;

/// A budget remembers tensors that are gone until there are many: some hundred bytes each.
const REMEMBERED_KIB: usize = 512;

#[test]
fn running_statistics_made_in_scopes_hold_no_activations() {
    let _alone = alone();
    let bare = steps::<Plain>(3, None, Input::Drawn, || {});
    println!("bare {bare:?}");
    let by_class = Policy::per_operation(|op| match op.work {
        Work::Math => SavePolicy::Offload,
        Work::Norm => SavePolicy::Keep,
        _ => SavePolicy::Recompute,
    });
    for (policy, runs) in [
        (Policy::Recompute, 2),
        (Policy::KeepCompute, 1),
        // What convolutions give moves to the host.
        (Policy::Offload, 1),
        (by_class, 2),
    ] {
        for budget in [None, Some(ACTIVATION_BYTES * 20)] {
            let _budget = budget.map(|bytes| MemoryBudget::bytes(bytes).install());
            let found = steps::<Managed>(3, Some(&policy), Input::Drawn, || {});
            println!("{policy:?} {budget:?} {found:?}");
            let room = if budget.is_some() {
                REMEMBERED_KIB
            } else {
                KEPT_KIB
            };
            for ((convolutions, kept), (_, of_bare)) in found.into_iter().zip(&bare) {
                assert_eq!(convolutions, runs * BLOCKS, "{policy:?} {budget:?}");
                assert!(kept <= of_bare + room, "{policy:?} {budget:?}: {kept} KiB");
            }
        }
    }
}

/// No scope, no upload and no optimizer tells a budget that a step begins. The convolutions do.
#[test]
fn a_step_of_which_nothing_else_tells_does_as_much_as_the_one_before() {
    let _alone = alone();
    for input in [Input::Drawn, Input::Same] {
        let limit = ACTIVATION_BYTES * 10;
        let run = |tells: bool| {
            let budget = MemoryBudget::bytes(limit).install();
            let live = RefCell::new(Vec::new());
            let found = steps::<Managed>(8, None, input, || {
                if tells {
                    budget.step();
                }
                live.borrow_mut().push(budget.live_bytes());
            });
            let peak = budget.peak_bytes();
            println!("told {tells}: {found:?}, peak {peak}, live {live:?}");
            assert!(
                peak <= limit + ACTIVATION_BYTES,
                "told {tells}: {peak} of {limit}"
            );
            found
        };
        let told = run(true);
        let found = run(false);
        assert!(told[7].0 > BLOCKS, "nothing was evicted");
        for step in 1..8 {
            let (convolutions, kept) = found[step];
            assert!(
                convolutions <= told[step].0 * 3 / 2,
                "step {step}: {found:?}, told {told:?}"
            );
            assert!(convolutions <= found[1].0, "step {step}: {found:?}");
            assert!(
                kept <= found[1].1 + REMEMBERED_KIB,
                "step {step}: {found:?}"
            );
        }
    }
}

/// Tensors that five operations evict on a thread, of which two fit.
fn evicted() -> u64 {
    RematStats::reset_thread();
    let x = Tensor::<Remat<Flex>, 1>::ones([64], &Default::default());
    let held: Vec<_> = (0..5).map(|_| x.clone().cos()).collect();
    let evicted = RematStats::of_thread().evicted_operations;
    drop(held);
    evicted
}

fn on_a_thread<R: Send>(run: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|threads| threads.spawn(run).join().expect("no panic"))
}

#[test]
fn a_budget_is_in_force_on_every_thread_and_each_accounts_for_itself() {
    let _alone = alone();
    let two = MemoryBudget::bytes(2 * 256);
    let many = MemoryBudget::bytes(100 * 256);
    assert_eq!(evicted(), 0);
    let budget = two.install();
    let alone = evicted();
    assert!(alone > 0);
    assert_eq!(on_a_thread(evicted), alone);

    // A thread that is apart, with a budget of its own and without one.
    let beside = apart();
    assert_eq!((evicted(), on_a_thread(evicted)), (0, alone));
    let own = two.install();
    assert_eq!(evicted(), alone);
    let larger = many.install();
    assert_eq!((evicted(), on_a_thread(evicted)), (0, alone));
    drop((own, larger, beside));
    assert_eq!(evicted(), alone);

    // Another one in its place.
    let larger = many.install();
    assert_eq!((evicted(), on_a_thread(evicted)), (0, 0));
    drop(larger);
    assert_eq!((evicted(), on_a_thread(evicted)), (alone, alone));
    let ended = on_a_thread(|| {
        let before = evicted();
        end_step();
        drop(budget);
        (before, evicted())
    });
    assert_eq!(ended, (alone, 0));
    assert_eq!((evicted(), on_a_thread(evicted)), (0, 0));
}

#[test]
fn a_guard_shows_the_accounts_of_all_threads() {
    let _alone = alone();
    let make = || Tensor::<Remat<Flex>, 1>::ones([64], &Default::default());
    let budget = MemoryBudget::bytes(8 * 256).install();
    let x = make();
    let held = on_a_thread(|| {
        let three = [(); 3].map(|()| make());
        let now = (budget.live_bytes(), budget.limit_bytes());
        drop(three);
        now
    });
    assert_eq!(held, (4 * 256, vec![Some(8 * 256); 2]));
    // What the thread held at most is known after its end.
    assert_eq!((budget.live_bytes(), budget.peak_bytes()), (256, 3 * 256));
    // What it left is counted until it is dropped, also where other threads begin.
    let left = on_a_thread(make);
    assert_eq!(on_a_thread(|| budget.live_bytes()), 2 * 256);
    drop(left);
    on_a_thread(|| drop(make()));
    assert_eq!((budget.live_bytes(), budget.peak_bytes()), (256, 3 * 256));
    drop(x);
}

#[test]
fn a_recording_goes_on_where_that_of_another_thread_ends() {
    let _alone = alone();
    let turn = Barrier::new(2);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let first = record_all();
            turn.wait();
            turn.wait();
            drop(first);
            turn.wait();
        });
        turn.wait();
        let second = record_all();
        turn.wait();
        turn.wait();
        drop(Tensor::<Remat<Flex>, 1>::ones([64], &Default::default()).exp());
        assert!(!second.finish().is_empty());
    });
    assert_eq!(recorder(), Recorder::None);
}

#[test]
fn a_fraction_does_not_measure_what_was_made_before_the_first_step() {
    let _alone = alone();
    let limit = |kib: usize| {
        let budget = MemoryBudget::fraction(0.5).expect("a part").install();
        let device = Default::default();
        let made = Tensor::<Managed, 1>::ones([kib * 256], &device);
        drop(made.clone().exp());
        end_step();
        let x = Tensor::<Managed, 1>::ones([256], &device).require_grad();
        drop(x.clone().exp().log().sum().backward());
        end_step();
        drop(made);
        budget.limit_bytes()[0].expect("measured")
    };
    let small = limit(1);
    assert!(small > 0);
    assert_eq!(limit(100), small);
}

#[test]
fn unrecorded_work_is_of_no_scope_and_no_budget() {
    let _alone = alone();
    let x = Tensor::<Remat<Flex>, 1>::ones([64], &Default::default());
    let five = || (0..5).map(|_| x.clone().cos()).collect::<Vec<_>>();
    let budget = MemoryBudget::bytes(2 * 256).install();
    let recorded = x.clone().cos();
    RematStats::reset_thread();
    let live = budget.live_bytes();
    let held = unrecorded(|| {
        assert_eq!(recorder(), Recorder::None);
        let held = unrecorded(five);
        assert_eq!(recorder(), Recorder::None);
        held
    });
    assert_eq!(budget.live_bytes(), live);
    assert_eq!(RematStats::of_thread().evicted_operations, 0);
    assert_eq!(recorder(), Recorder::Budget);
    let panics = || unrecorded(|| resume_unwind(Box::new(())));
    assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
    assert_eq!(recorder(), Recorder::Budget);
    drop((budget, recorded, held));

    // Moved out of the scope, whose results it does not evict.
    let evicted = |make: &dyn Fn() -> Vec<Tensor<Remat<Flex>, 1>>| {
        RematStats::reset_thread();
        let mut held = Vec::new();
        checkpoint_with(Policy::Recompute, || {
            held = make();
            assert_eq!(recorder(), Recorder::Scope);
        });
        RematStats::of_thread().evicted_operations
    };
    assert_eq!(evicted(&|| unrecorded(five)), 0);
    assert_eq!(evicted(&five), 5);
}

/// The metric alone: no scope, and no budget of the program's own.
#[test]
fn the_metric_of_holders_sees_tensors_of_no_scope() {
    let _alone = alone();
    let metric = HoldersMetric::new();
    let x = Tensor::<Remat<Flex>, 1>::ones([2048], &Default::default());
    drop([0; 3].map(|_| x.clone().exp()));
    let mut read = metric.clone();
    let progress = Progress::new(0, 1);
    let metadata = MetricMetadata {
        progress: progress.clone(),
        global_progress: progress,
        iteration: None,
        lr: None,
    };
    let text = read.update(&(), &metadata).formatted;
    assert!(text.contains("float_exp 24.0 KiB"), "{text}");
    drop(read);
    assert_eq!(recorder(), Recorder::Budget, "until all clones are dropped");
    // On whichever thread the last one goes.
    on_a_thread(|| drop(metric));
    assert_eq!(recorder(), Recorder::None);

    // A budget of the program stays in force.
    let _budget = MemoryBudget::bytes(2 * 256).install();
    let _metric = HoldersMetric::new();
    assert!(evicted() > 0);
}
