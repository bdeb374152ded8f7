//! Scopes and policies.

use std::collections::BTreeSet;

use burn::backend::Autodiff;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, DType, Int, Tensor};
use burn_autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn_checkpoint::trace::{EventKind, Traced, record};
use burn_checkpoint::{
    MemoryBudget, Policy, Remat, RematStats, SavePolicy, Work, checkpoint, checkpoint_with,
    op_table,
};
use burn_flex::Flex;

use crate::apart::InstallApart;
use crate::models::{Around, Bare, Cnn, Mlp, Model, Transformer, generator, step};
use crate::verified::{Verified, recorded};

type Inner = Verified<Flex>;
type Plain = Autodiff<Inner>;
type Checkpointed = Autodiff<Remat<Inner>>;

/// Each block a scope.
pub struct Scope(pub Policy);

impl Around for Scope {
    fn block<B: Backend, const D: usize>(
        &self,
        region: impl FnOnce() -> Tensor<B, D>,
    ) -> Tensor<B, D> {
        checkpoint_with(self.0.clone(), region)
    }
}

/// Each block a scope in a scope in a scope.
struct Nested;

impl Around for Nested {
    fn block<B: Backend, const D: usize>(
        &self,
        region: impl FnOnce() -> Tensor<B, D>,
    ) -> Tensor<B, D> {
        checkpoint(|| {
            let x = checkpoint_with(Policy::KeepCompute, || checkpoint(region) * 1.5);
            checkpoint(|| (x / 1.5).exp()).log()
        })
    }
}

pub fn policies() -> [Policy; 4] {
    [
        Policy::Recompute,
        Policy::KeepCompute,
        Policy::Offload,
        Policy::per_operation(|op| match op.work {
            Work::Math => SavePolicy::Offload,
            Work::Norm | Work::Reduce => SavePolicy::Keep,
            _ => SavePolicy::Recompute,
        }),
    ]
}

fn every_policy<P, R, M, N>()
where
    P: AutodiffBackend,
    R: AutodiffBackend,
    M: Model<P>,
    N: Model<R>,
{
    let _generator = generator();
    let (plain, run) = recorded(|| step::<P, M>(&Bare));
    let found = run.verify(|| step::<R, N>(&Bare));
    assert_eq!(plain, found, "no scope");
    for policy in policies() {
        RematStats::reset_thread();
        let found = run.verify(|| step::<R, N>(&Scope(policy.clone())));
        assert!(plain == found, "{policy:?}");
        let stats = RematStats::of_thread();
        assert!(
            stats.replayed_operations + stats.uploaded_bytes > 0,
            "{policy:?}: {stats:?}"
        );
        assert_eq!(stats.live_bytes, 0, "{policy:?}");
    }
}

#[test]
fn mlp_with_dropout() {
    every_policy::<Plain, Checkpointed, Mlp<_>, Mlp<_>>();
}

#[test]
fn cnn_with_batch_norm() {
    every_policy::<Plain, Checkpointed, Cnn<_>, Cnn<_>>();
}

#[test]
fn transformer_with_masks_and_tied_weights() {
    every_policy::<Plain, Checkpointed, Transformer<_>, Transformer<_>>();
}

#[test]
fn balanced_checkpointing() {
    type P = Autodiff<Inner, BalancedCheckpointing>;
    type R = Autodiff<Remat<Inner>, BalancedCheckpointing>;
    every_policy::<P, R, Mlp<_>, Mlp<_>>();
    every_policy::<P, R, Transformer<_>, Transformer<_>>();
}

#[test]
fn autocast() {
    use burn_amp::Autocast;
    type P = Autocast<Autodiff<Inner>>;
    type R = Autocast<Autodiff<Remat<Inner>>>;
    every_policy::<P, R, Mlp<_>, Mlp<_>>();
    every_policy::<P, R, Transformer<_>, Transformer<_>>();
}

