//! Training in bf16 and f16 follows f32's loss, with f32 gradients throughout.

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_amp::{Autocast, Bf16, F16, GradScaler, GradScalerConfig, Policy};
use burn_update::Update;
use tests::compare::{gradients, values};
use tests::models::{Classifier, Cnn, Decoder, Mlp, Transformer};

const STEPS: usize = 40;

/// The loss of every step.
fn losses<B: AutodiffBackend, M: Classifier<B> + AutodiffModule<B> + 'static>(
    scaler: &GradScaler,
) -> Vec<f32> {
    let device = B::Device::default();
    B::seed(&device, 7);
    let mut model = M::init(&device);
    // Parameters are drawn when they are first used, so all of them before the first batch.
    values(model.loss(2, &device));
    let update = Update::new(AdamConfig::new().init()).scale(scaler.clone());
    let mut update = update.expect("no other scale");
    (0..STEPS)
        .map(|step| {
            // Four batches, repeated, so that there is something to learn.
            B::seed(&device, (step % 4) as u64);
            let loss = model.loss(16, &device);
            let value = values(loss.clone())[0];
            let grads = loss.backward();
            let all = gradients(&model, &grads);
            assert!(
                all.iter()
                    .all(|(_, grad)| grad.iter().all(|x| x.is_finite()))
            );
            let grads = GradientsParams::from_grads(grads, &model);
            model = update.step(5e-3, model.clone(), grads).expect("it goes on");
            value
        })
        .collect()
}

/// The scaler is made under the lock, because another thread's run finds the only scaler of the
/// process.
fn follows<I: Backend, P: Policy, M, N>(scaler: fn() -> GradScaler)
where
    M: Classifier<Autodiff<I>> + AutodiffModule<Autodiff<I>> + 'static,
    N: Classifier<Autocast<Autodiff<I>, P>> + AutodiffModule<Autocast<Autodiff<I>, P>> + 'static,
{
    let low = P::mode().low().expect("a low type");
    if !I::supports_dtype(&I::Device::default(), low.into()) {
        return;
    }
    let _turn = super::turn();
    let expected = losses::<Autodiff<I>, M>(&GradScaler::disabled());
    let scaler = scaler();
    let found = losses::<Autocast<Autodiff<I>, P>, N>(&scaler);
    assert_eq!(scaler.skipped_steps(), 0);
    let distances = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    let largest = distances.fold(0f32, f32::max);
    // The first loss differs by the rounding of the forward pass; rounding then moves the two
    // trajectories apart.
    let epsilon = low.finfo().epsilon as f32;
    let first = (found[0] - expected[0]).abs() / expected[0];
    assert!(
        first < 2.0 * epsilon,
        "first losses {} and {}",
        found[0],
        expected[0]
    );
    assert!(largest < 0.03 * expected[0], "{found:?}\n{expected:?}");
    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
    assert!(
        mean(&expected[STEPS - 5..]) < mean(&expected[..5]),
        "f32 learns: {expected:?}"
    );
}

macro_rules! law {
    ($($bf16:ident, $f16:ident: $model:ident;)+) => {
        $(fn $bf16<I: Backend>() {
            follows::<I, Bf16, $model<_>, $model<_>>(GradScaler::disabled);
        }

        fn $f16<I: Backend>() {
            let scaler = || GradScaler::new(GradScalerConfig::default()).expect("valid");
            follows::<I, F16, $model<_>, $model<_>>(scaler);
        })+

        tests::on_every_backend!($($bf16, $f16),+);
    };
}

law! {
    mlp_in_bf16, mlp_in_f16: Mlp;
    cnn_in_bf16, cnn_in_f16: Cnn;
    transformer_in_bf16, transformer_in_f16: Transformer;
    decoder_in_bf16, decoder_in_f16: Decoder;
}

/// Fusion changes which kernels run, not what is computed.
#[cfg(feature = "vulkan")]
#[test]
fn fusion_changes_nothing_on_vulkan() {
    fn run<I: Backend>() -> Vec<f32> {
        let _turn = super::turn();
        let scaler = GradScaler::new(GradScalerConfig::default()).expect("valid");
        losses::<Autocast<Autodiff<I>, F16>, Decoder<_>>(&scaler)
    }
    let (alone, fused) = (run::<tests::Vulkan>(), run::<tests::VulkanFusion>());
    let distances = alone.iter().zip(&fused).map(|(a, b)| (a - b).abs());
    let largest = distances.fold(0f32, f32::max);
    println!("largest difference {largest}");
    assert!(largest < 1e-3 * alone[0], "{alone:?}\n{fused:?}");
}
