//! What a scope moves to host memory: what moves, in which order it comes back, and what happens
//! when a transfer fails.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use burn::backend::Autodiff;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::quantization::{QuantScheme, QuantizationParameters};
use burn::tensor::{Bool, Distribution, Int, Tensor};
use burn_checkpoint::trace::{self, EventKind, Traced};
use burn_checkpoint::{
    MemoryBudget, Policy, ReadsInPlace, Remat, RematStats, SavePolicy, checkpoint, checkpoint_with,
};
use burn_flex::Flex;

use crate::apart::InstallApart;
use crate::input::{Bits, gradient_bits, input};
use crate::models::{Bare, Transformer, generator, step};
use crate::probe::{Probe, Reads, Writes, looks, take_counts, watched, with_transfers};
use crate::scopes::Scope;
use crate::verified::{Verified, recorded};

type Inner = Verified<Probe<Flex>>;
type B = Autodiff<Remat<Inner>>;

fn message(panic: Box<dyn std::any::Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(panic) => (*panic.downcast::<&str>().expect("a message")).to_owned(),
    }
}

/// Some scopes of a matmul, two `tanh` and a sum, which backward asks for two tensors each of.
fn chain<A: AutodiffBackend>(
    policy: &Policy,
    scopes: usize,
    backward: impl FnOnce(Tensor<A, 1>) -> A::Gradients,
) -> Bits {
    let _reads = ReadsInPlace::on();
    let x = input::<A>().require_grad();
    let mut y = x.clone();
    for _ in 0..scopes {
        let policy = policy.clone();
        y = checkpoint_with(policy, || (y.clone().matmul(y) * 0.1).tanh().tanh() + 0.5);
    }
    gradient_bits(&x, &backward(y.sum()))
}

fn plain(scopes: usize) -> Bits {
    chain::<Autodiff<Flex>>(&Policy::Offload, scopes, |loss| loss.backward())
}

/// A panic at the n-th run of an operation.
fn panics_at(op: &'static str, nth: usize) -> impl Fn(&'static str) {
    let left = Cell::new(nth);
    move |ran| {
        if ran == op {
            left.set(left.get().wrapping_sub(1));
            assert!(left.get() != 0, "out of memory in {op}");
        }
    }
}

/// Moves the operand of the first `tanh` to the host; the result of that `tanh` is replayed from
/// it.
fn one_moves() -> Policy {
    Policy::per_operation(|call| match call.op.name {
        "float_mul_scalar" => SavePolicy::Offload,
        _ => SavePolicy::Recompute,
    })
}

#[test]
fn a_panic_within_backward_arrives_and_the_next_step_is_right() {
    let plain = plain(3);
    for (policy, op, runs) in [
        (Policy::Offload, "float_from_data", 6),
        (Policy::Recompute, "float_tanh", 9),
        (Policy::Recompute, "float_matmul", 9),
        (one_moves(), "float_from_data", 3),
    ] {
        for nth in 1..=runs {
            let step = |nth| {
                chain::<B>(&policy, 3, |loss| {
                    watched(panics_at(op, nth), || loss.backward())
                })
            };
            let panic = catch_unwind(AssertUnwindSafe(|| step(nth))).expect_err("a panic");
            assert_eq!(
                message(panic),
                format!("out of memory in {op}"),
                "{policy:?}"
            );
            assert_eq!(RematStats::of_thread().live_bytes, 0, "{policy:?} {nth}");
            assert!(step(usize::MAX) == plain, "{policy:?} {nth}");
        }
    }
}

/// The tensor itself comes back once the backend can.
#[test]
fn a_tensor_whose_upload_panicked_is_there_at_the_next_use() {
    let x = input::<B>();
    let mut kept = None;
    let _ = checkpoint_with(Policy::Offload, || {
        kept = Some(x.clone().matmul(x.clone()));
        x.clone()
    });
    let kept = kept.expect("made in the scope");
    for _ in 0..2 {
        let read = || watched(panics_at("float_from_data", 1), || kept.clone().into_data());
        let panic = catch_unwind(AssertUnwindSafe(read)).expect_err("a panic");
        assert_eq!(message(panic), "out of memory in float_from_data");
    }
    take_counts();
    assert_eq!(kept.into_data(), x.clone().matmul(x).into_data());
    assert_eq!(take_counts()["float_from_data"], 1);
}

