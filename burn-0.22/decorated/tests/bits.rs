//! Scopes, selective, offload and budgets through the patch: losses and gradients bit for bit those of stock Burn 0.22.1.
//!
//! `reference.json` is what `stock/tests/reference.rs` gets without the patch, and that test compares it each time.

#[path = "../../programs.rs"]
mod programs;

use std::collections::HashMap;
use std::sync::Mutex;

use burn::tensor::Tensor;
use burn_decorated::{AmpConfig, MemoryBudget, Policy, RematStats, checkpoint_with, is_on};
use programs::{Around, Cnn, Mlp, Plain, Program, Transformer, train};

/// Flex's random numbers are the process's.
static TURN: Mutex<()> = Mutex::new(());

struct Scope(Policy);

impl Around for Scope {
    fn run<const D: usize>(&self, block: impl FnOnce() -> Tensor<D>) -> Tensor<D> {
        checkpoint_with(self.0.clone(), block)
    }
}

fn stock<P: Program>() -> Vec<u64> {
    let text = include_str!("../../reference.json");
    let mut all: HashMap<String, Vec<u64>> = serde_json::from_str(text).expect("JSON");
    all.remove(P::NAME).expect("a program of the reference")
}

fn every_way<P: Program>() {
    let _turn = TURN.lock();
    let stock = stock::<P>();
    assert!(stock.len() > 30, "three losses and all gradients");
    assert_eq!(train::<P>(&Plain), stock, "{} without a scope", P::NAME);
    AmpConfig::off().install().expect("no operations are named");
    for policy in [Policy::Recompute, Policy::KeepCompute, Policy::Offload] {
        let before = RematStats::of_thread().evicted_operations;
        let found = train::<P>(&Scope(policy.clone()));
        assert!(found == stock, "{} under {policy:?}", P::NAME);
        assert!(
            RematStats::of_thread().evicted_operations > before,
            "{policy:?}"
        );
    }
    for percent in [80, 50] {
        let before = RematStats::of_thread().evicted_operations;
        let budget = MemoryBudget::fraction(f64::from(percent) / 100.0);
        let budget = budget.expect("a fraction").install();
        let found = train::<P>(&Plain);
        drop(budget);
        assert!(found == stock, "{} with {percent} % of its bytes", P::NAME);
        assert!(
            RematStats::of_thread().evicted_operations > before,
            "{percent} %"
        );
    }
}

#[test]
fn the_patch_is_on() {
    assert!(is_on());
}

#[test]
fn mlp() {
    every_way::<Mlp>();
}

#[test]
fn cnn() {
    every_way::<Cnn>();
}

#[test]
fn transformer() {
    every_way::<Transformer>();
}

/// A second thread that draws and trains at the same time has counters, scopes and budgets of its own, and gradients come back on the
/// thread that asks for them.
#[test]
fn two_threads() {
    let _turn = TURN.lock();
    let step = || {
        let device = burn::tensor::Device::flex().autodiff();
        let x = Tensor::<2>::ones([64, 64], &device).require_grad();
        let y = checkpoint_with(Policy::Recompute, || x.clone().exp().sin().cos());
        assert!(RematStats::of_thread().evicted_operations >= 2);
        let grads = y.sum().backward();
        assert!(RematStats::of_thread().replayed_operations >= 2);
        x.grad(&grads).expect("a gradient").into_data()
    };
    let other = std::thread::spawn(step);
    assert_eq!(step(), other.join().expect("the other thread trains"));
}
