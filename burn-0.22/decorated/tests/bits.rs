//! Scopes, selective, offload and budgets through the patch: losses and gradients bit for bit those
//! of stock Burn 0.22.1, on Flex and, with feature `vulkan`, on CubeCL.
//!
//! The references are what `stock/tests/reference.rs` writes on this machine without the patch, so
//! run that first.

#[path = "../../programs.rs"]
mod programs;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use burn::tensor::Tensor;
use burn_decorated::{
    AmpConfig, MemoryBudget, Policy, RematStats, checkpoint_with, is_on, update,
};
use programs::{Around, Cnn, Mlp, On, Plain, Program, Step, Transformer, checksums, train};

/// Random numbers are the process's.
static TURN: Mutex<()> = Mutex::new(());

struct Scope(Policy);

impl Around for Scope {
    fn run<const D: usize>(&self, block: impl FnOnce() -> Tensor<D>) -> Tensor<D> {
        checkpoint_with(self.0.clone(), block)
    }
}

/// Nothing around a block, for a budget that is a fraction of forward and backward.
struct Budgeted;

impl Around for Budgeted {
    fn run<const D: usize>(&self, block: impl FnOnce() -> Tensor<D>) -> Tensor<D> {
        block()
    }

    fn update<R>(&self, step: impl FnOnce() -> R) -> R {
        update(step)
    }
}

fn stock<P: Program>(on: On) -> Vec<u64> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let path = folder.expect("a folder above").join(on.reference());
    let text = std::fs::read_to_string(path).expect("the reference: run the tests of `stock`");
    let mut all: HashMap<String, Vec<u64>> = serde_json::from_str(&text).expect("JSON");
    all.remove(P::NAME).expect("a program of the reference")
}

fn every_way<P: Program>(on: On) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let stock = stock::<P>(on);
    assert!(stock.len() > 30, "three losses and all gradients");
    let plain = train::<P>(on, &Plain);
    assert_eq!(checksums(&plain), stock, "{} without a scope", P::NAME);
    AmpConfig::off().install().expect("no operations are named");
    for policy in [Policy::Recompute, Policy::KeepCompute, Policy::Offload] {
        let before = RematStats::of_thread().evicted_operations;
        let found = train::<P>(on, &Scope(policy.clone()));
        assert!(
            checksums(&found) == stock,
            "{} under {policy:?}: other bits, {:?} apart",
            P::NAME,
            apart(&found, &plain)
        );
        assert!(
            RematStats::of_thread().evicted_operations > before,
            "{policy:?}"
        );
    }
    for percent in [80, 50] {
        let before = RematStats::of_thread().evicted_operations;
        let budget = MemoryBudget::fraction(f64::from(percent) / 100.0);
        let _beside = burn_checkpoint::apart();
        let budget = budget.expect("a fraction").install();
        let found = train::<P>(on, &Budgeted);
        drop(budget);
        let apart = apart(&found, &plain);
        println!("{} on {on:?} with {percent} %: {apart:?} apart", P::NAME);
        if cfg!(feature = "fusion") && on != On::Flex {
            // Fusion groups kernels by the order of the operations: an eviction makes other groups,
            // which round differently. The tolerances are those of 0.21.
            let close = apart.0 < 1e-5 && apart.1 < 1e-3;
            assert!(close, "{} with {percent} % of its bytes", P::NAME);
        } else {
            let same = checksums(&found) == stock;
            assert!(same, "{} with {percent} % of its bytes", P::NAME);
        }
        assert!(
            RematStats::of_thread().evicted_operations > before,
            "{percent} %"
        );
    }
}

/// The largest differences of losses and of gradients, each relative to the largest of its step.
fn apart(found: &[Step], expected: &[Step]) -> (f32, f32) {
    let relative = |found: &[f32], expected: &[f32]| {
        assert_eq!(found.len(), expected.len());
        let largest = expected.iter().fold(0_f32, |max, x| max.max(x.abs()));
        let differences = found.iter().zip(expected).map(|(x, y)| (x - y).abs());
        let nan_is_far = differences.map(|x| if x.is_nan() { f32::INFINITY } else { x });
        nan_is_far.fold(0_f32, f32::max) / largest
    };
    let (mut of_losses, mut of_gradients) = (0_f32, 0_f32);
    for (found, expected) in found.iter().zip(expected) {
        of_losses = of_losses.max(relative(&found.loss, &expected.loss));
        let [found, expected] = [found, expected].map(|step| step.gradients.concat());
        of_gradients = of_gradients.max(relative(&found, &expected));
    }
    (of_losses, of_gradients)
}

#[test]
fn the_patch_is_on() {
    assert!(is_on());
}

/// A second thread that draws and trains at the same time has counters, scopes and budgets of its
/// own, and gradients come back on the thread that asks for them.
fn two_threads(on: On) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let step = move || {
        let x = Tensor::<2>::ones([64, 64], &on.device()).require_grad();
        let y = checkpoint_with(Policy::Recompute, || x.clone().exp().sin().cos());
        assert!(RematStats::of_thread().evicted_operations >= 2);
        let grads = y.sum().backward();
        assert!(RematStats::of_thread().replayed_operations >= 2);
        x.grad(&grads).expect("a gradient").into_data()
    };
    let other = std::thread::spawn(step);
    assert_eq!(step(), other.join().expect("the other thread trains"));
}

macro_rules! on {
    ($module:ident, $on:ident) => {
        mod $module {
            use super::*;

            #[test]
            fn mlp() {
                every_way::<Mlp>(On::$on);
            }

            #[test]
            fn cnn() {
                every_way::<Cnn>(On::$on);
            }

            #[test]
            fn transformer() {
                every_way::<Transformer>(On::$on);
            }

            #[test]
            fn two_threads() {
                super::two_threads(On::$on);
            }
        }
    };
}

on!(flex, Flex);
#[cfg(feature = "vulkan")]
on!(vulkan, Vulkan);
