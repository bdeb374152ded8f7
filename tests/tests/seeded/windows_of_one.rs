//! Law: windows of one micro-batch, whose overflows the device decides about, give the same results
//! as steps without windows, whose flags the host reads, bit for bit, with overflows in any step.

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::optim::AdamWConfig;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_accum::AccumConfig;
use burn_amp::{Autocast, F16, GradScaler, GradScalerConfig};
use burn_update::Update;
use tests::compare::values;
use tests::models::{Classifier, Decoder, Mlp};

/// Steps whose loss is multiplied with infinity: in a row, alone, and the last.
const OVERFLOWS: [usize; 4] = [2, 3, 6, 9];
const STEPS: usize = 10;

/// Every loss, and the scale and the skipped steps after every step.
fn trace<B: AutodiffBackend, M: Classifier<B> + AutodiffModule<B> + 'static>(
    is_in_windows: bool,
) -> Vec<(f32, f32, u64)> {
    let device = B::Device::default();
    B::seed(&device, 3);
    let config = GradScalerConfig {
        growth_interval: 2,
        ..Default::default()
    };
    let scaler = GradScaler::new(&config).expect("valid");
    let mut model = M::init(&device);
    values(model.loss(2, &device));
    let mut update = Update::new(AdamWConfig::new().init());
    if is_in_windows {
        update = update.accumulate(AccumConfig::mean(1)).expect("valid");
    }
    let mut update = update.scale(scaler.clone()).expect("no other scale");
    let mut step = |step: usize| {
        B::seed(&device, step as u64);
        let loss = model.loss(8, &device);
        let value = values(loss.clone())[0];
        let loss = if OVERFLOWS.contains(&step) {
            // Finite in f32, beyond f16 and, scaled, beyond f32.
            loss.mul_scalar(3e38)
        } else {
            loss
        };
        let gradients = update.backward(&model, loss);
        model = update
            .step(1e-2, model.clone(), gradients)
            .expect("it goes on");
        value
    };
    let losses: Vec<_> = (0..STEPS).map(&mut step).collect();
    // The state after the overflow of the last step.
    let last = step(STEPS);
    let state = (scaler.scale(), scaler.skipped_steps());
    let mut trace: Vec<_> = losses.into_iter().map(|loss| (loss, 0.0, 0)).collect();
    trace.push((last, state.0, state.1));
    trace
}

fn same<I: Backend, M>()
where
    M: Classifier<Autocast<Autodiff<I>, F16>>
        + AutodiffModule<Autocast<Autodiff<I>, F16>>
        + 'static,
{
    let _turn = super::turn();
    let steps = trace::<_, M>(false);
    assert_eq!(trace::<_, M>(true), steps);
    assert!(steps.iter().all(|(loss, ..)| loss.is_finite()), "{steps:?}");
    assert_eq!(steps[STEPS].2, OVERFLOWS.len() as u64);
}

fn mlp<I: Backend>() {
    same::<I, Mlp<_>>();
}

fn decoder<I: Backend>() {
    same::<I, Decoder<_>>();
}

tests::on_every_backend!(mlp, decoder);
