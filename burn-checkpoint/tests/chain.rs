//! Chains run by plans: exactly the plain loop, in the bytes that the plan says.

mod block;
mod planner;

use std::sync::{Mutex, MutexGuard};

use burn::backend::Autodiff;
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor, TensorData};
use burn_checkpoint::plan::{Node, Plan, PlanError, Profile, plan, simulate};
use burn_checkpoint::trace::{EventKind, Traced, record};
use burn_checkpoint::{
    Checkpointed, MemoryBudget, Policy, Remat, RematStats, checkpoint_chain, checkpoint_sequential,
    checkpoint_with, profile_chain, profile_tail,
};
use burn_flex::Flex;

use block::Block;

type B = Autodiff<Remat<Flex>>;

const ROWS: usize = 24;
const WIDTH: usize = 32;

/// Random numbers come from one generator of the process, so tests that draw run one at a time.
fn seeded() -> MutexGuard<'static, ()> {
    static DRAWING: Mutex<()> = Mutex::new(());
    let guard = DRAWING.lock().unwrap_or_else(|poison| poison.into_inner());
    B::seed(&Default::default(), 7);
    guard
}

fn chain(hidden: &[usize], dropout: f64) -> (Vec<Block<B>>, Tensor<B, 2>) {
    let device = Default::default();
    let block = |hidden: &usize| Block::new(WIDTH, *hidden, dropout, &device);
    let blocks: Vec<_> = hidden.iter().map(block).collect();
    let x = Tensor::random([ROWS, WIDTH], Distribution::Default, &Default::default());
    (blocks, x)
}

/// The loss, the gradient of the input and those of all parameters.
fn step(blocks: &[Block<B>], x: &Tensor<B, 2>, plan: Option<&Plan>) -> Vec<TensorData> {
    numbers(blocks, x, |x| match plan {
        None => blocks.iter().fold(x, |x, block| block.forward(x)),
        Some(plan) => checkpoint_chain(blocks, x, plan, Block::forward).unwrap(),
    })
}

/// The same where `forward` runs the blocks.
fn numbers(
    blocks: &[Block<B>],
    x: &Tensor<B, 2>,
    forward: impl FnOnce(Tensor<B, 2>) -> Tensor<B, 2>,
) -> Vec<TensorData> {
    B::seed(&Default::default(), 11);
    let x = x.clone().require_grad();
    let out = forward(x.clone());
    let loss = (out.clone() * out).mean();
    let mut numbers = vec![loss.to_data()];
    let grads = loss.backward();
    numbers.push(x.grad(&grads).unwrap().into_data());
    for block in blocks {
        for linear in [&block.up, &block.down] {
            numbers.push(linear.weight.grad(&grads).unwrap().into_data());
            let bias = linear.bias.as_ref().unwrap();
            numbers.push(bias.grad(&grads).unwrap().into_data());
        }
        numbers.push(block.norm.gamma.grad(&grads).unwrap().into_data());
        let beta = block.norm.beta.as_ref().unwrap();
        numbers.push(beta.grad(&grads).unwrap().into_data());
    }
    numbers
}

/// Plans of every shape, drawn from the bits of `seed`.
fn any_plan(blocks: usize, mut seed: u64) -> Plan {
    let mut open = vec![Vec::new()];
    for _ in 0..blocks {
        while seed & 1 == 1 && open.len() < 5 {
            open.push(Vec::new());
            seed >>= 1;
        }
        seed >>= 1;
        open.last_mut().unwrap().push(Node::Block);
        while seed & 1 == 1 && open.len() > 1 {
            let inner = open.pop().unwrap();
            open.last_mut().unwrap().push(Node::Scope(inner));
            seed >>= 1;
        }
        seed >>= 1;
    }
    while open.len() > 1 {
        let inner = open.pop().unwrap();
        open.last_mut().unwrap().push(Node::Scope(inner));
    }
    Plan::new(open.remove(0))
}

