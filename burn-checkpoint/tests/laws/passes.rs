//! Where backward passes and updates are told by the code that runs them, none is guessed.

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_amp::{Autocast, Off};
use burn_checkpoint::{MemoryBudget, Remat, RematStats};
use burn_decorator::gradient;
use burn_flex::Flex;

type Guessed = Autodiff<Remat<Flex>>;
type Told = Autocast<Guessed, Off>;

/// A step whose forward pass makes a tensor of one float of 1, as a seed of autodiff is.
fn step<B: AutodiffBackend>() -> u64 {
    let device = Default::default();
    let before = RematStats::of_thread().evicted_operations;
    let x = Tensor::<B, 2>::full([64, 64], 1.5, &device).require_grad();
    let one = Tensor::<B, 2>::ones([1, 1], &x.device());
    let y = (0..10).fold(x.clone() * one, |y, _| y.exp().log());
    let gradients = y.sum().backward();
    assert!(x.grad(&gradients).is_some());
    RematStats::of_thread().evicted_operations - before
}

/// Evicted tensors of the second step: the first one is told of at its own backward pass.
fn evicted<B: AutodiffBackend>() -> u64 {
    let _budget = MemoryBudget::bytes(64 << 10).install();
    step::<B>();
    step::<B>()
}

#[test]
fn a_forward_pass_that_makes_a_one_is_recorded_where_backward_is_told() {
    assert_eq!(evicted::<Guessed>(), 0, "taken for a backward pass");
    assert!(evicted::<Told>() > 0);
    assert_eq!(evicted::<Guessed>(), 0, "another budget, another program");
}

/// The limit of a budget of everything, after a step whose update makes a large tensor, and compares
/// no devices.
fn measured(update: fn(&mut dyn FnMut())) -> u64 {
    let device = Default::default();
    let budget = MemoryBudget::fraction(1.0).expect("valid").install();
    let mut state = None;
    for _ in 0..2 {
        let x = Tensor::<Guessed, 2>::ones([64, 64], &device).require_grad();
        let mut gradients = x.clone().exp().log().sum().backward();
        let gradient = x.grad_remove(&mut gradients).expect("a gradient");
        update(&mut || {
            let rows = vec![gradient.clone(); 256];
            state = Some(Tensor::<<Guessed as AutodiffBackend>::InnerBackend, 2>::cat(rows, 0));
        });
        step_begins::<Guessed>(&device);
    }
    drop(state);
    budget.limit_bytes()[0].expect("measured")
}

/// An upload begins a forward pass.
fn step_begins<B: Backend>(device: &B::Device) {
    Tensor::<B, 1>::from_floats([1.0, 2.0], device);
}

#[test]
fn a_fraction_leaves_out_an_update_that_is_told() {
    const STATE_BYTES: u64 = 256 * 64 * 64 * 4;
    assert!(measured(|update| update()) > STATE_BYTES, "not told");
    assert!(measured(|update| gradient::update(update)) < STATE_BYTES);
}
