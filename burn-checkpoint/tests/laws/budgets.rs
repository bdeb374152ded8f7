//! Budgets: the same bits at any limit, and the limit kept.

use std::time::Duration;

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Distribution, Tensor};
use burn_autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn_checkpoint::trace::{EventKind, Traced, record};
use burn_checkpoint::{
    DeviceProfile, InstalledBudget, MemoryBudget, Policy, Remat, RematStats, Work, checkpoint,
    evict, op_table,
};
use burn_flex::Flex;

use crate::apart::InstallApart;
use crate::input::gradient_bits;
use crate::models::{
    Around, Bare, Cnn, Mlp, Model, Transformer, generator, model, parameters, step, step_of,
};
use crate::scopes::{Scope, policies};
use crate::verified::{Verified, recorded};

type Inner = Verified<Flex>;
type Plain = Autodiff<Inner>;
type Managed = Autodiff<Remat<Inner>>;

/// The most bytes that a step needs if nothing is evicted.
fn unconstrained<R: AutodiffBackend, N: Model<R>>() -> u64 {
    let model = model::<R, N>();
    let budget = MemoryBudget::bytes(u64::MAX / 2).install_apart();
    step_of::<R, N>(&model, &Bare);
    assert_eq!(RematStats::of_thread().evicted_operations, 0);
    budget.peak_bytes()
}

fn any_limit<P, R, M, N>()
where
    P: AutodiffBackend,
    R: AutodiffBackend,
    M: Model<P>,
    N: Model<R>,
{
    let _generator = generator();
    let (plain, run) = recorded(|| step::<P, M>(&Bare));
    RematStats::reset_thread();
    let peak = unconstrained::<R, N>();
    let mut floor = 0;
    for percent in [0, 5, 20, 40, 60, 90] {
        RematStats::reset_thread();
        let model = model::<R, N>();
        let budget = MemoryBudget::bytes(peak * percent / 100).install_apart();
        let found = run.verify(|| step_of::<R, N>(&model, &Bare));
        let reached = budget.peak_bytes();
        drop((budget, model));
        assert!(plain == found, "{percent} %");
        let stats = RematStats::of_thread();
        assert!(stats.evicted_operations > 0, "{percent} %: {stats:?}");
        assert_eq!(stats.live_bytes, 0, "{percent} %");
        println!("{percent} %: {reached} of {peak} bytes, {stats:?}");
        // The size of an operation's result is a guess the first time, and there is a floor.
        if percent == 0 {
            floor = reached;
        }
        let limit = floor.max(peak * percent / 100) + peak / 20;
        assert!(reached <= limit, "{percent} %: {reached} of {peak}");
        assert!(reached < peak, "{percent} %");
    }
}

#[test]
fn mlp_at_any_limit() {
    any_limit::<Plain, Managed, Mlp<_>, Mlp<_>>();
}

#[test]
fn cnn_at_any_limit() {
    any_limit::<Plain, Managed, Cnn<_>, Cnn<_>>();
}

#[test]
fn transformer_at_any_limit() {
    any_limit::<Plain, Managed, Transformer<_>, Transformer<_>>();
}

#[test]
fn balanced_checkpointing_at_any_limit() {
    type P = Autodiff<Inner, BalancedCheckpointing>;
    type R = Autodiff<Remat<Inner>, BalancedCheckpointing>;
    any_limit::<P, R, Mlp<_>, Mlp<_>>();
}

#[test]
fn autocast_at_any_limit() {
    use burn_amp::Autocast;
    type P = Autocast<Autodiff<Inner>>;
    type R = Autocast<Autodiff<Remat<Inner>>>;
    any_limit::<P, R, Mlp<_>, Mlp<_>>();
}

/// The parameters after some steps of AdamW, and what is done before each.
fn train<B: AutodiffBackend, M: Model<B> + AutodiffModule<B>>(
    steps: usize,
    around: &impl Around,
    mut before: impl FnMut(usize),
) -> Vec<Vec<u8>> {
    let device = Default::default();
    let mut model = model::<B, M>();
    let mut optimizer = AdamWConfig::new().init();
    for index in 0..steps {
        before(index);
        let loss = model.loss(around, &device);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, grads);
    }
    parameters::<B, M>(&model)
}

