//! Functions in f16 as a device computes them: autocast composes them in f32 where the device's
//! kernels lose digits, and an estimate for that device counts the same operations.

use burn::tensor::activation;
use burn::tensor::backend::Backend;
use tests::after::{After, after_each};

use super::*;

/// Autocast on a backend whose operations are seen.
type Seen<X> = Autocast<Autodiff<After<X>>, F16>;

/// A function of an f16 tensor.
type Function<B> = fn(Tensor<B, 2>) -> Tensor<B, 2>;

fn functions<B: Backend>() -> [(&'static str, Function<B>); 9] {
    [
        ("gelu", activation::gelu),
        ("sqrt", Tensor::sqrt),
        ("tanh", Tensor::tanh),
        ("erf", Tensor::erf),
        ("asinh", Tensor::asinh),
        ("acosh", Tensor::acosh),
        ("atanh", Tensor::atanh),
        ("log1p", Tensor::log1p),
        ("mish", activation::mish),
    ]
}

/// The operations of each function on the inner backend.
fn operations<X: Backend>(device: &X::Device) -> Vec<(&'static str, Vec<&'static str>)>
where
    Seen<X>: AutodiffBackend<Device = X::Device>,
{
    let linear = LinearConfig::new(8, 8).init::<Seen<X>>(device);
    let x = linear.forward(Tensor::ones([4, 8], device));
    let of_function = |(name, function): (&'static str, Function<Seen<X>>)| {
        // The first time the device is asked.
        drop(function(x.clone()));
        let seen = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
        let then = seen.clone();
        let see = move |operation| then.borrow_mut().push(operation);
        let _result = after_each(see, || function(x.clone()));
        (name, seen.take())
    };
    functions().map(of_function).to_vec()
}

#[test]
fn an_estimate_composes_functions_where_its_device_does() {
    let _turn = turn();
    let own = operations::<Meta>(&MetaDevice::new(0));
    let composed_on = |device: MetaDevice| -> Vec<_> {
        let pairs = operations::<Meta>(&device).into_iter().zip(&own);
        let composed = pairs.filter(|((_, found), (_, own))| found.len() > own.len());
        composed.map(|((name, _), _)| name).collect()
    };
    assert_eq!(composed_on(MetaDevice::cuda(0)), ["gelu"]);
    let all = functions::<Seen<Meta>>().map(|(name, _)| name);
    assert_eq!(composed_on(MetaDevice::wgpu(0)), all);
}

#[cfg(feature = "vulkan")]
#[test]
fn vulkan_composes_the_functions_that_its_estimate_does() {
    let _turn = turn();
    let device = Default::default();
    let real = operations::<tests::Vulkan>(&device);
    assert_eq!(real, operations::<Meta>(&MetaDevice::wgpu(0)));
}
