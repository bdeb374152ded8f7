//! Attention: the decorator's own operations over autodiff, the inner backend's fused kernel
//! elsewhere, no NaN from rows that are masked in full.

use burn::backend::Autodiff;
use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig};
use burn::tensor::backend::Backend;
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Shape, Tensor, activation};
use burn_amp::{Autocast, Bf16, Cast, F16, Off, Policy, autocast, op_table};
use burn_flex::Flex;
use tests::compare::{relative_error, values};
use tests::spy::{Spy, take_calls};

const SHAPE: [usize; 4] = [1, 2, 4, 8];

fn input<B: Backend>(offset: i64) -> Tensor<B, 4> {
    let device = B::Device::default();
    Tensor::<B, 1, burn::tensor::Int>::arange(0..64, &device)
        .mul_scalar(7 + offset)
        .remainder_scalar(13)
        .float()
        .div_scalar(6.0)
        .sub_scalar(1.0)
        .reshape(SHAPE)
}

/// Masks the first query's row in full and half of the second's.
fn mask<B: Backend>() -> Tensor<B, 4, Bool> {
    let device = B::Device::default();
    let columns = [4, 2, 0, 0].map(|masked| [0, 1, 2, 3].map(|column| column < masked));
    Tensor::<B, 2, Bool>::from_data(columns, &device)
        .reshape([1, 1, 4, 4])
        .expand(Shape::new([1, 2, 4, 4]))
}

fn attend<B: Backend>() -> Tensor<B, 4> {
    attention(
        input(0),
        input(2),
        input(5),
        Some(mask()),
        None,
        AttentionModuleOptions::default(),
    )
}

fn masked_rows_under<I: Backend, P: Policy>() {
    let device = I::Device::default();
    let Some(low) = P::mode()
        .low()
        .filter(|low| I::supports_dtype(&device, (*low).into()))
    else {
        return;
    };
    let epsilon = low.finfo().epsilon as f32;
    let expected = values(attend::<Flex>());
    assert_eq!(
        &expected[..8],
        &[0.0; 8],
        "a row that sees nothing gives nothing"
    );

    // Fused, without autodiff.
    let found = attend::<Autocast<I, P>>();
    assert_eq!(found.dtype(), low.into());
    assert!(relative_error(&values(found), &expected) < 4.0 * epsilon);

    // Composed, with it; the masked row has a gradient of zero.
    type Train<I, P> = Autocast<Autodiff<I>, P>;
    let query = input::<Train<I, P>>(0).require_grad();
    let output = attention(
        query.clone(),
        input(2),
        input(5),
        Some(mask()),
        None,
        AttentionModuleOptions::default(),
    );
    assert_eq!(output.dtype(), low.into());
    assert!(relative_error(&values(output.clone()), &expected) < 4.0 * epsilon);
    let grads = (output * input(1)).sum().backward();
    let grad = values(query.grad(&grads).expect("a gradient"));
    assert!(grad.iter().all(|x| x.is_finite()), "{grad:?}");
    assert_eq!(&grad[..8], &[0.0; 8]);

    // Softmax over a row of -inf is NaN in f32 too; Burn's own attention module masks with a finite
    // number.
    let mha = MultiHeadAttentionConfig::new(8, 2).init::<Train<I, P>>(&device);
    let x = input::<Train<I, P>>(0).reshape([2, 4, 8]);
    let all = Tensor::<Train<I, P>, 3, Bool>::from_data([[[true; 4]; 4]; 2], &device);
    let output = mha.forward(MhaInput::self_attn(x).mask_attn(all));
    assert!(values(output.context).iter().all(|x| x.is_finite()));
}

/// Scores beyond f16's range before they are scaled, and within it after.
fn large_scores<I: Backend>() {
    let device = I::Device::default();
    let value = attend_all::<Autocast<I, F16>>(40.0, &device);
    let trained = attend_all::<Autocast<Autodiff<I>, F16>>(40.0, &device);
    assert!(
        value.iter().chain(&trained).all(|x| *x == 40.0),
        "{value:?} {trained:?}"
    );
}