/// A copy that could not be read is named at each use, and harms nothing else.
#[test]
fn what_cannot_be_read_is_named() {
    RematStats::reset_thread();
    let x = input::<B>();
    for (reads, reason) in [
        (Reads::LaterNever, "the device is gone"),
        (Reads::LaterPanic, "the backend panicked"),
    ] {
        let mut kept = None;
        with_transfers(reads, Writes::Right, || {
            checkpoint_with(Policy::Offload, || {
                kept = Some(x.clone().matmul(x.clone()));
            });
        });
        let kept = kept.expect("made in the scope");
        for _ in 0..2 {
            let panic = catch_unwind(AssertUnwindSafe(|| kept.clone().into_data()));
            let message = message(panic.expect_err("a panic"));
            assert!(
                message.contains("float_matmul") && message.contains(reason),
                "{message}"
            );
        }
        assert!(chain::<B>(&Policy::Offload, 2, |loss| loss.backward()) == plain(2));
        drop(kept);
        assert_eq!(RematStats::of_thread().live_bytes, 0);
    }
}

/// A copy that is lost is an error within backward too, and the next step is right.
#[test]
fn a_copy_is_late_or_lost_in_backward() {
    let step = |reads| {
        let run = || chain::<B>(&Policy::Offload, 3, |loss| loss.backward());
        catch_unwind(AssertUnwindSafe(|| {
            with_transfers(reads, Writes::Right, run)
        }))
    };
    for reads in [Reads::LaterNever, Reads::LaterPanic, Reads::Later] {
        RematStats::reset_thread();
        match step(reads) {
            Ok(found) => assert!(reads == Reads::Later && found == plain(3)),
            Err(panic) => {
                let message = message(panic);
                assert!(
                    message.contains("could not be read"),
                    "{reads:?}: {message}"
                );
            }
        }
        assert_eq!(RematStats::of_thread().live_bytes, 0, "{reads:?}");
    }
    assert_eq!(RematStats::of_thread().replayed_operations, 0);
}

/// What a tensor was computed from is not kept for one that moves to the host.
#[test]
fn what_moves_to_the_host_needs_no_inputs() {
    let _generator = generator();
    RematStats::reset_thread();
    let mut kept = None;
    let mut expected = None;
    checkpoint_with(Policy::Offload, || {
        let x = Tensor::<B, 1>::random([64], Distribution::Default, &Default::default());
        expected = Some(x.clone().exp().into_data());
        kept = Some(x.exp());
    });
    assert_eq!(RematStats::of_thread().live_bytes, 0);
    assert_eq!(kept.map(Tensor::into_data), expected);
}

/// Each tensor gets its own elements back, although one transaction reads several kinds.
#[test]
fn tensors_of_all_kinds_move_together() {
    type R = Remat<Probe<Flex>>;
    let device = Default::default();
    let all = || {
        let ints = Tensor::<R, 1, Int>::arange(0..64, &device) * 3;
        let floats = ints.clone().float().reshape([2, 32]).cos();
        let quants = floats.clone().quantize_dynamic(&QuantScheme::default());
        (quants, ints.clone().equal_elem(9), floats, ints)
    };
    let read = |(quants, bools, floats, ints): (
        _,
        Tensor<R, 1, Bool>,
        Tensor<R, 2>,
        Tensor<R, 1, Int>,
    )| {
        let quants: Tensor<R, 2> = quants;
        [
            quants.into_data(),
            bools.into_data(),
            floats.into_data(),
            ints.into_data(),
        ]
    };
    let plain = read(all());
    RematStats::reset_thread();
    let mut kept = None;
    checkpoint_with(Policy::Offload, || kept = Some(all()));
    assert!(RematStats::of_thread().offloaded_bytes > 0);
    assert_eq!(read(kept.expect("made in the scope")), plain);
}