#[test]
fn nested_scopes() {
    fn both<M: Model<Plain>, N: Model<Checkpointed>>() {
        let _generator = generator();
        let (plain, run) = recorded(|| step::<Plain, M>(&Nested));
        RematStats::reset_thread();
        assert!(plain == run.verify(|| step::<Checkpointed, N>(&Nested)));
        let stats = RematStats::of_thread();
        assert!(stats.replayed_operations > 0, "{stats:?}");
        assert_eq!(stats.live_bytes, 0);
    }
    both::<Mlp<_>, Mlp<_>>();
    both::<Cnn<_>, Cnn<_>>();
    both::<Transformer<_>, Transformer<_>>();
}

/// The work classes of operations that were run again, and of those that went to the host.
fn come_back<M: Model<Checkpointed>>(policy: Policy) -> (BTreeSet<String>, BTreeSet<String>) {
    let recording = record();
    step::<Checkpointed, M>(&Scope(policy));
    let (mut replayed, mut offloaded) = (BTreeSet::new(), BTreeSet::new());
    let class = |name| {
        let op = op_table().find(|op| op.name == name).expect("a row");
        format!("{:?}", op.work)
    };
    for event in recording.finish() {
        match event.kind {
            EventKind::Replay(Traced { op, .. }, _) => replayed.insert(class(op)),
            EventKind::Offload(Traced { op, .. }) => offloaded.insert(class(op)),
            _ => continue,
        };
    }
    (replayed, offloaded)
}

/// A policy that keeps something really does, and no other.
#[test]
fn what_a_policy_keeps_is_not_computed_again() {
    fn on<M: Model<Checkpointed>>(saves_products: bool) {
        let _generator = generator();
        let set = |classes: &[&str]| classes.iter().map(|class| class.to_string()).collect();
        let (all, none) = come_back::<M>(Policy::Recompute);
        assert!(all.contains("Compute") && all.len() > 3, "{all:?}");
        assert_eq!(none, set(&[]));

        let mut expected = all.clone();
        expected.remove("Compute");
        assert_eq!(come_back::<M>(Policy::KeepCompute), (expected, set(&[])));

        for keep in &all {
            let kept = keep.clone();
            let policy = Policy::per_operation(move |op| match format!("{:?}", op.work) {
                class if class == kept => SavePolicy::Keep,
                _ => SavePolicy::Recompute,
            });
            let (replayed, offloaded) = come_back::<M>(policy);
            assert!(!replayed.contains(keep), "{keep}: {replayed:?}");
            assert!(!replayed.is_empty() && offloaded.is_empty(), "{keep}");
        }

        if !saves_products {
            return;
        }
        let policy = Policy::per_operation(|op| match op.work {
            Work::Compute => SavePolicy::Offload,
            _ => SavePolicy::Keep,
        });
        let (replayed, offloaded) = come_back::<M>(policy);
        assert!(!replayed.contains("Compute"), "{replayed:?}");
        assert_eq!(offloaded, set(&["Compute"]));
    }
    on::<Mlp<_>>(true);
    on::<Transformer<_>>(true);
    // Autodiff saves none of this model's products.
    on::<Cnn<_>>(false);
}

/// A policy sees which call made a tensor, and what it is.
#[test]
fn every_second_call_is_kept() {
    let _generator = generator();
    let replays = |keep: fn(u32) -> bool| {
        let policy = Policy::per_operation(move |call| {
            let sees = (call.name, call.shape.as_slice(), call.dtype, call.bytes);
            assert_eq!(sees, ("float_exp", &[2, 4][..], DType::F32, 32));
            match keep(call.number) {
                true => SavePolicy::Keep,
                false => SavePolicy::Recompute,
            }
        });
        let x = Tensor::<Checkpointed, 2>::full([2, 4], -9.0, &Default::default()).require_grad();
        // The last of the five is the result of the scope, and another one goes where it is made.
        let out = checkpoint_with(policy, || {
            drop(x.clone().exp());
            (0..5).fold(x.clone(), |x, _| x.exp())
        });
        RematStats::reset_thread();
        let gradients = out.sum().backward();
        let replays = RematStats::of_thread().replayed_operations;
        (replays, x.grad(&gradients).unwrap().into_data())
    };
    let (all, plain) = replays(|_| true);
    assert_eq!(all, 0);
    for (keep, expected) in [
        ((|_| false) as fn(u32) -> bool, 4),
        (|number| number == 4, 3),
        (|number| number % 2 == 1, 2),
    ] {
        assert_eq!(replays(keep), (expected, plain.clone()));
    }
}