#[test]
fn a_chain_is_the_plain_loop_bit_for_bit_whatever_the_plan() {
    let _seeded = seeded();
    let (blocks, x) = chain(&[64, 16, 48, 96, 16, 32], 0.2);
    let plain = step(&blocks, &x, None);
    let named = [
        "[0, 1, 2, 3, 4, 5]",
        "[[0], [1], [2], [3], [4], [5]]",
        "[[0, 1, 2], [3, 4, 5]]",
        "[[[0, 1], [2, [3], 4], 5]]",
    ];
    let named = named.map(|text: &str| serde_json::from_str(text).unwrap());
    for plan in named.into_iter().chain(any_plans(6, 40)) {
        assert_eq!(step(&blocks, &x, Some(&plan)), plain, "{plan:?}");
    }
}

#[test]
fn segments_of_a_chain_are_scopes() {
    let _seeded = seeded();
    let (blocks, x) = chain(&[64, 16, 48, 96, 16], 0.2);
    let plain = step(&blocks, &x, None);
    for (segments, scopes) in [(1, 1), (2, 2), (3, 3), (5, 5), (9, 5)] {
        let recording = record();
        let forward = |x| checkpoint_sequential(&blocks, segments, x, Block::forward);
        assert_eq!(numbers(&blocks, &x, forward), plain);
        let begun = recording.finish();
        let begun = begun
            .iter()
            .filter(|event| matches!(event.kind, EventKind::ScopeBegin { .. }));
        assert_eq!(begun.count(), scopes);
    }
}

/// Parameters, their paths and the record are those of the module alone; the gradients too, bit for
/// bit.
#[test]
fn a_checkpointed_module_is_the_module_in_a_scope() {
    let _seeded = seeded();
    let (blocks, x) = chain(&[64, 16], 0.2);
    let plain = step(&blocks, &x, None);
    let wrap = |block: &Block<B>| Checkpointed::new(block.clone(), Policy::Recompute);
    let wrapped: Vec<_> = blocks.iter().map(wrap).collect();
    RematStats::reset_thread();
    let forward = |x, block: &Checkpointed<Block<B>>| block.run(|block| block.forward(x));
    let found = numbers(&blocks, &x, |x| wrapped.iter().fold(x, forward));
    assert_eq!(found, plain);
    assert!(RematStats::of_thread().evicted_operations > 0);

    assert_eq!(wrapped.num_params(), blocks.num_params());
    let restored = blocks.clone().load_record(wrapped.into_record());
    assert_eq!(step(&restored, &x, None), plain);
}

#[test]
fn a_plan_of_another_length_runs_nothing() {
    let _seeded = seeded();
    let (blocks, x) = chain(&[8, 8], 0.0);
    let never = |_: &Block<B>, _| panic!("a block ran");
    let refused = checkpoint_chain(&blocks, x, &Plan::plain(3), never).err();
    let expected = PlanError::Length {
        planned: 3,
        blocks: 2,
    };
    assert_eq!(refused, Some(expected));
}

#[test]
fn a_backend_without_remat_is_refused() {
    let _seeded = seeded();
    let x = Tensor::<Autodiff<Flex>, 2>::zeros([2, 2], &Default::default());
    let refused = profile_chain(&[2.0, 3.0], x, |factor, x| x * *factor);
    assert_eq!(refused, Err(PlanError::NoRemat { block: 0 }));
}

/// The most bytes of a step with a plan, above those before it, all tensors counted.
fn measured_peak(blocks: &[Block<B>], x: &Tensor<B, 2>, plan: &Plan) -> u64 {
    let x = x.clone().require_grad();
    let mut peak_bytes = 0;
    let keep = Policy::Keep;
    checkpoint_with(keep, || {
        RematStats::reset_thread();
        let before_bytes = RematStats::of_thread().live_bytes;
        let out = checkpoint_chain(blocks, x, plan, Block::forward).unwrap();
        let grads = loss(out).backward();
        peak_bytes = RematStats::of_thread().peak_bytes - before_bytes;
        drop(grads);
    });
    peak_bytes
}

fn loss(x: Tensor<B, 2>) -> Tensor<B, 1> {
    (x.clone() * x).mean()
}

fn measure(blocks: &[Block<B>], x: &Tensor<B, 2>) -> Profile {
    let mut profile = profile_chain(blocks, x.clone(), Block::forward).unwrap();
    profile.base_bytes = 0;
    profile.tail = profile_tail(x.clone(), loss);
    profile
}