#[test]
fn steps_do_not_add_up() {
    let _generator = generator();
    let plain = train::<Plain, Transformer<_>>(30, &Bare, |_| {});
    let budget = MemoryBudget::bytes(60_000).install_apart();
    let mut live = Vec::new();
    let found = train::<Managed, Transformer<_>>(30, &Bare, |_| live.push(budget.live_bytes()));
    assert!(plain == found);
    let stats = RematStats::of_thread();
    println!("{live:?} {stats:?}");
    assert!(stats.evicted_operations > 0);
    assert!(live[29] <= live[3], "{live:?}");
    drop(budget);
    assert_eq!(RematStats::of_thread().live_bytes, 0);
}

#[test]
fn scopes_within_a_budget() {
    let _generator = generator();
    let plain = train::<Plain, Mlp<_>>(3, &Bare, |_| {});
    for policy in policies() {
        for bytes in [1_000, 20_000, 1 << 30] {
            let scopes = Scope(policy.clone());
            let _budget = MemoryBudget::bytes(bytes).install_apart();
            assert!(
                plain == train::<Managed, Mlp<_>>(3, &scopes, |_| {}),
                "{policy:?}, {bytes}"
            );
        }
    }
}

/// How often results of products were evicted in a step under a budget that is much too small.
fn evicted_products(around: &impl Around) -> usize {
    let _budget = MemoryBudget::bytes(1_000).install_apart();
    let recording = record();
    step::<Managed, Mlp<_>>(around);
    let is_product = |name| {
        let op = op_table().find(|op| op.name == name);
        op.expect("a row").work == Work::Compute
    };
    let events = recording.finish().into_iter();
    events
        .filter(|event| matches!(event.kind, EventKind::Evict(Traced { op, .. }) if is_product(op)))
        .count()
}

#[test]
fn a_budget_does_not_touch_what_a_policy_keeps() {
    let _generator = generator();
    assert!(evicted_products(&Bare) > 0);
    assert!(evicted_products(&Scope(Policy::Recompute)) > 0);
    assert_eq!(evicted_products(&Scope(Policy::KeepCompute)), 0);
}

type Next = fn(Tensor<Remat<Flex>, 1>) -> Tensor<Remat<Flex>, 1>;

/// Sixteen tensors of 256 B, each made of the one before by `next`, all held under a budget of
/// four. Their bits, and the bytes that were live once they were made.
fn held(next: Next) -> (Vec<Vec<u8>>, u64) {
    let mut x = Tensor::ones([64], &Default::default()) * 0.5;
    let budget = MemoryBudget::bytes(4 * 256).install_apart();
    let held: Vec<_> = std::iter::repeat_with(|| {
        x = next(x.clone());
        x.clone()
    })
    .take(16)
    .collect();
    let live = budget.live_bytes();
    let bits = |tensor: Tensor<_, 1>| tensor.into_data().bytes.to_vec();
    (held.into_iter().map(bits).collect(), live)
}

#[test]
fn results_of_scopes_are_evicted_as_others_are() {
    let (bits, live) = held(|x| x.cos());
    assert!(live <= 4 * 256, "no scope: {live}");
    let ways: [(&str, Next); 3] = [
        ("a result", |x| checkpoint(|| x.cos())),
        ("what passes through", |x| {
            let y = x.cos();
            checkpoint(|| y)
        }),
        ("what passes through two", |x| {
            checkpoint(|| {
                let y = x.cos();
                checkpoint(|| checkpoint(|| y))
            })
        }),
    ];
    for (what, next) in ways {
        let (found, live) = held(next);
        assert!(found == bits && live <= 4 * 256, "{what}: {live}");
    }
}

/// A scope decides about what was made in it, and what passes through it was made in another one.
#[test]
fn what_passes_through_a_scope_is_not_evicted_with_it() {
    RematStats::reset_thread();
    let x = Tensor::<Remat<Flex>, 1>::ones([64], &Default::default());
    checkpoint(|| {
        let y = x.cos();
        checkpoint(|| drop(checkpoint(|| y.clone())));
        assert_eq!(RematStats::of_thread().evicted_operations, 0);
        drop(y);
    });
}

