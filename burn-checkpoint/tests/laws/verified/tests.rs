//! An operation that runs again on other operands, or gives something else, is found and named.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_checkpoint::{MemoryBudget, Remat, RematStats, checkpoint, evict};
use burn_flex::Flex;

use crate::apart::InstallApart;
use crate::delivered::on_use;
use crate::input::input;
use crate::probe::{Probe, Reads, Writes, with_transfers};
use crate::verified::{Verified, recorded};

type Inner = Verified<Probe<Flex>>;
type B = Remat<Inner>;

/// A tensor that is delivered as another one once it is told to: what is computed from it differs
/// when it is replayed.
struct Unsteady {
    drifts: Arc<AtomicBool>,
    tensor: Tensor<B, 1>,
}

impl Unsteady {
    fn new() -> Self {
        let drifts = Arc::new(AtomicBool::new(false));
        let tensor = {
            let drifts = drifts.clone();
            on_use([3], move || {
                let drift = f32::from(u8::from(drifts.load(Ordering::SeqCst)));
                TensorData::from([1.0 + drift, 2.0, 3.0])
            })
        };
        Self { drifts, tensor }
    }

    fn drift(&self, drifts: bool) {
        self.drifts.store(drifts, Ordering::SeqCst);
    }

    /// A tensor that is recorded: one computed from delivered tensors alone is delivered too.
    fn doubled(&self) -> Tensor<B, 1> {
        self.tensor.clone() * Tensor::full([3], 2.0, &Default::default())
    }
}

/// Makes a tensor that is evicted once it is made.
type Evicted = fn(&Unsteady) -> Tensor<B, 1>;

#[test]
fn a_replay_on_other_operands_is_found() {
    let ways: [(&str, Evicted); 3] = [
        ("a scope", |source| {
            let mut kept = None;
            checkpoint(|| kept = Some(source.doubled()));
            kept.expect("made in the scope")
        }),
        ("the user", |source| {
            let _budget = MemoryBudget::bytes(1024).install_apart();
            let kept = source.doubled();
            evict(&kept);
            kept
        }),
        ("a budget", |source| {
            let _budget = MemoryBudget::bytes(1024).install_apart();
            let kept = source.doubled();
            drop(Tensor::zeros_like(&kept).repeat_dim(0, 512) + 1.0);
            kept
        }),
    ];
    let (plain, run) = recorded(|| {
        let x = Tensor::<Inner, 1>::from_floats([1.0, 2.0, 3.0], &Default::default());
        (x * Tensor::full([3], 2.0, &Default::default()) + 1.0).into_data()
    });
    for (name, evicted) in ways {
        for drifts in [false, true] {
            RematStats::reset_thread();
            let source = Unsteady::new();
            let kept = evicted(&source);
            assert!(RematStats::of_thread().evicted_operations > 0, "{name}");
            source.drift(drifts);
            let (found, replay) = recorded(|| (kept + 1.0).into_data());
            let compared = run.compare(&replay);
            if drifts {
                let message = compared.expect_err("a difference");
                assert!(
                    message.contains("`float_mul` ran on")
                        && message.contains("of `float_from_data`, which is new"),
                    "{name}: {message}"
                );
            } else {
                assert_eq!((compared, found), (Ok(()), plain.clone()), "{name}");
            }
            drop(source);
            assert_eq!(RematStats::of_thread().live_bytes, 0, "{name}");
        }
    }
}

#[test]
fn an_operation_that_gives_something_else_is_found() {
    let data = input::<Flex>().into_data();
    let upload = || Tensor::<Inner, 2>::from_data(data.clone(), &Default::default()).exp();
    let (_, run) = recorded(upload);
    assert_eq!(run.operations(), 2);
    let (_, again) = recorded(upload);
    assert_eq!(run.compare(&again), Ok(()));
    let (_, wrong) = recorded(|| with_transfers(Reads::AtOnce, Writes::Wrong, upload));
    let message = run.compare(&wrong).expect_err("a difference");
    assert!(
        message.contains("`float_from_data` gave other values"),
        "{message}"
    );
    fn name<B: Backend>() -> String {
        B::name(&Default::default())
    }
    assert_eq!(name::<Inner>(), "verified<probe<flex>>");
}
