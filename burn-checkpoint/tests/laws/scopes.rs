//! Scopes and policies.

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn_checkpoint::{Fate, Policy, Remat, RematStats, Verify, Work, checkpoint, checkpoint_with};
use burn_flex::Flex;

use crate::models::{Around, Bare, Cnn, Mlp, Model, Transformer, generator, step};

type Plain = Autodiff<Flex>;
type Checkpointed = Autodiff<Remat<Flex>>;

/// Each block a scope.
struct Scope(Policy);

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

fn policies() -> [Policy; 4] {
    [
        Policy::Recompute,
        Policy::KeepCompute,
        Policy::Offload,
        Policy::per_operation(|op| match op.work {
            Work::Math => Fate::Offload,
            Work::Norm | Work::Reduce => Fate::Keep,
            _ => Fate::Recompute,
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
    let _verify = Verify::on();
    let plain = step::<P, M>(&Bare);
    assert_eq!(plain, step::<R, N>(&Bare), "no scope");
    for policy in policies() {
        RematStats::reset_thread();
        let found = step::<R, N>(&Scope(policy.clone()));
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
    type P = Autodiff<Flex, BalancedCheckpointing>;
    type R = Autodiff<Remat<Flex>, BalancedCheckpointing>;
    every_policy::<P, R, Mlp<_>, Mlp<_>>();
    every_policy::<P, R, Transformer<_>, Transformer<_>>();
}

#[test]
fn autocast() {
    use burn_amp::Autocast;
    type P = Autocast<Autodiff<Flex>>;
    type R = Autocast<Autodiff<Remat<Flex>>>;
    every_policy::<P, R, Mlp<_>, Mlp<_>>();
    every_policy::<P, R, Transformer<_>, Transformer<_>>();
}

#[test]
fn nested_scopes() {
    fn both<M: Model<Plain>, N: Model<Checkpointed>>() {
        let _generator = generator();
        let _verify = Verify::on();
        let plain = step::<Plain, M>(&Nested);
        assert!(plain == step::<Checkpointed, N>(&Nested));
        assert_eq!(RematStats::of_thread().live_bytes, 0);
    }
    both::<Mlp<_>, Mlp<_>>();
    both::<Cnn<_>, Cnn<_>>();
    both::<Transformer<_>, Transformer<_>>();
}
