//! Law: policy `Off` is bit for bit the inner backend, for losses, every gradient, and training.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::module::AutodiffModule;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_amp::{Autocast, Off};
use tests::compare::{gradients, values};
use tests::models::{Classifier, Cnn, Decoder, Mlp, Transformer};

/// Losses of three steps, and the gradients of the last.
fn train<B: AutodiffBackend, M: Classifier<B> + AutodiffModule<B>>()
-> (Vec<f32>, Vec<(String, Vec<f32>)>) {
    let device = B::Device::default();
    B::seed(&device, 42);
    let mut model = M::init(&device);
    let mut optimizer = AdamWConfig::new().init();
    let mut losses = Vec::new();
    let mut last = Vec::new();
    for _ in 0..3 {
        let loss = model.loss(8, &device);
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
    let bare = train::<B, M>();
    let off = train::<Autocast<B, Off>, N>();
    assert_eq!(bare.0, off.0, "losses");
    assert!(!bare.1.is_empty());
    assert_eq!(bare.1.len(), off.1.len());
    for ((path, bare), (_, off)) in bare.1.iter().zip(&off.1) {
        assert!(bare == off, "gradient of {path}");
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
    decoder,
    transformer_with_balanced_checkpointing
);