/// A budget does its part inside of a scope as well as between scopes.
#[test]
fn a_limit_is_kept_with_every_block_a_scope() {
    let _generator = generator();
    let block = |mut x: Tensor<Managed, 1>, operations| {
        for _ in 0..operations {
            x = x.sin().tanh().cos();
        }
        x
    };
    // Many results and little in between; much in a scope.
    for (blocks, operations) in [(48, 1), (2, 24)] {
        let x = Tensor::<Managed, 1>::random([64], Distribution::Default, &Default::default());
        let x = x.require_grad();
        let run = |limit: u64| {
            let budget = MemoryBudget::bytes(limit).install_apart();
            let y = (0..blocks).fold(x.clone(), |x, _| checkpoint(|| block(x, operations)));
            let grads = y.sum().backward();
            let bits = gradient_bits(&x, &grads);
            drop(grads);
            (bits, budget.peak_bytes())
        };
        let (plain, unlimited) = run(u64::MAX / 2);
        let limit = 16 * 256;
        assert!(unlimited > 2 * limit, "{blocks}: {unlimited}");
        let (found, peak) = run(limit);
        assert!(found == plain, "{blocks}");
        assert!(
            peak <= limit,
            "{blocks} blocks: {peak} of {limit}, {unlimited}"
        );
    }
}

/// The most bytes at one time in the second and third step.
fn peak_after_the_first_step(budget: MemoryBudget) -> (u64, InstalledBudget) {
    let budget = budget.install_apart();
    train::<Managed, Mlp<_>>(3, &Bare, |step| {
        if step == 1 {
            RematStats::reset_thread();
        }
    });
    (RematStats::of_thread().peak_bytes, budget)
}

#[test]
fn a_measured_limit_is_kept() {
    let _generator = generator();
    let (floor, _) = peak_after_the_first_step(MemoryBudget::bytes(0));
    let (unlimited, _) = peak_after_the_first_step(MemoryBudget::bytes(u64::MAX / 2));
    // The floor holds optimizer state too, which is no part of what a fraction is of.
    for fraction in [0.86, 0.83] {
        let budget = MemoryBudget::fraction(fraction).expect("a fraction");
        let (peak, budget) = peak_after_the_first_step(budget);
        let limit = budget.limit_bytes()[0].expect("measured");
        println!("{fraction}: {peak} of {limit}, from {floor} to {unlimited}");
        assert!(
            floor < limit && limit < unlimited * 9 / 10,
            "{floor} {limit} {unlimited}"
        );
        assert!(peak <= limit, "{fraction}: {peak} of {limit}");
        assert!(peak > limit / 2, "{fraction}: {peak} of {limit}");
    }
}

/// The ones that backward makes for a mean over one element are no seed of another backward pass,
/// after which a limit would be known.
#[test]
fn a_mean_of_one_element_is_no_backward_pass() {
    let x = Tensor::<Managed, 1>::ones([64], &Default::default()).require_grad();
    let budget = MemoryBudget::fraction(0.5)
        .expect("a fraction")
        .install_apart();
    let pass = || {
        let loss = x.clone().exp().sum().mean().mean().sum();
        x.grad(&loss.backward()).expect("a gradient");
        budget.limit_bytes()
    };
    assert_eq!(pass(), [None]);
    // Two in a row are two: nothing else tells of the forward pass.
    assert!(matches!(pass().as_slice(), [Some(_)]));
}

#[test]
fn a_fraction_of_the_tape() {
    let _generator = generator();
    let plain = train::<Plain, Mlp<_>>(3, &Bare, |_| {});
    for fraction in [0.5, 0.25] {
        RematStats::reset_thread();
        let budget = MemoryBudget::fraction(fraction)
            .expect("a fraction")
            .install_apart();
        assert_eq!(budget.limit_bytes(), []);
        let mut first = 0;
        let found = train::<Managed, Mlp<_>>(3, &Bare, |step| {
            if step == 1 {
                first = budget.peak_bytes();
                assert_eq!(RematStats::of_thread().evicted_operations, 0);
            }
        });
        assert!(plain == found);
        assert!(first > 0 && RematStats::of_thread().evicted_operations > 0);
        // The peak of the first step is in its update, and counts the parameters.
        let limits = budget.limit_bytes();
        let [Some(limit)] = limits[..] else {
            panic!("{limits:?}")
        };
        let of_step = (first as f64 * fraction) as u64;
        assert!(limit > of_step / 2 && limit < of_step, "{limit} {of_step}");
    }
    assert!(MemoryBudget::fraction(0.0).is_err() && MemoryBudget::fraction(1.5).is_err());
}

