//! A budget on a device's costs: what it evicts from a whole GPT, on a simulated device.

use std::time::Duration;

use burn::backend::Autodiff;
use burn::nn::{Embedding, EmbeddingConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::{Int, Tensor};
use burn_amp::Autocast;
use burn_checkpoint::{MemoryBudget, Remat, apart};
use burn_estimate::{DeviceProfile, Estimate, Meta, estimate_step};
use examples::gpt::loader::TokenBatch;
use examples::gpt::model::GptConfig;

type B = Autocast<Autodiff<Remat<Meta>>>;

const DEVICE: DeviceProfile = DeviceProfile::A100;

fn step(budget: Option<MemoryBudget>) -> Estimate {
    let device = Default::default();
    let model = GptConfig::new(1024, 12, 12, 768)
        .with_dropout(0.1)
        .init::<B>(&device);
    let _apart = apart();
    let _budget = budget.map(MemoryBudget::install);
    let mut optimizer = SgdConfig::new().init();
    let (estimate, _) = estimate_step::<B, _>(model, |model| {
        let tokens = Tensor::<B, 2, Int>::zeros([4, 1024], &device);
        let loss = model.loss(TokenBatch {
            inputs: tokens.clone(),
            targets: tokens,
        });
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        optimizer.step(1e-3, model, gradients)
    });
    estimate
}

/// So much longer replays by the costs of the device may make a step, by percent of the
/// activations' bytes: shares of what they were by a CPU's costs (9.7, 14.4, 18.6 and 21.7 % on
/// 2026-11-23).
const AT_MOST: [(u64, f64); 4] = [
    (80, 0.45 * 0.097),
    (60, 0.7 * 0.144),
    (40, 0.8 * 0.186),
    (25, 0.217),
];

#[test]
fn what_is_evicted_by_the_costs_of_the_device_comes_back_sooner() {
    let _turn = super::turn();
    let plain = step(None);
    let activations = plain.peak_bytes - plain.start_bytes;
    // Without replays, but recorded.
    let plain = step(Some(MemoryBudget::bytes(u64::MAX))).time(&DEVICE);
    for (percent, at_most) in AT_MOST {
        let budget = MemoryBudget::bytes(activations * percent / 100);
        let [cpu, device] = [budget, budget.costs_on(DEVICE)].map(|budget| {
            let step = step(Some(budget)).time(&DEVICE);
            (step - plain).as_secs_f64() / plain.as_secs_f64()
        });
        println!(
            "{percent} %: {:.1} % longer, {:.1} % by a CPU's costs",
            100.0 * device,
            100.0 * cpu
        );
        assert!(device <= at_most, "{percent} %: {device}");
        // With less nearly everything is evicted by either.
        assert!(
            percent < 40 || device < cpu,
            "{percent} %: {device} of {cpu}"
        );
    }
}

/// A table of 256 MiB, whose reading alone would take 170 microseconds.
#[test]
fn a_lookup_reads_the_rows_that_it_returns() {
    let _turn = super::turn();
    let device = Default::default();
    let table: Embedding<B> = EmbeddingConfig::new(1 << 20, 64).init(&device);
    let (estimate, _) = estimate_step::<B, _>(table, |table| {
        let _ = table.forward(Tensor::<B, 2, Int>::zeros([1, 8], &device));
        table
    });
    assert!(estimate.time(&DEVICE) < Duration::from_micros(50));
}