/// CubeCL refuses a transaction of nothing.
#[test]
fn quantized_tensors_alone_begin_no_transaction() {
    type R = Remat<Probe<Flex>>;
    let both = || {
        [1, 2].map(|factor| {
            let x = Tensor::<R, 1, Int>::arange(0..64, &Default::default()) * factor;
            let scales = Tensor::ones([1], &Default::default());
            x.float()
                .quantize(&QuantScheme::default(), QuantizationParameters { scales })
        })
    };
    let plain = both().map(Tensor::into_data);
    let mut kept = None;
    RematStats::reset_thread();
    take_counts();
    checkpoint_with(Policy::Offload, || kept = Some(both()));
    assert_eq!(take_counts().get("tr_execute"), None);
    assert!(RematStats::of_thread().offloaded_bytes > 0);
    let kept = kept.expect("made in the scope");
    assert_eq!(kept.map(Tensor::into_data), plain);
}

/// What ran in a backward pass, in order.
fn ran_in_backward(scopes: usize) -> Vec<&'static str> {
    let ran = Rc::new(RefCell::new(Vec::new()));
    let log = ran.clone();
    let found = chain::<B>(&Policy::Offload, scopes, |loss| {
        watched(move |op| log.borrow_mut().push(op), || loss.backward())
    });
    assert!(found == plain(scopes));
    ran.take()
}

/// When backward works on the n-th tensor from the end, it and two more are on the device, never
/// more; across scopes.
#[test]
fn two_tensors_are_uploaded_ahead_of_use() {
    const SCOPES: usize = 4;
    let ran = ran_in_backward(SCOPES);
    let at = |name: &str| -> Vec<usize> {
        let all = ran.iter().enumerate();
        all.filter(|(_, op)| **op == name)
            .map(|(at, _)| at)
            .collect()
    };
    // A `tanh` saves its operand, and its gradient begins with `tanh` of that.
    let (uploads, uses) = (at("float_from_data"), at("float_tanh"));
    assert_eq!(
        (uploads.len(), uses.len()),
        (2 * SCOPES, 2 * SCOPES),
        "{ran:?}"
    );
    for (used, at) in uses.iter().enumerate() {
        let uploaded = uploads.iter().filter(|upload| *upload < at).count();
        assert_eq!(
            uploaded,
            (used + 3).min(2 * SCOPES),
            "use {used} of {ran:?}"
        );
    }
}

/// The trace shows them in the order of backward.
#[test]
fn uploads_go_from_the_last_to_the_first() {
    let recording = trace::record();
    chain::<B>(&Policy::Offload, 4, |loss| loss.backward());
    let events = recording.finish();
    let nodes = |uploads: bool| -> Vec<u64> {
        let of = |kind: &EventKind| match kind {
            EventKind::Offload(Traced { node, .. }) if !uploads => Some(*node),
            EventKind::Upload(Traced { node, .. }) if uploads => Some(*node),
            _ => None,
        };
        events.iter().filter_map(|event| of(&event.kind)).collect()
    };
    let (mut offloaded, uploaded) = (nodes(false), nodes(true));
    offloaded.reverse();
    assert!(offloaded.len() >= 8, "{offloaded:?}");
    assert_eq!(uploaded, offloaded);
}

/// Nobody waits for the device but a thread of its own, for one transaction a scope.
#[test]
fn the_thread_that_trains_looks_for_no_copy() {
    let plain = plain(3);
    let x = input::<B>().require_grad();
    let mut y = x.clone();
    let before = looks();
    take_counts();
    with_transfers(Reads::Blocks, Writes::Right, || {
        for _ in 0..3 {
            let scope = || (y.clone().matmul(y.clone()) * 0.1).tanh().tanh() + 0.5;
            y = checkpoint_with(Policy::Offload, scope);
        }
    });
    assert_eq!(take_counts()["tr_execute"], 3);
    let grads = y.sum().backward();
    assert_eq!(looks(), before);
    assert!(gradient_bits(&x, &grads) == plain);
}

/// The bits of a gradient through scopes that are long: what they move does not fit besides what
/// they make.
fn long_scopes<A: AutodiffBackend>() -> Bits {
    let x = input::<A>().require_grad();
    let mut y = x.clone();
    for _ in 0..3 {
        y = checkpoint_with(Policy::Offload, || {
            (0..12).fold(y.clone().matmul(y) * 0.1, |y, _| y.tanh() * 1.1)
        });
    }
    gradient_bits(&x, &y.sum().backward())
}

