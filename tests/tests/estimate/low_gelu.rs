//! GELU in f16 as a device computes it: autocast composes it in f32 where the device has no kernel
//! of its own, and an estimate for that device counts the same operations.

use tests::after::{After, after_each};

use super::*;

type B = Autocast<Autodiff<After<Meta>>, F16>;

/// The operations of GELU's forward pass on the inner backend.
fn operations(device: MetaDevice) -> Vec<&'static str> {
    let seen = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
    let then = seen.clone();
    let linear = LinearConfig::new(8, 8).init::<B>(&device);
    after_each(
        move |operation| then.borrow_mut().push(operation),
        || burn::tensor::activation::gelu(linear.forward(Tensor::<B, 2>::zeros([4, 8], &device))),
    );
    seen.take()
}

#[test]
fn an_estimate_composes_gelu_where_its_device_does() {
    let _turn = turn();
    let composed = [MetaDevice::wgpu(0), MetaDevice::cuda(0)];
    // Twice: the first time the device is asked.
    for device in composed.into_iter().cycle().take(4) {
        let operations = operations(device);
        assert!(operations.contains(&"float_erf"), "{operations:?}");
    }
    let operations = [(); 2].map(|()| operations(MetaDevice::new(0)))[1].clone();
    assert!(operations.contains(&"gelu"), "{operations:?}");
    assert!(!operations.contains(&"float_erf"), "{operations:?}");
}
