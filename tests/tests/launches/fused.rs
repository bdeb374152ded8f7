//! Law: how many kernels are left after fusion, as CubeCL reports them to the log.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::optim::Optimizer;
use burn::tensor::{Distribution, Tensor};
use burn_accum::AccumConfig;
use burn_amp::{Autocast, F16};
use log::{LevelFilter, Log, Metadata, Record};
use tests::compare::values;

use super::counts::{P, W, all_parts, plain, scaled, with_and_without};

type B = Autocast<Autodiff<tests::VulkanFusion>, F16>;

/// A kernel that no update launches.
const MARKER: &str = "Uniform";

/// The names of the kernels that were launched.
static KERNELS: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Kernels;

impl Log for Kernels {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.target().starts_with("cubecl")
    }

    fn log(&self, record: &Record) {
        if self.enabled(record.metadata()) {
            kernels().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

fn kernels() -> MutexGuard<'static, Vec<String>> {
    KERNELS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Those since the last call. CubeCL writes its log on a thread of its own, in order.
fn take_kernels() -> Vec<String> {
    let marker =
        Tensor::<tests::Vulkan, 1>::random([1], Distribution::Default, &Default::default());
    values(marker);
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let mut kernels = kernels();
        if let Some(end) = kernels.iter().position(|name| name.contains(MARKER)) {
            let mut taken: Vec<_> = kernels.drain(..=end).collect();
            taken.pop();
            return taken;
        }
        drop(kernels);
        assert!(Instant::now() < deadline, "no kernel is logged");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The kernels of the last of some updates, when all plans of Fusion are known, without those of
/// forward, backward and SGD.
fn of_update<O: Optimizer<Vec<burn::nn::Linear<B>>, B>>(optimizer: O, micro_batches: u64) -> u64 {
    take_kernels();
    let launches = |model: &Vec<burn::nn::Linear<B>>| {
        values(model[0].weight.val().inner());
        take_kernels().len() as u64
    };
    let (with, without) = with_and_without(optimizer, (5, micro_batches, false), launches);
    with - without
}

#[test]
fn an_update_after_fusion_on_vulkan() {
    std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/launches")).unwrap();
    log::set_logger(&Kernels).unwrap();
    log::set_max_level(LevelFilter::Info);
    let window = || AccumConfig::mean(W as usize);
    let windows = plain().accumulate(window()).unwrap();
    assert_eq!(of_update(windows, W), 205);
    // The comparison is with a backward pass that is not scaled: a scaler scales the losses of its
    // own optimizers' models only, so the scaling of a window's losses takes part.
    assert_eq!(of_update(all_parts(window()), W), 324);
    assert_eq!(of_update(scaled(), 1), 2 * P + 4);
}