/// Random numbers are bytes like others, of which none can be evicted.
#[test]
fn random_numbers_count() {
    let _generator = generator();
    RematStats::reset_thread();
    let budget = MemoryBudget::bytes(1_000).install_apart();
    let draw = || Tensor::<Managed, 1>::random([64], Distribution::Default, &Default::default());
    let held: Vec<_> = (0..4).map(|_| draw()).collect();
    assert_eq!(budget.live_bytes(), 4 * 256);
    assert_eq!(RematStats::of_thread().evicted_operations, 0);
    drop(held);
    assert_eq!(budget.live_bytes(), 0);
    // Between them what can come back has to go.
    let x = draw();
    let y = x.clone().sin();
    let others = (draw(), draw());
    assert_eq!(RematStats::of_thread().evicted_operations, 1);
    assert_eq!(budget.live_bytes(), 3 * 256);
    assert_eq!(y.into_data(), x.sin().into_data());
    drop(others);
}

/// The first time, a result is taken to be as large as the largest operand.
#[test]
fn a_limit_is_kept_in_the_first_step_whatever_the_type() {
    for dtype in [DType::F16, DType::F32, DType::F64] {
        let bytes = 64 * dtype.size() as u64;
        let x = Tensor::<Remat<Flex>, 1>::ones([64], (&Default::default(), dtype));
        let budget = MemoryBudget::bytes(5 * bytes / 2).install_apart();
        let held = (x.clone().cos(), x.clone().sin(), x.exp());
        assert_eq!(budget.peak_bytes(), 2 * bytes, "{dtype:?}");
        drop(held);
    }
}

/// Queries, keys and values are parts of one product, and such a reshape of each makes them
/// contiguous. A reshape of a tensor that is not managed has the same shapes and no bytes.
#[test]
fn room_is_made_for_a_reshape_that_copies() {
    let x = Tensor::<Remat<Flex>, 2>::ones([64, 64], &Default::default());
    let limit = 3 * 64 * 64 * 4;
    let budget = MemoryBudget::bytes(limit).install_apart();
    drop(x.clone().reshape([64 * 64]));
    let held = (x.clone().cos(), x.clone().sin(), x.exp());
    let copy = held.2.clone().transpose().reshape([64 * 64]);
    assert_eq!(budget.peak_bytes(), limit);
    drop((held, copy));
}

/// An operation with several results makes all of them when it is replayed for one.
#[test]
fn room_is_made_for_all_results_of_a_replay() {
    let x = Tensor::<Remat<Flex>, 2>::ones([64, 64], &Default::default());
    let tensor = 64 * 64 * 4;
    let limit = 8 * tensor;
    let _budget = MemoryBudget::bytes(limit).install_apart();
    let results = x.clone().sort_with_indices(1);
    evict(&results);
    let held: Vec<_> = (0..8).map(|_| x.clone().exp()).collect();
    let recording = record();
    let results = (results.0.into_data(), results.1);
    let replays = recording.finish().into_iter();
    let replays = replays.filter(|event| matches!(event.kind, EventKind::Replay { .. }));
    let replays: Vec<_> = replays.collect();
    let bytes: u64 = replays.iter().map(|event| event.bytes).sum();
    assert!(bytes >= 2 * tensor, "{replays:?}");
    assert!(replays[0].live_bytes + bytes <= limit, "{replays:?}");
    drop((held, results));
}

#[test]
#[should_panic(expected = "needs at least")]
fn a_strict_budget_refuses() {
    let _generator = generator();
    let _budget = MemoryBudget::bytes(1000).strict().install_apart();
    step::<Managed, Mlp<_>>(&Bare);
}

/// A product of 32 costs less than as many `tanh` on a CPU, and more on a device.
#[test]
fn what_is_cheaper_on_a_device_goes_first_by_its_costs() {
    let first = |budget: MemoryBudget| {
        let ones =
            |rows, columns| Tensor::<Remat<Flex>, 2>::ones([rows, columns], &Default::default());
        let (x, a, b) = (ones(256, 256), ones(256, 32), ones(32, 256));
        let _budget = budget.install_apart();
        let recording = record();
        let held = (x.clone().tanh(), a.matmul(b), x.exp());
        let mut events = recording.finish().into_iter();
        let evicted = events.find_map(|event| match event.kind {
            EventKind::Evict(Traced { op, .. }) => Some(op),
            _ => None,
        });
        drop(held);
        evicted.expect("two of three fit")
    };
    let two = MemoryBudget::bytes((2 * 256 + 8) << 10);
    assert_eq!(first(two), "float_matmul");
    for device in [DeviceProfile::A100, DeviceProfile::RTX_3090] {
        // Tensors of a test are too small for it: it would take as long to start either.
        let launch = Duration::ZERO;
        let device = DeviceProfile { launch, ..device };
        assert_eq!(first(two.costs_on(device)), "float_tanh");
    }
}

