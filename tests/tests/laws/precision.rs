//! Operations whose type does not change, and the effect of a scope and of a configuration on each
//! thread.

use std::sync::Mutex;
use std::thread;

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::nn::LinearConfig;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::backend::Backend;
use burn::tensor::module::{adaptive_avg_pool1d, adaptive_avg_pool2d, avg_pool2d};
use burn::tensor::quantization::{QuantScheme, QuantValue};
use burn::tensor::{DType, Int, Tensor};
use burn_amp::{AmpConfig, Autocast, Bf16, Cast, Configured, F16, Off, PolicyName, autocast};
use burn_flex::Flex;
use tests::compare::values;
use tests::spy::Spy;

type B = Autocast<Flex>;

fn ones<B: Backend>() -> Tensor<B, 2> {
    Tensor::ones([4, 4], &B::Device::default())
}

fn product<B: Backend>() -> DType {
    ones::<B>().matmul(ones()).dtype()
}

#[test]
fn what_the_user_chose_is_left_alone() {
    let x = ones::<B>();
    let double = x.clone().cast(DType::F64);
    assert_eq!(double.clone().matmul(double.clone()).dtype(), DType::F64);
    assert_eq!(double.clone().exp().dtype(), DType::F64);
    assert_eq!((double + x.clone()).dtype(), DType::F64);

    let low = x.clone().cast(DType::F16);
    assert_eq!(low.clone().tanh().dtype(), DType::F16);
    assert_eq!((low.clone() + low.clone()).dtype(), DType::F16);
    assert_eq!(low.reshape([16]).dtype(), DType::F16);
    // Also if it undoes a lowering.
    let raised = x.clone().matmul(x).cast(DType::F32);
    assert_eq!((raised.clone() * raised).dtype(), DType::F32);

    let int = Tensor::<B, 2, Int>::ones([2, 2], &Default::default());
    assert_eq!(int.clone().matmul(int.clone()).dtype(), int.dtype());
}

/// Means and positions, which a low type cannot sum or address exactly.
fn means_and_positions<I: Backend>() {
    type F<I> = Autocast<I, F16>;
    let device = I::Device::default();
    let image = Tensor::<F<I>, 4>::ones([1, 1, 64, 64], &device).cast(DType::F16);
    let whole = avg_pool2d(image.clone(), [64, 64], [1, 1], [0, 0], true, false);
    assert_eq!(values(whole), [1.0]);
    assert_eq!(values(adaptive_avg_pool2d(image, [1, 1])), [1.0]);
    let line = Tensor::<F<I>, 3>::ones([1, 1, 4096], &device).cast(DType::F16);
    assert_eq!(values(adaptive_avg_pool1d(line, 1)), [1.0]);
}

#[test]
fn on_flex() {
    means_and_positions::<Flex>();
}

#[cfg(feature = "vulkan")]
#[test]
fn on_vulkan() {
    means_and_positions::<tests::Vulkan>();
    means_and_positions::<tests::VulkanFusion>();
}

#[test]
fn what_is_computed_from_a_gradient_is_raised_but_not_lowered() {
    type T = Autocast<Autodiff<Flex>, F16>;
    let x = Tensor::<T, 2>::ones([2, 2], &Default::default()).require_grad();
    let grads = (x.clone().cast(DType::F16) * 200.0).sum().backward();
    let grad = x.grad(&grads).expect("a gradient");
    assert_eq!(grad.clone().matmul(grad.clone()).dtype(), DType::F32);
    assert_eq!(
        values(grad.clone().cast(DType::F16).square().sum()),
        [160000.0]
    );
    // A gradient that is written into another tensor is still a gradient.
    let packed = Tensor::zeros([2, 4], &Default::default()).slice_assign([0..2, 0..2], grad);
    assert_eq!(
        packed.clone().matmul(packed.transpose()).dtype(),
        DType::F32
    );
}

#[test]
fn a_cache_keeps_its_type() {
    let cache = ones::<B>().cast(DType::BF16);
    let written = cache.slice_assign([0..2, 0..4], ones().slice([0..2, 0..4]));
    assert_eq!(written.dtype(), DType::BF16);
    let full = ones::<B>().slice_assign([0..2, 0..4], ones().slice([0..2, 0..4]).cast(DType::F16));
    assert_eq!(full.dtype(), DType::F32);
}

