//! Law: the first operation that overflows is named, with its pass, its parameter and what was
//! before it.

use burn::backend::Autodiff;
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::softmax;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use burn_amp::{Autocast, F16, GradScaler, Watch, first_non_finite};
use burn_flex::Flex;
use tests::spy::{Spy, take_calls};

type B = Autocast<Autodiff<Watch<Flex>>, F16>;
type Model = Vec<Linear<B>>;

/// Layers of width 2 that multiply by these factors, without biases.
fn model(factors: &[f32]) -> Model {
    let layer = |factor: &f32| Linear {
        weight: Param::from_data([[*factor, 0.0], [0.0, *factor]], &Default::default()),
        ..LinearConfig::new(2, 2)
            .with_bias(false)
            .init(&Default::default())
    };
    factors.iter().map(layer).collect()
}

fn loss(model: &Model, x: f32) -> Tensor<B, 1> {
    let x = Tensor::<B, 2>::full([1, 2], x, &Default::default());
    model.iter().fold(x, |x, layer| layer.forward(x)).sum()
}

#[test]
fn in_the_forward_pass() {
    let _unscaled = GradScaler::disabled();
    let model = model(&[2.0, 300.0, 300.0, 1e-3]);
    let step = |model: &Model, x| drop(loss(model, x).backward());
    assert_eq!(first_non_finite(&model, |model| step(model, 0.1)), None);

    let found = first_non_finite(&model, |model| step(model, 1.0)).unwrap();
    assert_eq!(
        (found.operation, found.dtype, found.backward),
        ("linear", DType::F16, false)
    );
    assert_eq!(found.parameter.as_deref(), Some("2.weight"));
    let (_, largest) = *found
        .before
        .iter()
        .rfind(|(op, _)| *op == "linear")
        .unwrap();
    assert_eq!(largest, 600.0);
    let text = found.to_string();
    assert!(
        text.contains("`linear` in f16, in the forward pass, at parameter `2.weight`"),
        "{text}"
    );
    assert!(text.contains("linear 6.000e2"), "{text}");
}

#[test]
fn in_the_backward_pass() {
    let _unscaled = GradScaler::disabled();
    // The loss is 0.4, but its scaled gradient leaves f16 on the way back through the second layer.
    let model = model(&[1e-4, 2e3]);
    let found = first_non_finite(&model, |model| {
        loss(model, 1.0).mul_scalar(1e3).backward();
    });
    let found = found.unwrap();
    assert!(found.backward, "{found}");
    assert_eq!(found.operation, "linear_x_backward");
    assert_eq!(found.parameter.as_deref(), Some("1.weight"));
}

#[test]
fn a_mask_is_no_fault() {
    let _unscaled = GradScaler::disabled();
    let found = first_non_finite(&model(&[1.0]), |model| {
        let x = Tensor::<B, 2>::from_data(TensorData::from([[0.0_f32, 1.0]]), &Default::default());
        let x = model[0].forward(x);
        let mask = x.clone().equal_elem(0.0);
        let x = x.mask_fill(mask, f32::NEG_INFINITY);
        softmax(x, 1).sum().backward();
    });
    assert_eq!(found, None);
}

/// With a mask of 0 and -inf that is added to the scores.
#[derive(Module, Debug)]
struct Masked<B: Backend> {
    layers: Vec<Linear<B>>,
    field: Tensor<B, 2>,
    buffer: Param<Tensor<B, 2>>,
}

#[test]
fn an_additive_mask_is_no_fault() {
    type Add = fn(&Masked<B>, Tensor<B, 2>, Tensor<B, 2>) -> Tensor<B, 2>;
    let _unscaled = GradScaler::disabled();
    let device = Default::default();
    let mask = || Tensor::<B, 2>::from_data([[0.0, f32::NEG_INFINITY]], &Default::default());
    let masked = |factors: &[f32]| Masked {
        layers: model(factors),
        field: mask(),
        buffer: Param::from_tensor(mask()).no_grad(),
    };
    let masks: [Add; 4] = [
        |masked, x, _| x + masked.field.clone(),
        |masked, x, _| x + masked.buffer.val(),
        |_, x, batch| x + batch,
        |_, x, _| x + Tensor::from_data([[0.0, f32::NEG_INFINITY]], &Default::default()),
    ];
    for (source, add) in masks.into_iter().enumerate() {
        let first = |factors: &[f32]| {
            let batch = mask();
            first_non_finite(&masked(factors), |masked| {
                let x = Tensor::<B, 2>::ones([1, 2], &device);
                let x = add(masked, masked.layers[0].forward(x), batch);
                let x = softmax(x, 1);
                masked.layers[1].forward(x).sum().backward();
            })
        };
        assert_eq!(first(&[1.0, 1.0]), None, "{source}");
        // Behind the mask an overflow is found: 1e5 is beyond f16.
        let found = first(&[1.0, 1e5]).expect("an overflow");
        assert_eq!(found.parameter.as_deref(), Some("layers.1.weight"));
        assert_eq!(found.operation, "float_cast", "{source}");
    }
}

/// Such memory may hold NaN. Burn's recurrent layers begin with an empty tensor and write their
/// results into it.
#[test]
fn memory_that_was_not_written_is_not_looked_at() {
    type B = Autodiff<Watch<Spy<Flex>>>;
    let device = Default::default();
    let layer = LinearConfig::new(1, 1).init::<B>(&device);
    take_calls();
    let found = first_non_finite(&layer, |_| Tensor::<B, 2>::empty([2, 2], &device));
    assert_eq!(found, None);
    let calls = take_calls();
    let is_written = calls.iter().any(|(op, _)| *op == "float_zeros");
    assert!(is_written, "{calls:?}");
}
