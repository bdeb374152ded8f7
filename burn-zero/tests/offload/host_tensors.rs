//! Each operation has the same result on tensors in host memory as on the device.

use burn::backend::Autodiff;
use burn::module::{Module, Param};
use burn::prelude::*;
use burn::tensor::{DType, TensorData};
use burn_flex::Flex;
use burn_zero::{OffloadConfig, PlacedTensor, Sharded, WithHost};
use proptest::prelude::*;

type H = WithHost<Flex>;
type One<const D: usize> = Tensor<H, D>;

#[derive(Module, Debug)]
struct Weight<B: Backend, const D: usize> {
    weight: Param<Tensor<B, D>>,
}

/// A tensor in host memory: a gradient that left the device during backward.
fn host<const D: usize>(data: TensorData) -> One<D> {
    type B = Sharded<Autodiff<Flex>>;
    let data = Tensor::<B, D>::from_data(data.clone(), (&Default::default(), data.dtype));
    let weight = Param::from_tensor(data.zeros_like());
    let model = Weight { weight };
    let mut optimizer = OffloadConfig::default().init().unwrap();
    optimizer.prepare(&model);
    let gradients = (model.weight.val() * data).sum().backward();
    let gradient = model.weight.val().grad(&gradients).unwrap();
    assert!(is_on_host(&gradient));
    gradient
}

fn device<const D: usize>(data: TensorData) -> One<D> {
    let dtype = data.dtype;
    Tensor::from_data(data, (&Default::default(), dtype))
}

fn is_on_host<const D: usize>(tensor: &One<D>) -> bool {
    let primitive = tensor.clone().into_primitive().tensor();
    matches!(primitive, PlacedTensor::Host(_))
}

/// Compares bits, and checks which memory the results are in.
#[track_caller]
fn same<const D: usize>(on_host: One<D>, on_device: One<D>) {
    assert!(is_on_host(&on_host) && !is_on_host(&on_device));
    let [on_host, on_device] = [on_host, on_device].map(|tensor| tensor.into_data());
    assert_eq!(on_host.shape, on_device.shape);
    assert_eq!(on_host.dtype, on_device.dtype);
    assert_eq!(on_host.as_bytes(), on_device.as_bytes());
}

fn matrix(values: &[f32]) -> TensorData {
    TensorData::new(values.to_vec(), [values.len() / 3, 3])
}

/// Clears the lowest bits of an f32. Flex casts through f64 with a conversion that ignores the
/// lowest three bits, so that a value just above the middle of two is rounded down. On the host it
/// is rounded to nearest, as by `half` and by GPUs.
fn without_lowest_bits(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & !7)
}

#[test]
fn casts_round_to_the_nearest() {
    let above_the_middle = -95_488.01_f32;
    let cast = host::<2>(matrix(&[above_the_middle; 3])).cast(DType::BF16);
    let expected = vec![half::bf16::from_f32(above_the_middle); 3];
    assert_eq!(cast.into_data(), TensorData::new(expected, [1, 3]));
}

proptest! {
    #[test]
    fn what_layers_do_has_the_devices_bits(
        values in prop::collection::vec((-1e6_f32..1e6, -1e-3_f32..1e3), 6..60),
        factor in prop_oneof![Just(0.125_f64), -3.0..3.0_f64],
    ) {
        let values = &values[..values.len() / 3 * 3];
        let (a, b): (Vec<_>, Vec<_>) = values.iter().copied().unzip();
        let (a, b) = (matrix(&a), matrix(&b));
        let both = |f: &dyn Fn(One<2>, One<2>) -> One<2>| {
            same(f(host(a.clone()), host(b.clone())), f(device(a.clone()), device(b.clone())));
        };
        both(&|a, b| a + b);
        both(&|a, b| a * b);
        both(&|a, _| a.mul_scalar(factor));
        both(&|a, _| a.div_scalar(factor));
        both(&|a, _| a.square());
        both(&|a, _| a.clone() * a.clone() + a);
        both(&|a, b| {
            // An operation must not change elements that another tensor shares.
            let kept = a.clone();
            let _ = a.mul_scalar(2.0) + b;
            kept
        });
        let coarse = matrix(&a.iter::<f32>().map(without_lowest_bits).collect::<Vec<_>>());
        for dtype in [DType::BF16, DType::F16] {
            let cast = |a: One<2>| a.cast(dtype);
            same(cast(host(coarse.clone())), cast(device(coarse.clone())));
            let back = |a: One<2>| a.cast(dtype).cast(DType::F32);
            same(back(host(coarse.clone())), back(device(coarse.clone())));
        }
        let elements = b.shape.num_elements();
        both(&|a, _| a.reshape([3, elements / 3]));
        // By a number, wherever that is.
        let number = |data: TensorData| device::<2>(data).slice([0..1, 0..1]);
        same(host::<2>(a.clone()) * number(b.clone()), device::<2>(a.clone()) * number(b.clone()));

        let sum = host::<2>(a.clone()).sum();
        prop_assert!(is_on_host(&sum));
        let exact: f64 = a.iter::<f64>().sum();
        prop_assert_eq!(sum.into_scalar(), exact as f32);
    }
}

#[test]
fn what_is_not_finite_is_found_where_it_is() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let mut values = vec![0.5_f32; 9];
            values[4] = value;
            let data = matrix(&values).convert_dtype(dtype);
            let found = |tensor: One<2>| {
                [tensor.clone().is_nan(), tensor.is_inf()].map(|found| found.into_data())
            };
            let (on_host, on_device) = (found(host(data.clone())), found(device(data)));
            assert_eq!(on_host, on_device, "{value} {dtype:?}");
        }
    }
}

#[test]
fn any_other_operation_brings_it_to_the_device() {
    let data = matrix(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let product = host::<2>(data.clone()).matmul(host::<2>(data.clone()).transpose());
    assert!(!is_on_host(&product));
    let expected = device::<2>(data.clone()).matmul(device::<2>(data.clone()).transpose());
    assert_eq!(product.into_data(), expected.into_data());
    // One of two operands is enough.
    let sum = host::<2>(data.clone()) + device(data);
    assert!(!is_on_host(&sum));
    assert_eq!(sum.into_data(), matrix(&[2.0, 4.0, 6.0, 8.0, 10.0, 12.0]));
}