/// The bytes of a storage are counted under the budget that it was made under, whichever of its
/// views goes last.
#[test]
fn a_view_under_another_budget() {
    RematStats::reset_thread();
    let x = Tensor::<Remat<Flex>, 1>::ones([64], &Default::default());
    let outer = MemoryBudget::bytes(1 << 20).install_apart();
    let y = x.clone().sin();
    let inner = MemoryBudget::bytes(1 << 20).install_apart();
    let view = y.clone().reshape([8, 8]);
    drop(y);
    assert_eq!((outer.live_bytes(), inner.live_bytes()), (256, 0));
    drop(view);
    assert_eq!((outer.live_bytes(), inner.live_bytes()), (0, 0));
    drop((inner, outer));
    assert_eq!(RematStats::of_thread().live_bytes, 0);
}

/// The bytes of a gradient count until its last handle is dropped, that of a view too, or its step
/// is over.
#[test]
fn gradients_count_until_they_go_or_their_step_ends() {
    RematStats::reset_thread();
    let x = Tensor::<Managed, 2>::ones([16, 4], &Default::default()).require_grad();
    let budget = MemoryBudget::bytes(1 << 20).install_apart();
    let gradient = || {
        let grads = x.clone().exp().sum().backward();
        x.grad(&grads).expect("a gradient")
    };
    let (first, bytes) = (gradient(), 16 * 4 * 4);
    assert_eq!(budget.live_bytes(), bytes);
    let turned = first.clone().swap_dims(0, 1);
    let flat = first.clone().reshape([64]);
    drop(first);
    assert_eq!(budget.live_bytes(), bytes, "two views of one storage");
    let copy = turned.clone().reshape([64]);
    assert_eq!(budget.live_bytes(), 2 * bytes, "a reshape that copies");
    let recording = record();
    let view = turned.clone().swap_dims(0, 1);
    drop((turned, flat));
    assert_eq!(budget.live_bytes(), 2 * bytes, "a view made in a trace");
    drop((view, recording));
    assert_eq!(budget.live_bytes(), bytes);
    let sum = copy.clone() + 1.0;
    assert_eq!(budget.live_bytes(), 2 * bytes, "made of a gradient");
    budget.step();
    assert_eq!(budget.live_bytes(), 0);
    let second = gradient();
    assert_eq!(budget.live_bytes(), bytes);
    drop((copy, sum));
    assert_eq!(budget.live_bytes(), bytes, "of an earlier step");
    // State of an optimizer is written in place by its last user: that gets no recipe, which would
    // keep the old state.
    budget.step();
    for state in [second.clone(), second] {
        evict(&state.mul_scalar(2.0));
        assert_eq!(RematStats::of_thread().evicted_operations, 1);
    }
    let second = gradient();
    // On another thread they count where they were made.
    std::thread::spawn(move || drop(second))
        .join()
        .expect("no panic");
    assert_eq!(budget.live_bytes(), 0);
    assert_eq!(RematStats::of_thread().live_bytes, 0);
}

/// A gradient of which there is a view is still one that backward works on: the ones of its mean
/// are not the seed of another backward pass.
#[test]
fn a_view_of_a_gradient_does_not_hide_it() {
    let device = Default::default();
    let leaf = |dims: [usize; 2]| Tensor::<Managed, 2>::ones(dims, &device).require_grad();
    let (a, w) = (leaf([1, 1]), leaf([1, 1]).reshape([1]));
    let budget = MemoryBudget::fraction(0.9).expect("a fraction");
    let budget = budget.install_apart();
    // Backward begins with what is farthest from the leaves, so the view is made before the mean's
    // ones.
    let a = a.swap_dims(0, 1).swap_dims(0, 1).reshape([1]);
    drop((a + w.mean()).backward());
    assert_eq!(budget.limit_bytes(), [None], "one step, not over yet");
}