/// A budget holds where scopes move things to the host, nothing is read to the host twice, and
/// every run is the same.
#[test]
fn offloading_within_a_budget() {
    let plain = long_scopes::<Autodiff<Flex>>();
    let limited = |bytes: u64| {
        RematStats::reset_thread();
        take_counts();
        let budget = MemoryBudget::bytes(bytes).install_apart();
        let recording = trace::record();
        assert!(long_scopes::<B>() == plain, "{bytes}");
        let kinds = recording
            .finish()
            .into_iter()
            .map(|event| match event.kind {
                EventKind::Replay(Traced { op, node }, _) => ("replay", op, node),
                EventKind::Offload(Traced { op, node }) => ("offload", op, node),
                EventKind::Upload(Traced { op, node }) => ("upload", op, node),
                EventKind::Evict(Traced { op, node }) => ("evict", op, node),
                EventKind::Alloc(Traced { op, node }, _) => ("alloc", op, node),
                EventKind::Free(Traced { op, node }) => ("free", op, node),
                _ => ("scope", "", 0),
            });
        // Numbers of operations go on from run to run.
        let kinds: Vec<_> = kinds.collect();
        let first = kinds
            .iter()
            .map(|kind| kind.2)
            .filter(|node| *node > 0)
            .min()
            .expect("events");
        let kinds: Vec<_> = kinds
            .into_iter()
            .map(|(kind, op, node)| (kind, op, node.saturating_sub(first)))
            .collect();
        let peak = budget.peak_bytes();
        drop(budget);
        assert_eq!(RematStats::of_thread().live_bytes, 0, "{bytes}");
        (peak, kinds, take_counts()["float_into_data"])
    };
    let (unlimited, _, _) = limited(u64::MAX / 2);
    let (floor, _, _) = limited(0);
    assert!(floor < unlimited / 2, "{floor} {unlimited}");
    let mut again = 0;
    for percent in [40, 50, 60, 80] {
        let limit = unlimited * percent / 100;
        let (peak, kinds, reads) = limited(limit);
        assert!(
            peak <= limit.max(floor),
            "{percent} %: {peak} of {limit}, floor {floor}"
        );
        assert!(
            limited(limit).1 == kinds,
            "{percent} %: another run goes another way"
        );
        let of = |name: &str| -> Vec<u64> {
            let all = kinds.iter().filter(|(kind, _, _)| *kind == name);
            all.map(|(_, _, node)| *node).collect()
        };
        // One read is the test's.
        let mut moved = of("offload");
        assert_eq!(moved.len() + 1, reads, "{percent} %");
        moved.sort_unstable();
        moved.dedup();
        assert_eq!(moved.len() + 1, reads, "{percent} %: each is moved once");
        again += of("upload").len().saturating_sub(moved.len());
        println!(
            "{percent} %: {peak} of {limit} ({floor} to {unlimited}), {reads} reads, {} uploads",
            of("upload").len()
        );
    }
    println!("{again} uploads of what had been there before");
}

/// What comes back from the host lies in the order of its shape. On Flex the gradients are the same
/// bit for bit.
#[test]
fn what_may_lie_in_another_order_has_the_same_gradients() {
    type P = Autodiff<Flex>;
    type R = Autodiff<Remat<Flex>>;
    fn both(
        forward: impl Fn(Tensor<P, 2>) -> Tensor<P, 2>,
        managed: impl Fn(Tensor<R, 2>) -> Tensor<R, 2>,
    ) {
        let (x, y) = (input::<P>().require_grad(), input::<R>().require_grad());
        let plain = x
            .grad(&forward(x.clone()).sum().backward())
            .expect("a gradient");
        let found = checkpoint_with(Policy::Offload, || managed(y.clone()));
        let found = y.grad(&found.sum().backward()).expect("a gradient");
        assert_eq!(found.into_data(), plain.into_data());
    }
    macro_rules! laws {
        ($($forward:expr),* $(,)?) => { $(both($forward, $forward);)* };
    }
    laws! {
        |x| x.clone().transpose().tanh().matmul(x).tanh(),
        |x| softmax(x.clone().matmul(x.clone()), 0).matmul(x).tanh(),
        |x| log_softmax(x.clone().matmul(x.clone()), 0).matmul(x).tanh(),
        |x| (x.clone().matmul(x.clone()).transpose() + 1.0).matmul(x).tanh(),
        |x| x.clone().matmul(x.clone()).flip([0]).exp().matmul(x).tanh(),
        |x| (x.clone().matmul(x.clone()).slice([0..1, 0..8]).expand([8, 8]) * x.clone()).matmul(x).tanh(),
    }
}