#[test]
fn quantized_weights_meet_lowered_activations() {
    let scheme = QuantScheme::default().with_value(QuantValue::Q8S);
    let weight = ones::<Autocast<Spy<Flex>>>().quantize_dynamic(&scheme);
    let x = ones::<Autocast<Spy<Flex>>>().cast(DType::BF16);
    let y = x.matmul(weight).dequantize();
    assert!(
        tests::compare::values(y)
            .iter()
            .all(|y| (y - 4.0).abs() < 0.1)
    );
}

#[test]
fn a_loss_of_probabilities_is_f32() {
    let loss = |logits: Tensor<Autocast<Flex, F16>, 2>| {
        let probabilities = burn::tensor::activation::softmax(logits, 1);
        let targets = Tensor::<_, 1, Int>::from_ints([2, 2], &Default::default());
        CrossEntropyLossConfig::new()
            .with_logits(false)
            .init(&Default::default())
            .forward(probabilities, targets)
    };
    // The target's probability is 2e-5: f16's epsilon would have made it 8e-3.
    let logits = Tensor::from_floats([[5.0, 5.0, -5.1], [5.0, 5.0, -5.1]], &Default::default());
    let found = tests::compare::values(loss(logits.cast(DType::F16)))[0];
    assert!((found - 10.793).abs() < 0.01, "{found}");
}

#[test]
fn validation_runs_in_the_same_precision() {
    type Train = Autocast<Autodiff<Flex>, F16>;
    let linear = LinearConfig::new(4, 4).init::<Train>(&Default::default());
    assert_eq!(linear.forward(ones()).dtype(), DType::F16);
    assert_eq!(linear.valid().forward(ones()).dtype(), DType::F16);
}

#[test]
fn threads_have_their_own_scope() {
    let barrier = std::sync::Barrier::new(3);
    let run = |expected: DType, inside: &dyn Fn() -> DType| {
        barrier.wait();
        for _ in 0..200 {
            assert_eq!(inside(), expected);
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| run(DType::F16, &|| autocast::<F16, _>(product::<B>)));
        scope.spawn(|| run(DType::F32, &|| autocast::<Off, _>(product::<B>)));
        scope.spawn(|| run(DType::BF16, &|| product::<B>()));
    });
}

/// Locks the process-wide configuration for one test.
static INSTALLED: Mutex<()> = Mutex::new(());

#[test]
fn a_configuration_reaches_every_thread() {
    let _turn = INSTALLED
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    type C = Autocast<Flex, Configured>;
    for (policy, expected) in [
        (PolicyName::F16, DType::F16),
        (PolicyName::Bf16, DType::BF16),
        (PolicyName::Off, DType::F32),
    ] {
        AmpConfig::from(policy).install().expect("valid");
        assert_eq!(
            thread::spawn(product::<C>).join().expect("no panic"),
            expected
        );
        // A fixed policy and a scope ignore the configuration.
        assert_eq!(product::<Autocast<Flex, Bf16>>(), DType::BF16);
        assert_eq!(autocast::<F16, _>(product::<C>), DType::F16);
    }
}

#[test]
fn a_configuration_overrides_single_operations() {
    let _turn = INSTALLED
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    type C = Autocast<Flex, Configured>;
    let json = r#"{"policy": "bf16", "ops": {"softmax": "lower", "float_matmul": "full", "tanh": "lower"}}"#;
    let config: AmpConfig = serde_json::from_str(json).expect("valid");
    config.install().expect("valid");
    let softmax = burn::tensor::activation::softmax(ones::<C>(), 1).dtype();
    let tanh = ones::<C>().tanh().dtype();
    let matmul = product::<C>();
    // Overrides belong to the configuration, not to other policies.
    let fixed = burn::tensor::activation::softmax(ones::<B>(), 1).dtype();
    AmpConfig::off().install().expect("valid");
    assert_eq!(softmax, DType::BF16);
    assert_eq!(tanh, DType::BF16);
    assert_eq!(matmul, DType::F32);
    assert_eq!(fixed, DType::F32);
    assert_eq!(config.ops["softmax"], Cast::Lower);
}
