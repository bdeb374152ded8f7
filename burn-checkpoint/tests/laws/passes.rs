//! Where backward passes and updates are told by the code that runs them, none is guessed.

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_amp::{Autocast, Off};
use burn_checkpoint::trace::{EventKind, Kind};
use burn_checkpoint::{MemoryBudget, Remat, RematStats, record_all};
use burn_decorator::gradient;
use burn_flex::Flex;

use crate::apart::{InstallApart, keep_apart};

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
    let _budget = MemoryBudget::bytes(64 << 10).install_apart();
    step::<B>();
    step::<B>()
}

#[test]
fn a_forward_pass_that_makes_a_one_is_recorded_where_backward_is_told() {
    assert_eq!(evicted::<Guessed>(), 0, "taken for a backward pass");
    assert!(evicted::<Told>() > 0);
    assert_eq!(evicted::<Guessed>(), 0, "another budget, another program");
}

/// What a budget of everything has measured after one step, most of which is gradients. The loss
/// has one element if `is_summed`, and the forward pass makes a single one of its own if `has_one`.
fn limit_after_one_step(has_one: bool, is_summed: bool) -> Option<u64> {
    let device = Default::default();
    let budget = MemoryBudget::fraction(1.0).expect("valid").install_apart();
    let parameter = |_| Tensor::<Told, 2>::full([64, 64], 1.5, &device).require_grad();
    let parameters: Vec<_> = (0..10).map(parameter).collect();
    let one = has_one.then(|| Tensor::<Told, 2>::ones([1, 1], &device));
    let doubled = parameters.iter().map(|x| x.clone() * 2.0);
    let y = doubled.reduce(|sum, x| sum + x).expect("there are some");
    let loss = if is_summed { y.sum() } else { y.flatten(0, 1) };
    let gradients = loss.backward();
    assert!(parameters[0].grad(&gradients).is_some());
    drop((gradients, one));
    step_begins::<Told>(&device);
    budget.limit_bytes()[0]
}

#[test]
fn a_told_backward_pass_may_begin_with_a_loss_of_several_elements() {
    let measured = limit_after_one_step(false, false);
    assert!(measured.is_some(), "the backward pass was not noticed");
    keep_apart();
    let recording = record_all();
    let x = Tensor::<Told, 2>::full([64, 64], 1.5, &Default::default()).require_grad();
    let gradients = x.clone().exp().backward();
    assert!(x.grad(&gradients).is_some());
    let events = recording.finish();
    let gradient_of_exp = |kind: &EventKind| matches!(kind, EventKind::Alloc(made, Kind::Gradient) if made.op == "float_mul");
    assert!(events.iter().any(|event| gradient_of_exp(&event.kind)));
}

#[test]
fn a_single_one_in_the_first_forward_pass_does_not_end_what_a_fraction_measures() {
    // First: what a thread has computed before changes what is taken for a seed.
    let measured = limit_after_one_step(true, true).expect("measured");
    let expected = limit_after_one_step(false, true).expect("measured");
    let with_the_one = expected..expected + 64;
    assert!(with_the_one.contains(&measured), "{measured} of {expected}");
}

/// The limit of a budget of everything, after a step whose update makes a large tensor, and compares
/// no devices.
fn measured(update: fn(&mut dyn FnMut())) -> u64 {
    let device = Default::default();
    let budget = MemoryBudget::fraction(1.0).expect("valid").install_apart();
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
