//! Fusion on the device without memory.

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_estimate::{Meta, MetaDevice, estimate_run};

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
