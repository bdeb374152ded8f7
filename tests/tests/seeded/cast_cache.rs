//! Law: with a cast cache below autodiff, losses and gradients are bit for bit those without, and
//! no gradient is lost.

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::nn::LinearConfig;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_amp::{Autocast, CastCache, F16};
use tests::compare::{bits, values};
use tests::models::{Cnn, Decoder, Mlp};

use super::off::{assert_same, train};

type Plain<I> = Autocast<Autodiff<I>, F16>;
type Cached<I> = Autocast<Autodiff<CastCache<I>>, F16>;

fn models<I: Backend>() {
    let _turn = super::turn();
    assert_same(&train::<Plain<I>, Mlp<_>>(), &train::<Cached<I>, Mlp<_>>());
    assert_same(&train::<Plain<I>, Cnn<_>>(), &train::<Cached<I>, Cnn<_>>());
    assert_same(
        &train::<Plain<I>, Decoder<_>>(),
        &train::<Cached<I>, Decoder<_>>(),
    );
}

fn first_use_without_gradients<I: Backend>() {
    let _turn = super::turn();
    let device = I::Device::default();
    let linear = LinearConfig::new(4, 4).init::<Cached<I>>(&device);
    let x = Tensor::<Cached<I>, 2>::ones([2, 4], &device);

    // In validation, detached, and only then in training; two losses over one forward pass of the
    // weight.
    let valid = linear.valid().forward(x.clone().inner());
    values(x.clone().matmul(linear.weight.val().detach()));
    let (one, other) = (linear.forward(x.clone()), linear.forward(x.mul_scalar(2.0)));
    assert_eq!(bits(one.clone().inner()), bits(valid));
    let other = other.sum().backward();
    let one = one.sum().backward();
    let grad = |grads| values(linear.weight.grad(grads).expect("a gradient"));
    assert_eq!(grad(&one), [2.0; 16]);
    assert_eq!(grad(&other), [4.0; 16]);
}

fn another_low_type_is_not_taken_for_the_cached_one<I: Backend>() {
    use burn::tensor::{DType, FloatDType};
    let device = I::Device::default();
    if !I::supports_dtype(&device, DType::BF16) {
        return;
    }
    let x = Tensor::<CastCache<I>, 1>::from_floats([1.0009766], &device);
    let f16 = x.clone().cast(FloatDType::F16);
    let bf16 = x.clone().cast(FloatDType::BF16);
    assert_eq!((f16.dtype(), bf16.dtype()), (DType::F16, DType::BF16));
    assert_eq!(values(f16), [1.0009766]);
    assert_eq!(values(bf16), [1.0]);
}

tests::on_every_backend!(
    models,
    first_use_without_gradients,
    another_low_type_is_not_taken_for_the_cached_one,
);