fn attend_all<B: Backend>(x: f32, device: &B::Device) -> Vec<f32> {
    let x = Tensor::<B, 4>::full([1, 1, 2, 64], x, device);
    let options = AttentionModuleOptions::default();
    values(attention(x.clone(), x.clone(), x, None, None, options))
}

/// Masks as they are written by hand in f32: a row that is masked in full is uniform, as there.
fn finite_masks<I: Backend>() {
    fn check<I: Backend, P: Policy>() {
        let device = I::Device::default();
        let low = P::mode().low().expect("a low type");
        if !I::supports_dtype(&device, low.into()) {
            return;
        }
        for value in [-1e9, f32::MIN] {
            let scores = Tensor::<Autocast<I, P>, 2>::ones([2, 4], &device).cast(low);
            let mask = Tensor::<_, 2, Bool>::from_data([[true; 4], [false; 4]], &device);
            let weights = activation::softmax(scores.mask_fill(mask, value), 1);
            assert_eq!(values(weights), [0.25; 8], "{value}");
        }
    }
    check::<I, F16>();
    check::<I, Bf16>();
}

/// Nothing is kept finite where nothing is lowered.
#[test]
fn off_fills_as_the_inner_backend() {
    fn fill<B: Backend>() -> Vec<f32> {
        let ones = Tensor::<B, 1>::ones([2], &Default::default()).cast(DType::F16);
        let mask = Tensor::<B, 1, Bool>::from_data([true, false], &Default::default());
        values(ones.mask_fill(mask, -1e9))
    }
    assert_eq!(fill::<Flex>(), [f32::NEG_INFINITY, 1.0]);
    assert_eq!(fill::<Autocast<Flex, Off>>(), fill::<Flex>());
    assert_eq!(autocast::<Off, _>(fill::<Autocast<Flex>>), fill::<Flex>());
    assert_eq!(fill::<Autocast<Flex, F16>>(), [-65504.0, 1.0]);
}

fn masked_rows_give_no_nan<I: Backend>() {
    masked_rows_under::<I, F16>();
    masked_rows_under::<I, Bf16>();
}

tests::on_every_backend!(masked_rows_give_no_nan, large_scores, finite_masks);

#[test]
fn the_fused_kernel_is_used_where_there_is_one() {
    take_calls();
    attend::<Autocast<Spy<Flex>>>();
    assert!(take_calls().contains(&("attention", "bf16".into())));
}

#[test]
fn over_autodiff_the_softmax_is_f32() {
    take_calls();
    attend::<Autocast<Autodiff<Spy<Flex>>>>();
    let calls = take_calls();
    assert!(
        calls.contains(&("float_matmul", "bf16".into())),
        "{calls:?}"
    );
    assert!(calls.contains(&("float_exp", "f32".into())), "{calls:?}");
    assert!(!calls.contains(&("float_exp", "bf16".into())), "{calls:?}");
    assert!(!calls.iter().any(|(op, _)| *op == "attention"));
}

#[test]
fn off_is_the_inner_backends_attention() {
    assert_eq!(
        values(attend::<Autocast<Autodiff<Flex>, Off>>()),
        values(attend::<Autodiff<Flex>>())
    );
    let found = autocast::<Off, _>(attend::<Autocast<Flex>>);
    assert_eq!(found.dtype(), DType::F32);
    assert_eq!(values(found), values(attend::<Flex>()));
}

#[test]
fn softmax_returns_f32() {
    let class = op_table()
        .iter()
        .find(|row| row.op == "softmax")
        .map(|row| row.cast);
    assert_eq!(class, Some(Cast::Full));
    let x = input::<Autocast<Flex>>(0).cast(DType::BF16);
    assert_eq!(activation::softmax(x, 3).dtype(), DType::F32);
}
