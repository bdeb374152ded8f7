//! Steps of a module on Flex: Burn's own AdamW, and the one whose state is on the host.

use std::time::Instant;

use burn::{
    backend::Autodiff,
    module::{Module, Param, ParamId},
    optim::{AdamWConfig, GradientsParams, Optimizer},
    tensor::Tensor,
};
use burn_flex::Flex;
use burn_zero::OffloadConfig;

use super::Contender;

type B = Autodiff<Flex>;

#[derive(Module, Debug)]
struct Parameters<B: burn::tensor::backend::Backend> {
    all: Vec<Param<Tensor<B, 1>>>,
}

/// Elements of a parameter: of an ordinary layer, 2048 x 2048.
const PARAMETER: usize = 1 << 22;

/// Burn's AdamW on the device.
pub fn burns(elements: usize) -> Contender {
    contender(elements, AdamWConfig::new().init())
}

/// AdamW on the host. Flex's device is the host too: what this adds to `HostAdamW` are the copies
/// of transfers.
pub fn offloaded(elements: usize) -> Contender {
    let config = OffloadConfig::default();
    contender(elements, config.init().expect("numbers that work"))
}

/// Steps of `optimizer.step(lr, model, gradients)` alone; the gradients are registered before the
/// clock starts.
fn contender<O>(elements: usize, mut optimizer: O) -> Contender
where
    O: Optimizer<Parameters<B>, B> + 'static,
{
    let device = Default::default();
    let lens: Vec<usize> = (0..elements)
        .step_by(PARAMETER)
        .map(|start| PARAMETER.min(elements - start))
        .collect();
    let all = lens.iter().map(|&len| {
        Param::initialized(
            ParamId::new(),
            Tensor::<B, 1>::ones([len], &device).require_grad(),
        )
    });
    let mut model = Some(Parameters { all: all.collect() });
    let gradients: Vec<Tensor<Flex, 1>> = lens
        .iter()
        .map(|&len| Tensor::ones([len], &device) * 1e-3)
        .collect();
    Box::new(move || {
        let before = model.take().expect("a model between steps");
        let mut arrived = GradientsParams::new();
        for (parameter, gradient) in before.all.iter().zip(&gradients) {
            arrived.register(parameter.id, gradient.clone());
        }
        let start = Instant::now();
        model = Some(optimizer.step(1e-3, before, arrived));
        start.elapsed().as_secs_f64()
    })
}
