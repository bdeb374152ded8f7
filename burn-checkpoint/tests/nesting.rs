//! Blocks in nested scopes: exactly the plain loop.

mod block;

use std::sync::{Mutex, MutexGuard};

use burn::backend::Autodiff;
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor, TensorData};
use burn_checkpoint::trace::{EventKind, record};
use burn_checkpoint::{Checkpointed, Policy, Remat, RematStats, checkpoint, checkpoint_sequential};
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

/// A part of a list of blocks.
#[derive(Debug)]
enum Part {
    Block,
    Scope(Vec<Part>),
}

/// Runs the parts with the next blocks.
fn run<'a>(
    parts: &[Part],
    blocks: &mut impl Iterator<Item = &'a Block<B>>,
    x: Tensor<B, 2>,
) -> Tensor<B, 2> {
    parts.iter().fold(x, |x, part| match part {
        Part::Block => blocks.next().expect("a block for each part").forward(x),
        Part::Scope(inner) => checkpoint(|| run(inner, blocks, x)),
    })
}

/// The loss, the gradient of the input and those of all parameters of the plain loop.
fn numbers_of_loop(blocks: &[Block<B>], x: &Tensor<B, 2>) -> Vec<TensorData> {
    numbers(blocks, x, |x| {
        blocks.iter().fold(x, |x, block| block.forward(x))
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

/// Nestings of every shape, drawn from the bits of `seed`.
fn any_nesting(blocks: usize, mut seed: u64) -> Vec<Part> {
    let mut open = vec![Vec::new()];
    for _ in 0..blocks {
        while seed & 1 == 1 && open.len() < 5 {
            open.push(Vec::new());
            seed >>= 1;
        }
        seed >>= 1;
        open.last_mut().unwrap().push(Part::Block);
        while seed & 1 == 1 && open.len() > 1 {
            let inner = open.pop().unwrap();
            open.last_mut().unwrap().push(Part::Scope(inner));
            seed >>= 1;
        }
        seed >>= 1;
    }
    while open.len() > 1 {
        let inner = open.pop().unwrap();
        open.last_mut().unwrap().push(Part::Scope(inner));
    }
    open.remove(0)
}

#[test]
fn nested_scopes_are_the_plain_loop_bit_for_bit_whatever_the_nesting() {
    let _seeded = seeded();
    let (blocks, x) = chain(&[64, 16, 48, 96, 16, 32], 0.2);
    let plain = numbers_of_loop(&blocks, &x);
    for number in 0..44_u64 {
        let parts = any_nesting(6, number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let found = numbers(&blocks, &x, |x| run(&parts, &mut blocks.iter(), x));
        assert_eq!(found, plain, "{parts:?}");
    }
}

#[test]
fn segments_are_scopes() {
    let _seeded = seeded();
    let (blocks, x) = chain(&[64, 16, 48, 96, 16], 0.2);
    let plain = numbers_of_loop(&blocks, &x);
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
    let plain = numbers_of_loop(&blocks, &x);
    let wrap = |block: &Block<B>| Checkpointed::new(block.clone(), Policy::Recompute);
    let wrapped: Vec<_> = blocks.iter().map(wrap).collect();
    RematStats::reset_thread();
    let forward = |x, block: &Checkpointed<Block<B>>| block.run(|block| block.forward(x));
    let found = numbers(&blocks, &x, |x| wrapped.iter().fold(x, forward));
    assert_eq!(found, plain);
    assert!(RematStats::of_thread().evicted_operations > 0);

    assert_eq!(wrapped.num_params(), blocks.num_params());
    let restored = blocks.clone().load_record(wrapped.into_record());
    assert_eq!(numbers_of_loop(&restored, &x), plain);
}
