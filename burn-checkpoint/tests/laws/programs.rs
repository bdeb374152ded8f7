//! Random programs, with random scopes, evictions and budgets.

use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorData, activation};
use burn_checkpoint::{
    Fate, MemoryBudget, Policy, Remat, RematStats, Verify, checkpoint_with, evict,
};
use burn_flex::Flex;
use proptest::collection::vec;
use proptest::prelude::*;

/// One step of a program; numbers choose among the tensors that there are.
#[derive(Clone, Debug)]
enum Step {
    Unary(u8, usize),
    Binary(u8, usize, usize),
    Forget(usize),
    Evict(usize),
    /// A scope that returns only the first of what it makes: the rest is missed.
    Scope(u8, usize, Vec<Step>),
}

fn step() -> impl Strategy<Value = Step> {
    let number = 0..100usize;
    let leaf = prop_oneof![
        4 => (0..10u8, number.clone()).prop_map(|(op, a)| Step::Unary(op, a)),
        4 => (0..6u8, number.clone(), number.clone()).prop_map(|(op, a, b)| Step::Binary(op, a, b)),
        1 => number.clone().prop_map(Step::Forget),
        1 => number.clone().prop_map(Step::Evict),
    ];
    leaf.prop_recursive(3, 40, 8, move |inner| {
        (0..4u8, 1..4usize, vec(inner, 1..8))
            .prop_map(|(policy, returned, steps)| Step::Scope(policy, returned, steps))
    })
}

type Pool<B> = Vec<Tensor<B, 2>>;

fn policy(number: u8) -> Policy {
    match number {
        0 => Policy::Recompute,
        1 => Policy::KeepCompute,
        2 => Policy::Offload,
        _ => Policy::per_operation(|op| match op.name.len() % 3 {
            0 => Fate::Keep,
            1 => Fate::Recompute,
            _ => Fate::Offload,
        }),
    }
}

fn unary<B: AutodiffBackend>(op: u8, x: Tensor<B, 2>) -> Tensor<B, 2> {
    match op {
        0 => x.tanh(),
        1 => activation::gelu(x),
        2 => activation::softmax(x, 1),
        3 => x.transpose(),
        4 => x.slice([0..2, 0..4]).repeat(&[2, 1]),
        5 => x.clone().sum_dim(1).expand([4, 4]) * 0.1,
        6 => x.swap_dims(0, 1).reshape([2, 8]).reshape([4, 4]),
        7 => {
            let mask = x.clone().greater_elem(0.1);
            x.mask_fill(mask, 0.25)
        }
        8 => x.sort(1),
        _ => x.mul_scalar(0.7).add_scalar(0.1),
    }
}

fn binary<B: AutodiffBackend>(op: u8, a: Tensor<B, 2>, b: Tensor<B, 2>) -> Tensor<B, 2> {
    match op {
        0 => a + b,
        1 => a * b,
        2 => (a.matmul(b) * 0.3).tanh(),
        3 => a - b,
        4 => Tensor::cat(vec![a, b], 0).slice([2..6, 0..4]),
        _ => a.clone().mask_where(b.clone().greater(a), b),
    }
}

fn run<B: AutodiffBackend>(steps: &[Step], pool: &mut Pool<B>) {
    for step in steps {
        let pick = |number: &usize| pool[number % pool.len()].clone();
        match step {
            Step::Unary(op, a) => pool.push(unary(*op, pick(a))),
            Step::Binary(op, a, b) => pool.push(binary(*op, pick(a), pick(b))),
            Step::Forget(a) if pool.len() > 3 => {
                pool.remove(1 + a % (pool.len() - 1));
            }
            Step::Forget(_) => {}
            Step::Evict(a) => evict(&pick(a)),
            Step::Scope(number, returned, steps) => {
                let mut missed = Vec::new();
                let returned = checkpoint_with(policy(*number), || {
                    let mut made = pool.clone();
                    run(steps, &mut made);
                    missed = made.split_off(made.len().min(*returned));
                    made
                });
                pool.extend(returned);
                pool.extend(missed);
                let excess = pool.len().saturating_sub(12);
                pool.drain(1..1 + excess);
            }
        }
    }
}

/// The bits of the loss and of the gradients.
fn bits<B: AutodiffBackend>(steps: &[Step]) -> Vec<Vec<u8>> {
    let device = Default::default();
    let leaf = |phase: f32| {
        let values: Vec<f32> = (0..16).map(|x| (x as f32 * 0.7 + phase).sin()).collect();
        Tensor::<B, 2>::from_data(TensorData::new(values, [4, 4]), &device).require_grad()
    };
    let leaves = [leaf(0.0), leaf(1.0)];
    let mut pool = leaves.to_vec();
    run(steps, &mut pool);
    let sum = pool.into_iter().map(|x| x.mean()).reduce(|a, b| a + b);
    let loss = sum.expect("leaves");
    let mut bits = vec![loss.to_data().bytes.to_vec()];
    let grads = loss.backward();
    for leaf in leaves {
        let grad = leaf
            .grad(&grads)
            .map(|grad| grad.into_data().bytes.to_vec());
        bits.push(grad.unwrap_or_default());
    }
    bits
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_program_is_exact(steps in vec(step(), 1..30), budget in proptest::option::of(0..4000u64)) {
        let plain = bits::<Autodiff<Flex>>(&steps);
        let _verify = Verify::on();
        let installed = budget.map(|bytes| MemoryBudget::bytes(bytes).install());
        let found = bits::<Autodiff<Remat<Flex>>>(&steps);
        drop(installed);
        prop_assert_eq!(plain, found);
        // Autodiff forgets what the loss did not depend on in the next backward pass.
        bits::<Autodiff<Remat<Flex>>>(&[]);
        prop_assert_eq!(RematStats::of_thread().live_bytes, 0);
    }
}
