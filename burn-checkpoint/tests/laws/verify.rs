//! A replay that gives other values is found, named, and harms nothing else.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use burn::backend::Autodiff;
use burn::tensor::{Tensor, TensorData};
use burn_checkpoint::trace::{self, EventKind, Traced};
use burn_checkpoint::{MemoryBudget, Remat, RematStats, Verify, checkpoint, evict};
use burn_flex::Flex;

use crate::apart::InstallApart;
use crate::delivered::on_use;

type B = Autodiff<Remat<Flex>>;

/// A tensor that is delivered as another one once it is told to: what is computed from it differs
/// when it is replayed.
struct Unsteady {
    drifts: Arc<AtomicBool>,
    tensor: Tensor<Remat<Flex>, 1>,
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
    fn doubled(&self) -> Tensor<Remat<Flex>, 1> {
        self.tensor.clone() * Tensor::full([3], 2.0, &Default::default())
    }
}

fn message(run: impl FnOnce() -> TensorData) -> String {
    let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("a difference");
    *panic.downcast::<String>().expect("a message")
}

#[test]
fn a_difference_is_found_again_until_it_is_gone() {
    RematStats::reset_thread();
    let source = Unsteady::new();
    let verify = Verify::on();
    let mut kept = None;
    checkpoint(|| kept = Some(source.doubled().exp()));
    let kept = kept.expect("made in the scope");
    source.drift(true);
    let live = RematStats::of_thread().live_bytes;
    for _ in 0..3 {
        let message = message(|| kept.clone().into_data());
        assert!(
            message.contains("float_mul") && message.contains("[3]"),
            "{message}"
        );
        // Nothing stays locked, half there, or counted.
        assert_eq!(RematStats::of_thread().live_bytes, live);
    }
    // The rest of the thread goes on.
    let device = Default::default();
    let x = Tensor::<B, 1>::from_floats([1.0, 2.0], &device).require_grad();
    let grads = checkpoint(|| x.clone().exp().log()).sum().backward();
    let found = x.grad(&grads).expect("a gradient").into_data();
    found.assert_approx_eq::<f32>(&TensorData::from([1.0, 1.0]), Default::default());

    source.drift(false);
    let expected = Tensor::<Flex, 1>::from_floats([1.0, 2.0, 3.0], &device)
        .mul_scalar(2.0)
        .exp();
    assert_eq!(kept.clone().into_data(), expected.into_data());
    drop((kept, source, verify));
    assert_eq!(RematStats::of_thread().live_bytes, 0);
}

#[test]
fn nothing_is_compared_once_verify_is_off() {
    let source = Unsteady::new();
    let mut kept = None;
    {
        let _verify = Verify::on();
        checkpoint(|| kept = Some(source.doubled()));
    }
    source.drift(true);
    let found = kept.expect("made in the scope").into_data();
    assert_eq!(found, TensorData::from([4.0f32, 4.0, 6.0]));
}

/// What backward would never ask for is replayed and compared too, when its scope ends.
#[test]
fn what_never_comes_back_is_compared() {
    let verify = Verify::on();
    let source = Unsteady::new();
    let mut kept = None;
    let found = message(|| {
        checkpoint(|| {
            let y = source.doubled();
            kept = Some(y.clone());
            source.drift(true);
            y.cos()
        })
        .into_data()
    });
    assert!(found.contains("float_mul"), "{found}");
    drop((kept, source, verify));
    assert_eq!(RematStats::of_thread().live_bytes, 0);
}

/// The same where a budget or the user evicts, each tensor once it goes.
#[test]
fn evictions_without_a_scope_are_compared() {
    let _verify = Verify::on();
    for evicts in [
        (|kept: &Tensor<Remat<Flex>, 1>| evict(kept)) as fn(&Tensor<Remat<Flex>, 1>),
        |kept| drop(Tensor::zeros_like(kept).repeat_dim(0, 512) + 1.0),
    ] {
        let source = Unsteady::new();
        let budget = MemoryBudget::bytes(1024).install_apart();
        let kept = source.doubled();
        source.drift(true);
        let found = message(|| {
            evicts(&kept);
            TensorData::from([0.0])
        });
        assert!(found.contains("float_mul"), "{found}");
        drop((kept, source, budget));
        assert_eq!(RematStats::of_thread().live_bytes, 0);
    }
}

/// Comparing shows in no counter and no trace, and moves no limit.
#[test]
fn comparing_is_not_counted() {
    let counted = |verify: bool| {
        let _verify = verify.then(Verify::on);
        RematStats::reset_thread();
        let device = Default::default();
        let x = Tensor::<B, 1>::from_floats([1.0, 2.0], &device).require_grad();
        let recording = trace::record();
        let y = checkpoint(|| x.clone().exp().sin().reshape([2, 1]).cos().exp());
        let before = RematStats::of_thread();
        y.sum().backward();
        let events = recording
            .finish()
            .into_iter()
            .map(|event| match event.kind {
                EventKind::Replay(Traced { op, .. }, _) => op.to_owned(),
                EventKind::Evict(Traced { op, .. }) => format!("evict {op}"),
                EventKind::Alloc(Traced { op, .. }, _) => format!("alloc {op}"),
                EventKind::Free(Traced { op, .. }) => format!("free {op}"),
                _ => String::new(),
            });
        let mut stats = [before, RematStats::of_thread()];
        stats
            .iter_mut()
            .for_each(|stats| stats.replay_time = Duration::ZERO);
        (events.collect::<Vec<_>>(), stats)
    };
    assert_eq!(counted(true), counted(false));
}

/// A budget evicts the same tensors whether they are compared or not.
#[test]
fn comparing_moves_no_eviction() {
    let counted = |verify: bool, tensors: u64| {
        let _verify = verify.then(Verify::on);
        let _budget = MemoryBudget::bytes(tensors * 256).install_apart();
        RematStats::reset_thread();
        let device = Default::default();
        let x = Tensor::<B, 1>::ones([64], &device).require_grad();
        let y = (0..80).fold(x, |x, _| (x * 0.5).exp());
        drop(y.sum().backward());
        let stats = RematStats::of_thread();
        (stats.evicted_operations, stats.replayed_operations)
    };
    for tensors in [6, 8, 12] {
        assert_eq!(counted(true, tensors), counted(false, tensors));
    }
}
