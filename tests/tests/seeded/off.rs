//! Law: policy `Off` is bit for bit the inner backend, for losses, every gradient, and training.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::module::AutodiffModule;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_amp::{Autocast, Off};
use tests::compare::{gradients, values};
use tests::models::{Classifier, Cnn, Decoder, EncoderDecoder, Mlp, Transformer};

/// The losses of three steps, and every gradient of the last with its path.
pub(super) type Trained = (Vec<f32>, Vec<(String, Vec<f32>)>);

pub(super) fn train<B: AutodiffBackend, M: Classifier<B> + AutodiffModule<B>>() -> Trained {
    train_around::<B, M>(|forward| forward())
}

/// As [`train`], with a wrapper around each forward pass.
pub(super) fn train_around<B: AutodiffBackend, M: Classifier<B> + AutodiffModule<B>>(
    around: impl Fn(&dyn Fn() -> Tensor<B, 1>) -> Tensor<B, 1>,
) -> Trained {
    let device = B::Device::default();
    B::seed(&device, 42);
    let mut model = M::init(&device);
    let mut optimizer = AdamWConfig::new().init();
    let mut losses = Vec::new();
    let mut last = Vec::new();
    for _ in 0..3 {
        let loss = around(&|| model.loss(8, &device));
        losses.extend(values(loss.clone()));
        let grads = loss.backward();
        last = gradients(&model, &grads);
        let grads = GradientsParams::from_grads(grads, &model);
        model = optimizer.step(1e-2, model, grads);
    }
    (losses, last)
}

fn same<B: AutodiffBackend, M, N>()
where
    M: Classifier<B> + AutodiffModule<B>,
    N: Classifier<Autocast<B, Off>> + AutodiffModule<Autocast<B, Off>>,
{
    let _turn = super::turn();
    assert_same(&train::<B, M>(), &train::<Autocast<B, Off>, N>());
}

/// The same losses and gradients, to the bit.
pub(super) fn assert_same(one: &Trained, other: &Trained) {
    assert_eq!(one.0, other.0, "losses");
    assert!(!one.1.is_empty());
    assert_eq!(one.1.len(), other.1.len());
    for ((path, one), (_, other)) in one.1.iter().zip(&other.1) {
        assert!(one == other, "gradient of {path}");
    }
}

fn mlp<B: Backend>() {
    same::<Autodiff<B>, Mlp<_>, Mlp<_>>();
}

fn cnn<B: Backend>() {
    same::<Autodiff<B>, Cnn<_>, Cnn<_>>();
}

fn transformer<B: Backend>() {
    same::<Autodiff<B>, Transformer<_>, Transformer<_>>();
}

fn encoder_decoder<B: Backend>() {
    same::<Autodiff<B>, EncoderDecoder<_>, EncoderDecoder<_>>();
}

fn decoder<B: Backend>() {
    same::<Autodiff<B>, Decoder<_>, Decoder<_>>();
}

fn transformer_with_balanced_checkpointing<B: Backend>() {
    same::<Autodiff<B, BalancedCheckpointing>, Transformer<_>, Transformer<_>>();
}

tests::on_every_backend!(
    mlp,
    cnn,
    transformer,
    encoder_decoder,
    decoder,
    transformer_with_balanced_checkpointing
);
