//! Law: with activations recomputed, offloaded or evicted by a budget, losses and every gradient
//! are bit for bit those without, dropout masks included, alone and under autocast.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_amp::{Autocast, F16};
use burn_checkpoint::{
    MemoryBudget, Policy, Remat, RematStats, apart, checkpoint, checkpoint_with,
};
use tests::compare::relative_error;
use tests::is_vulkan;
use tests::models::{Classifier, Cnn, Decoder, EncoderDecoder, Mlp, Transformer};

use super::off::{Trained, assert_same, train, train_around};

type Plain<I> = Autodiff<I>;
type Managed<I> = Autodiff<Remat<I>>;

/// How a forward pass is wrapped.
trait Scope {
    fn run<B: Backend>(forward: impl FnOnce() -> Tensor<B, 1>) -> Tensor<B, 1>;
}

struct NoScope;
impl Scope for NoScope {
    fn run<B: Backend>(forward: impl FnOnce() -> Tensor<B, 1>) -> Tensor<B, 1> {
        forward()
    }
}

struct Recompute;
impl Scope for Recompute {
    fn run<B: Backend>(forward: impl FnOnce() -> Tensor<B, 1>) -> Tensor<B, 1> {
        checkpoint(forward)
    }
}

struct Nested;
impl Scope for Nested {
    fn run<B: Backend>(forward: impl FnOnce() -> Tensor<B, 1>) -> Tensor<B, 1> {
        checkpoint(|| checkpoint_with(Policy::KeepCompute, || checkpoint(forward)))
    }
}

struct KeepCompute;
impl Scope for KeepCompute {
    fn run<B: Backend>(forward: impl FnOnce() -> Tensor<B, 1>) -> Tensor<B, 1> {
        checkpoint_with(Policy::KeepCompute, forward)
    }
}

struct Offload;
impl Scope for Offload {
    fn run<B: Backend>(forward: impl FnOnce() -> Tensor<B, 1>) -> Tensor<B, 1> {
        checkpoint_with(Policy::Offload, forward)
    }
}

fn same<B: AutodiffBackend, S: Scope, R: AutodiffBackend, M, N>()
where
    M: Classifier<B> + AutodiffModule<B>,
    N: Classifier<R> + AutodiffModule<R>,
{
    let _turn = super::turn();
    let plain = train::<B, M>();
    RematStats::reset_thread();
    assert_same(&plain, &train_around::<R, N>(|forward| S::run(forward)));
}

/// On every model.
fn every_model<B: AutodiffBackend, S: Scope, R: AutodiffBackend>() {
    same::<B, S, R, Mlp<_>, Mlp<_>>();
    same::<B, S, R, Cnn<_>, Cnn<_>>();
    same::<B, S, R, Transformer<_>, Transformer<_>>();
    same::<B, S, R, EncoderDecoder<_>, EncoderDecoder<_>>();
    same::<B, S, R, Decoder<_>, Decoder<_>>();
}

fn without_a_scope<I: Backend>() {
    every_model::<Plain<I>, NoScope, Managed<I>>();
    assert_eq!(RematStats::of_thread(), RematStats::default());
}

fn recomputed<I: Backend>() {
    every_model::<Plain<I>, Recompute, Managed<I>>();
    assert!(RematStats::of_thread().replayed_operations > 100);
}

fn nested<I: Backend>() {
    every_model::<Plain<I>, Nested, Managed<I>>();
}

fn kept_compute<I: Backend>() {
    every_model::<Plain<I>, KeepCompute, Managed<I>>();
}

fn offloaded<I: Backend>() {
    every_model::<Plain<I>, Offload, Managed<I>>();
    assert!(RematStats::of_thread().uploaded_bytes > 0);
}

fn under_autocast<I: Backend>() {
    type Low<I> = Autocast<Plain<I>, F16>;
    type LowManaged<I> = Autocast<Managed<I>, F16>;
    same::<Low<I>, Recompute, LowManaged<I>, Mlp<_>, Mlp<_>>();
    same::<Low<I>, Recompute, LowManaged<I>, Cnn<_>, Cnn<_>>();
    same::<Low<I>, Recompute, LowManaged<I>, Decoder<_>, Decoder<_>>();
    same::<Low<I>, Offload, LowManaged<I>, Decoder<_>, Decoder<_>>();
    // Over Fusion on software Vulkan this model's second loss was NaN in some runs in f16, with
    // Remat and without. It did not come back in 25 trainings in one process without Remat, which
    // had the same bits; what it was is not known.
    if !is_fusion::<I>() {
        same::<Low<I>, Recompute, LowManaged<I>, EncoderDecoder<_>, EncoderDecoder<_>>();
        same::<Low<I>, Offload, LowManaged<I>, EncoderDecoder<_>, EncoderDecoder<_>>();
    }
}

fn over_balanced_checkpointing<I: Backend>() {
    every_model::<
        Autodiff<I, BalancedCheckpointing>,
        Recompute,
        Autodiff<Remat<I>, BalancedCheckpointing>,
    >();
}

/// With a budget alone: a part of a step's memory, and one so small that it cannot be kept.
fn budgets<I: Backend>() {
    fn same<I: Backend, B: AutodiffBackend, R: AutodiffBackend, M, N>()
    where
        M: Classifier<B> + AutodiffModule<B>,
        N: Classifier<R> + AutodiffModule<R>,
    {
        let plain = train::<B, M>();
        let part = |part| MemoryBudget::fraction(part).expect("a part");
        let budgets = match is_vulkan::<I>() {
            true => vec![part(0.4)],
            false => vec![part(0.6), part(0.4), part(0.25), MemoryBudget::bytes(1024)],
        };
        for budget in budgets {
            RematStats::reset_thread();
            let _apart = apart();
            let installed = budget.install();
            let trained = train::<R, N>();
            assert!(
                RematStats::of_thread().replayed_operations > 0,
                "{budget:?}"
            );
            drop(installed);
            if is_fusion::<I>() {
                assert_close(&plain, &trained);
            } else {
                assert_same(&plain, &trained);
            }
        }
    }
    let _turn = super::turn();
    same::<I, Plain<I>, Managed<I>, Mlp<_>, Mlp<_>>();
    same::<I, Plain<I>, Managed<I>, Cnn<_>, Cnn<_>>();
    same::<I, Plain<I>, Managed<I>, EncoderDecoder<_>, EncoderDecoder<_>>();
    same::<I, Plain<I>, Managed<I>, Decoder<_>, Decoder<_>>();
    same::<I, Autocast<Plain<I>, F16>, Autocast<Managed<I>, F16>, Decoder<_>, Decoder<_>>();
}

/// Fusion groups kernels by the order of the operations: an eviction makes other groups, which
/// round differently in the last bits. Errors are relative to the largest gradient of all, because
/// that of a bias before a batch norm is only rounding error.
fn assert_close(one: &Trained, other: &Trained) {
    assert!(relative_error(&other.0, &one.0) < 1e-5, "losses");
    let all = |trained: &Trained| -> Vec<f32> {
        let gradients = trained.1.iter().map(|(_, gradient)| gradient);
        gradients.flatten().copied().collect()
    };
    let error = relative_error(&all(other), &all(one));
    assert!(error < 1e-3, "gradients: {error}");
}

fn is_fusion<I: Backend>() -> bool {
    I::name(&I::Device::default()).contains("fusion")
}

tests::on_every_backend!(
    budgets,
    without_a_scope,
    recomputed,
    nested,
    kept_compute,
    offloaded,
    under_autocast,
    over_balanced_checkpointing,
);
