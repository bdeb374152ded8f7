//! Layer norm, softmax and attention as one operation each are those of Burn's autodiff, on every
//! backend.

use burn::backend::Autodiff;
use burn::nn::{LayerNorm, LayerNormConfig};
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Tensor};
use burn_amp::{Autocast, Bf16, F16, Policy};
use burn_checkpoint::Remat;
use burn_flex::Flex;
use burn_fused::FusedBackward;
use tests::compare::{relative_error, values};

tests::on_every_backend!(fused_gradients_are_those_of_autodiff);

const SHAPE: [usize; 4] = [2, 2, 6, 8];

fn numbers<B: Backend>(seed: usize) -> Tensor<B, 4> {
    let number = |index: usize| ((index * 7919 + seed * 104_729) % 1009) as f32 / 300.0 - 1.6;
    let numbers: Vec<_> = (0..SHAPE.iter().product()).map(number).collect();
    Tensor::<B, 1>::from_floats(numbers.as_slice(), &Default::default()).reshape(SHAPE)
}

/// The loss, and the gradients of query, key, value and gamma.
fn train<B: AutodiffBackend>() -> Vec<Vec<f32>> {
    let device = B::Device::default();
    let norm: LayerNorm<B> = LayerNormConfig::new(SHAPE[3]).init(&device);
    let [query, key, value] = [1, 2, 3].map(|seed| numbers::<B>(seed).require_grad());
    let options = AttentionModuleOptions {
        is_causal: true,
        ..Default::default()
    };
    let read = attention(
        norm.forward(query.clone()),
        key.clone(),
        value.clone(),
        None,
        None,
        options,
    );
    let first = softmax(read.clone() * numbers(4), 2);
    let second = log_softmax(norm.forward(read), 3);
    let loss = (first * second * numbers(5)).sum().cast(DType::F32);
    let gradients = loss.backward();
    let mut all: Vec<_> = [query, key, value]
        .map(|x| values(x.grad(&gradients).unwrap()))
        .into();
    all.push(values(norm.gamma.grad(&gradients).unwrap()));
    all.push(values(loss));
    all
}

fn check<B: AutodiffBackend>(tolerance: f32) {
    for (found, expected) in train::<B>().iter().zip(train::<Autodiff<Flex>>()) {
        let error = relative_error(found, &expected);
        assert!(
            error < tolerance,
            "{}: {error}",
            B::name(&Default::default())
        );
    }
}

fn low<I: Backend, P: Policy>(tolerance: f32) {
    let low = P::mode().low().expect("a low type");
    if I::supports_dtype(&Default::default(), low.into()) {
        check::<Autocast<FusedBackward<Autodiff<Remat<I>>>, P>>(tolerance);
    }
}

fn fused_gradients_are_those_of_autodiff<I: Backend>() {
    check::<FusedBackward<Autodiff<I>>>(2e-5);
    check::<FusedBackward<Autodiff<Remat<I>>>>(2e-5);
    low::<I, F16>(2e-2);
    low::<I, Bf16>(1e-1);
}
