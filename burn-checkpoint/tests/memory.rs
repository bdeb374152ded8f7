//! Memory is really freed: bytes of the heap, counted by the allocator. One test, for the allocator
//! is the process's.

mod block;

use burn::backend::Autodiff;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Distribution, Int, Tensor};
use burn_amp::{Autocast, Off};
use burn_checkpoint::{
    MemoryBudget, Policy, Remat, SavePolicy, Work, checkpoint_units, checkpoint_with,
};
use burn_flex::Flex;
use peak_alloc::PeakAlloc;

use block::Block;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type Plain = Autodiff<Flex>;
type Managed = Autodiff<Remat<Flex>>;

const WIDTH: usize = 32;

fn blocks<B: Backend>(count: usize) -> Vec<Block<B>> {
    let device = Default::default();
    (0..count)
        .map(|_| Block::new(WIDTH, 4 * WIDTH, 0.0, &device))
        .collect()
}

fn loss<B: Backend>(blocks: &[Block<B>], policy: Option<&Policy>, tokens: usize) -> Tensor<B, 1> {
    let device = Default::default();
    let mut x = Tensor::random([tokens, WIDTH], Distribution::Default, &device);
    for block in blocks {
        x = match policy {
            None => block.forward(x),
            Some(policy) => checkpoint_with(policy.clone(), || block.forward(x)),
        };
    }
    x.powf_scalar(2.0).mean()
}

/// KiB of the heap that one forward and backward pass takes at most, beyond what is there before.
fn peak<B: AutodiffBackend>(policy: Option<&Policy>, budget: Option<u64>) -> f32 {
    let blocks = blocks::<B>(12);
    let budget = budget.map(|bytes| MemoryBudget::bytes(bytes).install());
    let before = HEAP.current_usage_as_kb();
    HEAP.reset_peak_usage();
    let grads = loss(&blocks, policy, 512).backward();
    let peak = HEAP.peak_usage_as_kb() - before;
    drop((grads, budget));
    peak
}

/// KiB of the heap that two passes with scopes of the blocks take at most, each: by hand, or by
/// units.
fn peaks_in_scopes(by_units: bool) -> [f32; 2] {
    type Told = Autocast<Autodiff<Remat<Flex>>, Off>;
    let blocks = blocks::<Told>(12);
    let (blocks, policy) = if by_units {
        (checkpoint_units(blocks).expect("blocks").0, None)
    } else {
        (blocks, Some(Policy::Recompute))
    };
    [(); 2].map(|()| {
        let before = HEAP.current_usage_as_kb();
        HEAP.reset_peak_usage();
        drop(loss(&blocks, policy.as_ref(), 512).backward());
        HEAP.peak_usage_as_kb() - before
    })
}

/// KiB of the heap after a step: the most of the first 200 steps, and of 800 more. Of ten in a row
/// the least counts: the thread that waits for reads to the host may not have dropped one yet.
fn growth(policy: Option<&Policy>, budget: Option<u64>) -> (f32, f32) {
    let mut model = blocks::<Managed>(2);
    let budget = budget.map(|bytes| MemoryBudget::bytes(bytes).install());
    let mut optimizer = AdamWConfig::new().init();
    let (mut early, mut late) = (0.0f32, 0.0f32);
    let mut least = f32::INFINITY;
    for step in 0..1000 {
        let loss = loss(&model, policy, 8);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        drop(loss);
        model = optimizer.step(1e-3, model, grads);
        least = least.min(HEAP.current_usage_as_kb());
        if step % 10 == 9 {
            let most = if step < 200 { &mut early } else { &mut late };
            *most = most.max(least);
            least = f32::INFINITY;
        }
    }
    drop(budget);
    (early, late)
}

/// KiB of the heap that 1,000 dropped tensors leave behind under a budget, while 4,000 others are
/// alive.
fn left_behind() -> f32 {
    let _budget = MemoryBudget::bytes(1 << 30).install();
    let x = Tensor::<Remat<Flex>, 1>::ones([4], &Default::default());
    let held: Vec<_> = (0..4000).map(|_| x.clone() * 2.0).collect();
    let before = HEAP.current_usage_as_kb();
    (0..1000).for_each(|_| drop(x.clone() * 2.0));
    let left = HEAP.current_usage_as_kb() - before;
    drop(held);
    left
}

/// KiB of the heap that a scope leaves whose policy moves selected rows to the host and keeps a
/// reshaped copy of one: that copy has 256.
fn left_of_a_kept_copy() -> f32 {
    let policy = Policy::per_operation(|call| match call.op.work {
        Work::Index => SavePolicy::Offload,
        _ => SavePolicy::Keep,
    });
    let device = Default::default();
    let x = Tensor::<Remat<Flex>, 2>::ones([256, 256], &device);
    let rows = Tensor::<_, 1, Int>::arange(0..256, &device);
    let before = HEAP.current_usage_as_kb();
    let mut copy = None;
    checkpoint_with(policy, || {
        copy = Some(
            x.clone()
                .select(0, rows.clone())
                .transpose()
                .reshape([65536]),
        );
    });
    let left = HEAP.current_usage_as_kb() - before;
    drop(copy);
    left
}

#[test]
fn memory_is_freed() {
    let left = left_behind();
    assert!(left < 16.0, "{left} KiB");

    let left = left_of_a_kept_copy();
    assert!(left < 256.0 + 16.0, "{left} KiB");

    let plain = peak::<Plain>(None, None);
    let bare = peak::<Managed>(None, None);
    let recompute = peak::<Managed>(Some(&Policy::Recompute), None);
    let keep = peak::<Managed>(Some(&Policy::KeepCompute), None);
    let half = peak::<Managed>(None, Some(plain as u64 * 1024 / 2));
    let quarter = peak::<Managed>(None, Some(plain as u64 * 1024 / 4));
    println!(
        "KiB: plain {plain}, no scope {bare}, every block {recompute}, keep-compute {keep}, budget 50 % {half}, 25 % {quarter}"
    );
    assert!(bare < plain * 1.02);
    assert!(recompute < plain * 0.35);
    assert!(keep < plain * 0.65);
    let ([_, by_hand], by_units) = (peaks_in_scopes(false), peaks_in_scopes(true));
    println!("KiB: scopes by hand {by_hand}, of units {by_units:?}");
    assert!(by_units.iter().all(|peak| *peak < by_hand * 1.15));

    // The estimate of work space is not part of a budget.
    assert!(half < plain * 0.6);
    assert!(quarter < plain * 0.4);

    for (policy, budget) in [
        (Some(Policy::Recompute), None),
        (Some(Policy::Offload), None),
        (None, Some(20_000)),
        (Some(Policy::KeepCompute), Some(20_000)),
    ] {
        let (early, late) = growth(policy.as_ref(), budget);
        println!("{policy:?} {budget:?}: {early} KiB in 200 steps, {late} in 800 more");
        assert!(late < early + 8.0, "{policy:?} {budget:?}: {early} {late}");
    }
}