/// What a budget evicts meanwhile, of the chain or of what else is there, is not the profile's.
#[test]
fn a_profile_under_a_budget_is_that_without() {
    fn without_times(mut profile: Profile) -> Profile {
        for block in &mut profile.blocks {
            (block.forward_ns, block.backward_ns, block.replay_ns) = (0, 0, 0);
        }
        profile
    }
    let _seeded = seeded();
    let (blocks, x) = chain(&[64, 16, 48], 0.2);
    let plain = without_times(measure(&blocks, &x));
    for limit_bytes in [0, 16 << 10, 24 << 10, 32 << 10, 48 << 10, 96 << 10, 1 << 30] {
        let budget = MemoryBudget::bytes(limit_bytes).install();
        let held: Vec<_> = (0..8).map(|_| x.clone().cos()).collect();
        let last = held[7].clone();
        assert_eq!(without_times(measure(&blocks, &x)), plain, "{limit_bytes}");
        // Blocks whose input is evicted first.
        assert_eq!(
            without_times(measure(&blocks, &last)),
            plain,
            "{limit_bytes}"
        );
        // In force once more.
        assert_eq!(budget.limit_bytes(), [Some(limit_bytes)]);
        let before_bytes = budget.live_bytes();
        let more = x.clone().cos();
        assert!(budget.live_bytes() > before_bytes || limit_bytes < 1 << 30);
        drop((held, more));
    }
}

fn any_plans(blocks: usize, plans: u64) -> impl Iterator<Item = Plan> {
    let named = [
        Plan::plain(blocks),
        Plan::every_block(blocks),
        Plan::segments(blocks, 3),
    ];
    let seeds = (0..plans).map(|number| number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    named
        .into_iter()
        .chain(seeds.map(move |seed| any_plan(blocks, seed)))
}

/// Never more, and not much less: a block's output is planned to stay even where the next block
/// does not save it.
#[test]
fn a_step_takes_the_bytes_that_the_model_says() {
    let _seeded = seeded();
    for dropout in [0.0, 0.2] {
        let (blocks, x) = chain(&[64, 160, 48, 96, 160, 32, 64, 64], dropout);
        let profile = measure(&blocks, &x);
        for plan in any_plans(8, 40) {
            let said = simulate(&profile, &plan).unwrap().peak_bytes;
            let taken = measured_peak(&blocks, &x, &plan);
            assert!(taken <= said, "{taken} of {said} bytes: {plan:?}");
            assert!(
                taken * 100 >= said * 90,
                "{taken} of {said} bytes: {plan:?}"
            );
        }
    }
}

#[test]
fn a_step_replays_the_blocks_that_the_model_says() {
    let _seeded = seeded();
    let (blocks, x) = chain(&[16, 32, 24, 16, 40, 16], 0.1);
    let profile = measure(&blocks, &x);
    for plan in any_plans(6, 60) {
        let said = simulate(&profile, &plan).unwrap().replayed;
        let recording = record();
        step(&blocks, &x, Some(&plan));
        let gelus = recording.finish().into_iter().filter(
            |event| matches!(event.kind, EventKind::Replay(Traced { op, .. }, _) if op == "gelu"),
        );
        assert_eq!(gelus.count() as u64, said, "{plan:?}");
    }
}

#[test]
fn a_plan_keeps_its_limit() {
    let _seeded = seeded();
    let (blocks, x) = chain(&[64, 32, 96, 64, 64, 16, 64, 48, 64, 64], 0.1);
    let profile = measure(&blocks, &x);
    let most_bytes = simulate(&profile, &Plan::plain(10)).unwrap().peak_bytes;
    let Err(PlanError::DoesNotFit { least_bytes, .. }) = plan(&profile, 0) else {
        panic!("nothing fits 0 bytes");
    };
    assert!(least_bytes * 10 < most_bytes * 8);
    let mut before_ns = u64::MAX;
    for part in 0..=8 {
        let limit_bytes = least_bytes + (most_bytes - least_bytes) * part / 8;
        let found = plan(&profile, limit_bytes).unwrap();
        let taken = measured_peak(&blocks, &x, &found);
        assert!(taken <= limit_bytes, "{taken} of {limit_bytes}: {found:?}");
        let time_ns = simulate(&profile, &found).unwrap().time_ns;
        assert!(time_ns <= before_ns, "{found:?}");
        before_ns = time_ns;
    }
}
