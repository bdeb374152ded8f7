//! Random programs, with random scopes, evictions and budgets.

use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Bool, Int, Tensor, TensorData, activation};
use burn_checkpoint::{
    MemoryBudget, Policy, Remat, RematStats, SavePolicy, checkpoint_with, evict,
};
use burn_flex::Flex;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::apart::InstallApart;
use crate::verified::{Verified, recorded};

type Plain = Autodiff<Verified<Flex>>;
type Managed = Autodiff<Remat<Verified<Flex>>>;

/// One step of a program; numbers choose among the tensors that there are.
#[derive(Clone, Debug)]
enum Step {
    Unary(u8, usize),
    Binary(u8, usize, usize),
    /// Makes an int or a bool tensor, or a float tensor of one.
    Other(u8, usize, usize),
    Forget(usize),
    Evict(usize),
    /// Under a budget of its own, inside of the one that there is.
    Budget(u64, Vec<Step>),
    /// A scope that returns only the first of what it makes: the rest is missed.
    Scope(u8, usize, Vec<Step>),
}

fn step() -> impl Strategy<Value = Step> {
    let number = 0..100usize;
    nested(prop_oneof![
        4 => (0..10u8, number.clone()).prop_map(|(op, a)| Step::Unary(op, a)),
        4 => (0..6u8, number.clone(), number.clone()).prop_map(|(op, a, b)| Step::Binary(op, a, b)),
        2 => (0..8u8, number.clone(), number.clone()).prop_map(|(op, a, b)| Step::Other(op, a, b)),
        1 => number.clone().prop_map(Step::Forget),
        1 => number.prop_map(Step::Evict),
    ])
}

/// A step whose result changes little where its operands do: no comparisons and no sorting.
fn smooth_step() -> impl Strategy<Value = Step> {
    let number = 0..100usize;
    nested(prop_oneof![
        4 => (0..7u8, number.clone()).prop_map(|(op, a)| Step::Unary(op, a)),
        4 => (0..5u8, number.clone(), number.clone()).prop_map(|(op, a, b)| Step::Binary(op, a, b)),
        1 => number.clone().prop_map(Step::Forget),
        1 => number.prop_map(Step::Evict),
    ])
}

/// Steps in scopes and under budgets.
fn nested(leaf: impl Strategy<Value = Step> + 'static) -> impl Strategy<Value = Step> {
    leaf.prop_recursive(3, 40, 8, move |inner| {
        let scope = (0..4u8, 1..4usize, vec(inner.clone(), 1..8))
            .prop_map(|(policy, returned, steps)| Step::Scope(policy, returned, steps));
        let budget = (0..4000u64, vec(inner, 1..8));
        let budget = budget.prop_map(|(bytes, steps)| Step::Budget(bytes, steps));
        prop_oneof![3 => scope, 1 => budget]
    })
}

/// What there is to choose from: at least one of each.
#[derive(Clone)]
struct Pool<B: AutodiffBackend> {
    floats: Vec<Tensor<B, 2>>,
    ints: Vec<Tensor<B, 2, Int>>,
    bools: Vec<Tensor<B, 2, Bool>>,
}

impl<B: AutodiffBackend> Pool<B> {
    fn other(&mut self, op: u8, a: usize, b: usize) {
        let float = self.floats[a % self.floats.len()].clone();
        let int = self.ints[a % self.ints.len()].clone();
        let second = self.ints[b % self.ints.len()].clone();
        let bool = self.bools[b % self.bools.len()].clone();
        match op {
            0 => self.ints.push((float.clamp(-2.0, 2.0) * 4.0).int()),
            1 => self.ints.push((int * second).remainder_scalar(7)),
            2 => self.ints.push(int.transpose().mask_fill(bool, 3)),
            3 => self.bools.push(float.lower_elem(0.2)),
            4 => self.bools.push(int.equal(second).bool_not()),
            5 => self.floats.push(int.float() * 0.1),
            6 => {
                // The indices stay on the tape.
                let index = second.remainder_scalar(4);
                self.floats.push(float.gather(1, index));
            }
            _ => self.floats.push(float.mask_fill(bool, 0.5)),
        }
    }
}

/// Policies whose tensors come back with the same bits in the same order.
fn exact(number: u8) -> Policy {
    match number {
        0 => Policy::Recompute,
        1 => Policy::KeepCompute,
        2 => Policy::Keep,
        _ => Policy::per_operation(|op| match op.name.len() % 2 {
            0 => SavePolicy::Keep,
            _ => SavePolicy::Recompute,
        }),
    }
}