/// Views of what a matmul made (heads), what biases and scales were added to, norms, softmaxes: all
/// of it moves.
#[test]
fn what_a_transformer_saves_moves() {
    let _generator = generator();
    let device = Default::default();
    let attention: MultiHeadAttention<B> = MultiHeadAttentionConfig::new(8, 2)
        .with_dropout(0.0)
        .init(&device);
    let x = Tensor::<B, 3>::from_data(
        input::<Autodiff<Flex>>().reshape([2, 4, 8]).into_data(),
        &device,
    )
    .require_grad();
    let forward = || attention.forward(MhaInput::self_attn(x.clone())).context;
    let gradient = |y: Tensor<B, 3>| x.grad(&y.sum().backward()).expect("a gradient").into_data();
    let plain = gradient(forward());
    let recording = trace::record();
    let found = gradient(checkpoint_with(Policy::Offload, forward));
    let replayed: Vec<_> = recording
        .finish()
        .into_iter()
        .filter_map(|event| match event.kind {
            EventKind::Replay(Traced { op, .. }, _) => Some(op),
            _ => None,
        })
        .collect();
    assert_eq!(found, plain);
    let of = |name: &str| replayed.iter().filter(|op| **op == name).count();
    let counts = ["float_matmul", "linear", "softmax", "float_add"].map(of);
    assert_eq!(counts, [0, 0, 0, 0], "{replayed:?}");

    let plain = step::<Autodiff<Flex>, Transformer<_>>(&Bare);
    let counts = |policy| {
        take_counts();
        assert!(plain == step::<B, Transformer<_>>(&Scope(policy)));
        take_counts()
    };
    let kept = counts(Policy::Keep);
    let offloaded = counts(Policy::Offload);
    for op in ["float_matmul", "linear", "layer_norm", "softmax", "gelu"] {
        assert_eq!(kept.get(op), offloaded.get(op), "{op}");
    }
}

#[test]
fn a_copy_that_comes_back_with_other_values_is_found() {
    let step = |writes| {
        chain::<B>(&Policy::Offload, 2, |loss| {
            with_transfers(Reads::AtOnce, writes, || loss.backward())
        })
    };
    let (plain, run) =
        recorded(|| chain::<Autodiff<Inner>>(&Policy::Offload, 2, |loss| loss.backward()));
    let (_, found) = recorded(|| step(Writes::Wrong));
    let message = run.compare(&found).expect_err("a difference");
    assert!(
        message.contains("`float_tanh` ran on")
            && message.contains("of `float_from_data`, which is new"),
        "{message}"
    );
    assert_eq!(RematStats::of_thread().live_bytes, 0);
    assert!(run.verify(|| step(Writes::Right)) == plain);
}

/// A scope within one that offloads: what came back for the inner one is where it was.
#[test]
fn nested_in_a_scope_that_offloads() {
    let nested = |policy: Policy| {
        let x = input::<B>().require_grad();
        let y = checkpoint_with(Policy::Offload, || {
            let y = x.clone().matmul(x.clone()).tanh();
            let y = checkpoint_with(policy.clone(), || y.clone().matmul(y).tanh());
            checkpoint(|| y.clone().matmul(y.tanh()))
        });
        let grads = y.sum().backward();
        x.grad(&grads).expect("a gradient").into_data()
    };
    let bare = {
        let x = input::<B>().require_grad();
        let y = x.clone().matmul(x.clone()).tanh();
        let y = y.clone().matmul(y).tanh();
        let y = y.clone().matmul(y.tanh());
        x.grad(&y.sum().backward()).expect("a gradient").into_data()
    };
    for policy in [Policy::Offload, Policy::Recompute, Policy::KeepCompute] {
        assert_eq!(nested(policy.clone()), bare, "{policy:?}");
        let _budget = MemoryBudget::bytes(1500).install_apart();
        assert_eq!(nested(policy.clone()), bare, "{policy:?} within a budget");
    }
}
