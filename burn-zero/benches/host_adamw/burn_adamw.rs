//! Burn's own AdamW, on Flex.

use std::time::Instant;

use burn::{
    backend::Autodiff,
    module::{Module, Param, ParamId},
    optim::{AdamWConfig, GradientsParams, Optimizer},
    tensor::Tensor,
};
use burn_flex::Flex;

use super::Contender;

type B = Autodiff<Flex>;

#[derive(Module, Debug)]
struct Parameters<B: burn::tensor::backend::Backend> {
    all: Vec<Param<Tensor<B, 1>>>,
}

/// Elements of a parameter: of an ordinary layer, 2048 x 2048.
const PARAMETER: usize = 1 << 22;

/// Steps of `optimizer.step(lr, model, gradients)` alone; the gradients are registered before the clock starts.
pub fn contender(elements: usize) -> Contender {
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
    let mut optimizer = AdamWConfig::new().init::<B, Parameters<B>>();
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
