//! Law: operands of different types never reach the inner backend, and results are those of f32, to
//! the rounding of the low type.

use std::ops::{Add, Div, Mul, Sub};

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Param};
use burn::nn::LayerNormConfig;
use burn::optim::{AdamConfig, GradientsParams, MuonConfig, Optimizer};
use burn::tensor::backend::Backend;
use burn::tensor::grid::affine_grid_2d;
use burn::tensor::module::{
    attention, conv_transpose2d, conv1d, conv2d, conv3d, deform_conv2d, embedding, interpolate,
    linear,
};
use burn::tensor::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions,
    GridSampleOptions, InterpolateMode, InterpolateOptions,
};
use burn::tensor::{
    Bool, DType, Distribution, FloatDType, IndexingUpdateOp, Int, Shape, Tensor, activation,
};
use burn_amp::{Autocast, Bf16, F16, Off, Policy};
use burn_flex::Flex;
use tests::compare::{relative_error, values};
use tests::models::{Classifier, Cnn, Mlp, Transformer};
use tests::spy::{Spy, take_calls};

type Case<B> = (&'static str, fn(Tensor<B, 2>, Tensor<B, 2>) -> Tensor<B, 2>);

fn indices<B: Backend>(x: &Tensor<B, 2>) -> Tensor<B, 2, Int> {
    Tensor::<B, 1, Int>::arange(0..16, &x.device())
        .remainder_scalar(3)
        .reshape([4, 4])
}

fn mask<B: Backend>(x: &Tensor<B, 2>) -> Tensor<B, 2, Bool> {
    indices(x).equal_elem(1)
}

/// Operations of Burn's tensor API that take several float tensors, on `[4, 4]` operands in
/// `(0.5, 1.5)`.
fn cases<B: Backend>() -> Vec<Case<B>> {
    vec![
        ("add", Add::add),
        ("sub", Sub::sub),
        ("mul", Mul::mul),
        ("div", Div::div),
        ("remainder", |a, b| a.remainder(b)),
        ("matmul", |a, b| a.matmul(b)),
        ("powf", |a, b| a.powf(b)),
        ("atan2", |a, b| a.atan2(b)),
        ("cross", |a, b| {
            a.slice([0..4, 0..3]).cross(b.slice([0..4, 0..3]), 1)
        }),
        ("cat", |a, b| Tensor::cat(vec![a, b], 0)),
        ("stack", |a, b| {
            Tensor::stack::<3>(vec![a, b], 0).reshape([8, 4])
        }),
        ("mask_where", |a, b| {
            let mask = mask(&a);
            a.mask_where(mask, b)
        }),
        ("scatter", |a, b| {
            let indices = indices(&a);
            a.scatter(1, indices, b, IndexingUpdateOp::Add)
        }),
        ("select_assign", |a, b| {
            let indices = Tensor::<B, 1, Int>::arange(0..4, &a.device());
            a.select_assign(0, indices, b, IndexingUpdateOp::Add)
        }),
        ("slice_assign", |a, b| {
            a.slice_assign([0..2, 0..4], b.slice([0..2, 0..4]))
        }),
        ("max_pair", |a, b| a.max_pair(b)),
        ("equal", |a, b| a.equal(b).float()),
        ("not_equal", |a, b| a.not_equal(b).float()),
        ("greater", |a, b| a.greater(b).float()),
        ("greater_equal", |a, b| a.greater_equal(b).float()),
        ("lower", |a, b| a.lower(b).float()),
        ("lower_equal", |a, b| a.lower_equal(b).float()),
        ("prelu", |a, b| {
            activation::prelu(a.neg(), b.slice([0..1, 0..4]).flatten::<1>(0, 1))
        }),
        ("linear", |a, b| {
            let bias = b.clone().slice([0..1, 0..4]).flatten::<1>(0, 1);
            linear(a, b, Some(bias))
        }),
        ("layer_norm", |a, b| {
            let mut norm = LayerNormConfig::new(4).init(&a.device());
            norm.gamma = Param::from_tensor(b.slice([0..1, 0..4]).flatten::<1>(0, 1));
            norm.forward(a)
        }),
        ("conv2d", |a, b| {
            let x = a.reshape([1, 1, 4, 4]);
            let weight = b.slice([0..2, 0..2]).reshape([1, 1, 2, 2]);
            let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
            conv2d(x, weight, None, options).reshape([3, 3])
        }),
        ("conv2d_with_bias", |a, b| {
            let bias = b.clone().slice([0..1, 0..1]).reshape([1]);
            let x = a.reshape([1, 1, 4, 4]);
            let weight = b.slice([0..2, 0..2]).reshape([1, 1, 2, 2]);
            let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
            conv2d(x, weight, Some(bias), options).reshape([3, 3])
        }),
        ("conv1d", |a, b| {
            let weight = b.slice([0..1, 0..2]).reshape([1, 1, 2]);
            let options = ConvOptions::new([1], [0], [1], 1);
            conv1d(a.reshape([1, 1, 16]), weight, None, options).reshape([1, 15])
        }),
        ("conv3d", |a, b| {
            let weight = b.slice([0..2, 0..4]).reshape([1, 1, 2, 2, 2]);
            let options = ConvOptions::new([1; 3], [0; 3], [1; 3], 1);
            conv3d(a.reshape([1, 1, 2, 2, 4]), weight, None, options).reshape([1, 3])
        }),
        ("conv_transpose2d", |a, b| {
            let weight = b.slice([0..2, 0..2]).reshape([1, 1, 2, 2]);
            let options = ConvTransposeOptions::new([1, 1], [0, 0], [0, 0], [1, 1], 1);
            conv_transpose2d(a.reshape([1, 1, 4, 4]), weight, None, options).reshape([5, 5])
        }),
        ("deform_conv2d", |a, b| {
            let weight = b.clone().slice([0..2, 0..2]).reshape([1, 1, 2, 2]);
            let offset = b
                .slice([0..4, 0..1])
                .reshape([1, 1, 2, 2])
                .repeat(&[1, 8, 1, 1]);
            let offset = offset.slice([0..1, 0..8, 0..1, 0..1]).repeat(&[1, 1, 3, 3]);
            let options = DeformConvOptions::new([1, 1], [0, 0], [1, 1], 1, 1);
            let x = a.reshape([1, 1, 4, 4]);
            deform_conv2d(x, offset * 0.25, weight, None, None, options).reshape([3, 3])
        }),
        ("scatter_nd", |a, b| {
            let indices = Tensor::<B, 2, Int>::from_ints([[0], [2]], &a.device());
            a.scatter_nd(indices, b.slice([0..2, 0..4]), IndexingUpdateOp::Add)
        }),
        ("min_pair", |a, b| a.min_pair(b)),
        ("attention_with_bias", |a, b| {
            let heads = |x: Tensor<B, 2>| x.reshape([1, 1, 4, 4]);
            attention(
                heads(a.clone()),
                heads(a.clone()),
                heads(a),
                None,
                Some(heads(b)),
                AttentionModuleOptions::default(),
            )
            .reshape([4, 4])
        }),
        ("attention", |a, b| {
            let key = b.clone().reshape([1, 1, 4, 4]);
            attention(
                a.reshape([1, 1, 4, 4]),
                key,
                b.reshape([1, 1, 4, 4]),
                None,
                None,
                AttentionModuleOptions::default(),
            )
            .reshape([4, 4])
        }),
        ("embedding", |a, b| {
            let rows = Tensor::<B, 2, Int>::zeros([1, 4], &a.device());
            embedding(a, rows).reshape([4, 4]) + b
        }),
        ("interpolate", |a, b| {
            let options = InterpolateOptions::new(InterpolateMode::Bilinear);
            interpolate(a.reshape([1, 1, 4, 4]), [4, 4], options).reshape([4, 4]) * b
        }),
        ("grid_sample_2d", |a, b| {
            let theta = b.slice([0..2, 0..3]).reshape([1, 2, 3]);
            let grid = affine_grid_2d(theta.mul_scalar(0.3), [1, 1, 4, 4]);
            a.reshape([1, 1, 4, 4])
                .grid_sample_2d(grid, GridSampleOptions::default())
                .reshape([4, 4])
        }),
    ]
}

/// Operations whose result jumps where an operand is rounded.
const DISCONTINUOUS: [&str; 7] = [
    "remainder",
    "equal",
    "not_equal",
    "greater",
    "greater_equal",
    "lower",
    "lower_equal",
];

fn check<I: Backend, P: Policy>(low: FloatDType) {
    let device = I::Device::default();
    if !I::supports_dtype(&device, low.into()) {
        return;
    }
    let epsilon = low.finfo().epsilon as f32;
    for ((name, reference), (_, mixed)) in cases::<I>().into_iter().zip(cases::<Autocast<I, P>>()) {
        if name == "deform_conv2d" && I::name(&device).contains("libtorch") {
            continue; // burn-tch panics: LibTorch has none
        }
        let operand = |offset: i64| -> Tensor<I, 2> {
            // Values that both types hold exactly.
            let x = Tensor::<I, 1, Int>::arange(0..16, &device)
                .mul_scalar(5 + offset)
                .add_scalar(3 * offset)
                .remainder_scalar(16);
            x.float().div_scalar(16.0).add_scalar(0.5).reshape([4, 4])
        };
        let data = [operand(0), operand(6)].map(|x| x.into_data());
        let expected = {
            let [a, b] = data.clone().map(|data| Tensor::from_data(data, &device));
            values(reference(a, b))
        };
        let load = |data| Tensor::<Autocast<I, P>, 2>::from_data(data, &device);
        let [a, b] = data.map(load);
        for (a, b) in [
            (a.clone(), b.clone().cast(low)),
            (a.clone().cast(low), b.clone()),
            (a.clone().cast(low), b.clone().cast(low)),
        ] {
            let kinds = format!("{name} {:?} {:?} under {}", a.dtype(), b.dtype(), P::name());
            let found = values(mixed(a, b));
            if DISCONTINUOUS.contains(&name) {
                assert_eq!(found.len(), expected.len(), "{kinds}");
            } else {
                let error = relative_error(&found, &expected);
                assert!(
                    error <= 4.0 * epsilon,
                    "{kinds}: {error} > {}",
                    4.0 * epsilon
                );
            }
        }
    }
}

fn in_bf16<I: Backend>() {
    check::<I, Bf16>(FloatDType::BF16);
}

fn in_f16<I: Backend>() {
    check::<I, F16>(FloatDType::F16);
}

fn where_autocast_is_off<I: Backend>() {
    check::<I, Off>(FloatDType::F16);
    check::<I, Off>(FloatDType::BF16);
}

tests::on_every_backend!(in_bf16, in_f16, where_autocast_is_off);

#[test]
fn nothing_mixed_arrives_behind_the_decorator() {
    check::<Spy<Flex>, Bf16>(FloatDType::BF16);
    check::<Spy<Flex>, F16>(FloatDType::F16);
    check::<Spy<Flex>, Bf16>(FloatDType::F16);
    check::<Spy<Flex>, Off>(FloatDType::F16);
}

/// Forward, backward, update and validation of whole models; returns the operations that reached
/// the backend.
fn train<M, N, P: Policy>() -> std::collections::BTreeSet<(&'static str, String)>
where
    M: Classifier<Autocast<Autodiff<Spy<Flex>>, P>>
        + AutodiffModule<Autocast<Autodiff<Spy<Flex>>, P>, InnerModule = N>,
    N: Classifier<Autocast<Spy<Flex>, P>>,
{
    let device = Default::default();
    let mut model = M::init(&device);
    let mut optimizer = AdamConfig::new().init();
    take_calls();
    for _ in 0..2 {
        let grads = GradientsParams::from_grads(model.loss(4, &device).backward(), &model);
        model = optimizer.step(1e-3, model, grads);
    }
    values(model.valid().loss(4, &device));
    take_calls()
}

#[test]
fn nothing_mixed_arrives_in_training() {
    let calls = train::<Mlp<_>, Mlp<_>, Bf16>();
    assert!(calls.contains(&("linear", "bf16".into())), "{calls:?}");
    assert!(calls.contains(&("layer_norm", "f32".into())), "{calls:?}");
    assert!(calls.contains(&("log_softmax", "f32".into())), "{calls:?}");
    let calls = train::<Cnn<_>, Cnn<_>, F16>();
    assert!(calls.contains(&("conv2d", "f16".into())), "{calls:?}");
    assert!(!calls.contains(&("conv2d", "f32".into())), "{calls:?}");
    let calls = train::<Transformer<_>, Transformer<_>, Bf16>();
    assert!(
        calls.contains(&("float_matmul", "bf16".into())),
        "{calls:?}"
    );
    assert!(
        !calls.contains(&("float_matmul", "f32".into())),
        "{calls:?}"
    );
}

#[test]
fn an_optimizers_matmuls_are_not_lowered() {
    type B = Autocast<Autodiff<Spy<Flex>>>;
    let device = Default::default();
    let linear = burn::nn::LinearConfig::new(8, 8)
        .with_bias(false)
        .init::<B>(&device);
    let x = Tensor::<B, 2>::random(Shape::new([4, 8]), Distribution::Default, &device);
    let mut optimizer = MuonConfig::new().init();
    let grads = linear.forward(x.clone()).mean().backward();
    let grads = GradientsParams::from_grads(grads, &linear);
    take_calls();
    let linear = optimizer.step(1e-2, linear, grads);
    let calls = take_calls();
    assert!(calls.contains(&("float_matmul", "f32".into())), "{calls:?}");
    assert!(
        !calls.contains(&("float_matmul", "bf16".into())),
        "{calls:?}"
    );

    // The updated parameter is an ordinary one again, for training and for validation.
    assert_eq!(linear.forward(x.clone()).dtype(), DType::BF16);
    assert_eq!(linear.valid().forward(x.inner()).dtype(), DType::BF16);
}