/// A policy's function may look around, and even compute.
#[test]
fn a_policy_may_use_what_it_decides_about() {
    let _generator = generator();
    let plain = step::<Plain, Mlp<_>>(&Bare);
    let policy = Policy::per_operation(|op| {
        let stats = RematStats::of_thread();
        let x = Tensor::<Remat<Flex>, 1>::from_floats([1.0, 2.0], &Default::default());
        let three: f32 = checkpoint(|| x.sum()).into_scalar();
        match op.name.len() as u64 + stats.evicted_operations + three as u64 {
            _ if op.work == Work::Compute => SavePolicy::Keep,
            _ => SavePolicy::Recompute,
        }
    });
    RematStats::reset_thread();
    assert!(plain == step::<Checkpointed, Mlp<_>>(&Scope(policy)));
    assert!(RematStats::of_thread().replayed_operations > 0);
}

/// An operation is replayed in the precision it ran in, whatever holds when it is.
#[test]
fn autocast_is_another_in_backward() {
    use burn_amp::{Autocast, F16, Off, autocast};

    fn run<B: AutodiffBackend, M: Model<B>>(around: &impl Around) -> Vec<Vec<u8>> {
        let model = crate::models::model::<B, M>();
        B::seed(&Default::default(), 8);
        let loss = autocast::<F16, _>(|| model.loss(around, &Default::default()));
        autocast::<Off, _>(|| crate::models::bits_of(&model, loss))
    }
    type P = Autocast<Autodiff<Inner>>;
    type R = Autocast<Autodiff<Remat<Inner>>>;
    let _generator = generator();
    let plain = run::<P, Transformer<_>>(&Bare);
    assert!(plain != step::<P, Transformer<_>>(&Bare), "bf16");
    for policy in policies() {
        RematStats::reset_thread();
        assert!(
            plain == run::<R, Transformer<_>>(&Scope(policy.clone())),
            "{policy:?}"
        );
        let stats = RematStats::of_thread();
        assert!(stats.replayed_operations > 0, "{policy:?}: {stats:?}");
    }
    let budget = MemoryBudget::bytes(20_000).install_apart();
    assert!(plain == run::<R, Transformer<_>>(&Bare));
    assert!(RematStats::of_thread().replayed_operations > 0);
    drop(budget);
}

/// Functions of plain arguments are made again, as a causal mask that each layer makes.
#[test]
fn new_tensors_do_not_stay() {
    type B = Remat<Flex>;
    let device = Default::default();
    let run = || {
        let mask = Tensor::<B, 2, Bool>::tril_mask([64, 64], 0, &device);
        let floats = [
            Tensor::<B, 2>::zeros([64, 64], &device),
            Tensor::ones([64, 64], &device),
            Tensor::full([64, 64], 2.5, &device),
            Tensor::<B, 1, Int>::arange(0..4096, &device)
                .float()
                .reshape([64, 64]),
            mask.clone().float(),
        ];
        (floats, mask)
    };
    let data = |(floats, mask): ([Tensor<B, 2>; 5], Tensor<B, 2, Bool>)| {
        let floats = floats.map(|x| x.into_data());
        (floats, mask.into_data())
    };
    let expected = data(run());
    for policy in [Policy::Recompute, Policy::KeepCompute, Policy::Offload] {
        let mut held = None;
        RematStats::reset_thread();
        checkpoint_with(policy, || held = Some(run()));
        let stats = RematStats::of_thread();
        assert_eq!(stats.live_bytes, 0, "{stats:?}");
        assert_eq!(data(held.expect("it ran")), expected);
    }
}
