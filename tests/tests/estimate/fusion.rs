//! Fusion on the device without memory.

use std::time::Duration;

use burn::tensor::Int;
use burn::tensor::backend::Backend;
use burn_estimate::{estimate_on, estimate_run};

use super::*;

#[test]
fn results_within_a_kernel_take_no_memory() {
    let bytes = |device: MetaDevice| {
        let x = Tensor::<Meta, 1>::ones([1000], &device);
        let (estimate, (waiting, done, _sum)) = estimate_run(device, || {
            let sum = x.clone().exp() + x.clone().log();
            let waiting = device.bytes_in_use();
            Meta::sync(&device).expect("the queue runs");
            (waiting, device.bytes_in_use(), sum)
        });
        (waiting, done, estimate.peak_bytes)
    };
    let device = MetaDevice::wgpu(20);
    assert_eq!(bytes(device), (8000, 8000, 12000));
    // The operations wait in the queue, and are one kernel.
    assert_eq!(bytes(device.fused()), (4000, 8000, 8000));
}

/// A kernel may write a new parameter into the memory of its gradient, which is a gradient until
/// then.
#[test]
fn gradients_leave_the_device_where_the_optimizer_is_on_the_host() {
    type B = Autodiff<Meta>;
    let offload = |device: MetaDevice| {
        let estimate = once(&Mlp(512)).run::<B, _>(&device, |model, step| {
            estimate_on::<B, _>(device, model, step).0
        });
        let state = estimate.bytes_of(Kind::OptimizerState);
        assert_eq!(state, 2 * estimate.bytes_of(Kind::Parameter), "{estimate}");
        let shares = Shares {
            offload: true,
            ..Shares::NONE
        };
        estimate.peak_bytes - estimate.shared(shares).peak_bytes
    };
    let device = MetaDevice::wgpu(21);
    let (alone, fused) = (offload(device), offload(device.fused()));
    assert!(alone.abs_diff(fused) < alone / 100, "{fused} of {alone}");
}

/// A table of 256 MiB, whose reading alone would take 170 microseconds.
#[test]
fn a_lookup_within_a_kernel_reads_the_rows_that_it_returns() {
    let device = MetaDevice::wgpu(22).fused();
    let table = Tensor::<Meta, 2>::ones([1 << 20, 64], &device);
    let rows = Tensor::<Meta, 1, Int>::zeros([8], &device);
    let (estimate, _) = estimate_run(device, || table.clone().select(0, rows).exp());
    assert_eq!(estimate.operations, 1);
    assert!(estimate.time(&DeviceProfile::A100) < Duration::from_micros(50));
}