/// Policies of which some move tensors to the host.
fn offloading(number: u8) -> Policy {
    match number {
        0 => Policy::Recompute,
        1 => Policy::KeepCompute,
        2 => Policy::Offload,
        _ => Policy::per_operation(|op| match op.name.len() % 3 {
            0 => SavePolicy::Keep,
            1 => SavePolicy::Recompute,
            _ => SavePolicy::Offload,
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

fn run<B: AutodiffBackend>(steps: &[Step], pool: &mut Pool<B>, policy: fn(u8) -> Policy) {
    for step in steps {
        let floats = &mut pool.floats;
        let pick = |number: &usize| floats[number % floats.len()].clone();
        match step {
            Step::Unary(op, a) => floats.push(unary(*op, pick(a))),
            Step::Binary(op, a, b) => floats.push(binary(*op, pick(a), pick(b))),
            Step::Other(op, a, b) => pool.other(*op, *a, *b),
            Step::Forget(a) if floats.len() > 3 => {
                floats.remove(1 + a % (floats.len() - 1));
            }
            Step::Forget(_) => {}
            Step::Evict(a) => evict(&(
                pick(a),
                pool.ints[a % pool.ints.len()].clone(),
                pool.bools[a % pool.bools.len()].clone(),
            )),
            Step::Budget(bytes, steps) => {
                let _budget = MemoryBudget::bytes(*bytes).install_apart();
                run(steps, pool, policy);
            }
            Step::Scope(number, returned, steps) => {
                let mut missed = Vec::new();
                let (returned, ints, bools) = checkpoint_with(policy(*number), || {
                    let mut made = pool.clone();
                    run(steps, &mut made, policy);
                    missed = made.floats.split_off(made.floats.len().min(*returned));
                    // The last one is missed, too.
                    let ints = made.ints.pop();
                    pool.ints.extend(ints);
                    (made.floats, made.ints, made.bools)
                });
                let floats = &mut pool.floats;
                floats.extend(returned);
                floats.extend(missed);
                let excess = floats.len().saturating_sub(12);
                floats.drain(1..1 + excess);
                pool.ints.extend(ints.into_iter().rev().take(2));
                pool.bools.extend(bools.into_iter().rev().take(2));
            }
        }
    }
}

/// What a program gives.
struct Outcome {
    loss: TensorData,
    others: Vec<TensorData>,
    gradients: Vec<Option<TensorData>>,
}

fn outcome<B: AutodiffBackend>(steps: &[Step], policy: fn(u8) -> Policy) -> Outcome {
    let device = Default::default();
    let leaf = |phase: f32| {
        let values: Vec<f32> = (0..16).map(|x| (x as f32 * 0.7 + phase).sin()).collect();
        Tensor::<B, 2>::from_data(TensorData::new(values, [4, 4]), &device).require_grad()
    };
    let leaves = [leaf(0.0), leaf(1.0)];
    let ints: Vec<i32> = (0..16).collect();
    let ints = Tensor::<B, 2, Int>::from_data(TensorData::new(ints, [4, 4]), &device);
    let mut pool = Pool {
        floats: leaves.to_vec(),
        bools: vec![ints.clone().greater_elem(7)],
        ints: vec![ints],
    };
    run(steps, &mut pool, policy);
    let sum = pool
        .floats
        .into_iter()
        .map(|x| x.mean())
        .reduce(|a, b| a + b);
    let loss = sum.expect("leaves");
    let ints = pool.ints.into_iter().map(Tensor::into_data);
    let bools = pool.bools.into_iter().map(Tensor::into_data);
    let others = ints.chain(bools).collect();
    let of_loss = loss.to_data();
    let gradients = loss.backward();
    let gradients = leaves.map(|leaf| Some(leaf.grad(&gradients)?.into_data()));
    Outcome {
        loss: of_loss,
        others,
        gradients: gradients.to_vec(),
    }
}

/// The bits of a tensor, of which NaN is another than itself as a number.
fn bits(data: &TensorData) -> &[u8] {
    data.as_bytes()
}

/// Whether two tensors differ by no more than rounding.
fn is_near(a: &TensorData, b: &TensorData) -> bool {
    let (a, b) = (a.iter::<f32>(), b.iter::<f32>());
    let is_near = |(a, b): (f32, f32)| (a - b).abs() <= 1e-3 * a.abs().max(1.0);
    a.zip(b).all(is_near)
}

/// Autodiff forgets what the loss did not depend on in the next backward pass. Then nothing is left.
fn nothing_is_left() -> bool {
    outcome::<Managed>(&[], exact);
    RematStats::of_thread().live_bytes == 0
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_program_is_exact(
        steps in vec(step(), 1..30),
        budget in proptest::option::of(0..4000u64),
        verifies in any::<bool>(),
    ) {
        let (plain, run) = recorded(|| outcome::<Plain>(&steps, exact));
        let installed = budget.map(|bytes| MemoryBudget::bytes(bytes).install_apart());
        let found = || outcome::<Managed>(&steps, exact);
        let found = if verifies { run.verify(found) } else { found() };
        drop(installed);
        prop_assert_eq!(bits(&plain.loss), bits(&found.loss));
        let of_others = |outcome: &Outcome| outcome.others.iter().map(bits).map(<[u8]>::to_vec).collect::<Vec<_>>();
        prop_assert_eq!(of_others(&plain), of_others(&found));
        for (plain, found) in plain.gradients.iter().zip(&found.gradients) {
            prop_assert_eq!(plain.as_ref().map(bits), found.as_ref().map(bits));
        }
        prop_assert!(nothing_is_left());
    }

    /// What comes back from the host has the same elements, perhaps in another order in memory.
    #[test]
    fn any_program_that_offloads_is_exact_but_for_rounding(
        steps in vec(smooth_step(), 1..30),
        budget in proptest::option::of(0..4000u64),
        verifies in any::<bool>(),
    ) {
        let (plain, run) = recorded(|| outcome::<Plain>(&steps, offloading));
        let installed = budget.map(|bytes| MemoryBudget::bytes(bytes).install_apart());
        let found = || outcome::<Managed>(&steps, offloading);
        let found = if verifies { run.verify_uploads(found) } else { found() };
        drop(installed);
        prop_assert!(is_near(&plain.loss, &found.loss), "{} {}", plain.loss, found.loss);
        for (plain, found) in plain.gradients.iter().zip(&found.gradients) {
            match (plain, found) {
                (Some(plain), Some(found)) => prop_assert!(is_near(plain, found), "{plain} {found}"),
                (plain, found) => prop_assert_eq!(plain, found),
            }
        }
        prop_assert!(nothing_is_left());
    }
}
