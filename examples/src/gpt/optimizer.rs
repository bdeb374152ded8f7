//! The optimizer that the settings name.
//!
//! One type for all of them, so that the training is compiled once.

use std::fmt;

use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGrad, AdaGradConfig, AdaGradState, Adam, AdamConfig, AdamState, AdamW, AdamWConfig,
    AdamWState, LearningRate, Sgd, SgdConfig, SgdState, SimpleOptimizer,
};
use burn::prelude::*;
use burn::record::Record;
use burn_zero::HostAdamWConfig;
use serde::{Deserialize, Serialize};

/// An optimizer, as plain numbers. Defaults are DeepSpeed's, or PyTorch's for those that DeepSpeed takes from there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum OptimizerConfig {
    /// Adam with L2 regularisation: weight decay is added to the gradient (`adam_w_mode: false`).
    Adam(AdamParams),
    /// Adam with decoupled weight decay; in DeepSpeed's files also `"Adam"`, unless `adam_w_mode` is false.
    AdamW(AdamParams),
    /// Stochastic gradient descent.
    Sgd(SgdParams),
    /// Adagrad.
    Adagrad(AdagradParams),
}

/// The parameters of [`OptimizerConfig::Adam`] and [`OptimizerConfig::AdamW`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdamParams {
    /// Learning rate. Default 0.001.
    pub lr: f64,
    /// Decays of both moments. Default 0.9 and 0.999.
    pub betas: (f64, f64),
    /// Added to the root of the second moment. Default 1e-8.
    pub eps: f64,
    /// Weight decay. Default 0, DeepSpeed's; PyTorch's AdamW (`torch_adam: true` in DeepSpeed's file) has 0.01.
    pub weight_decay: f64,
}

/// The parameters of [`OptimizerConfig::Sgd`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SgdParams {
    /// Learning rate. Default 0.001.
    pub lr: f64,
    /// Momentum. Default 0.
    pub momentum: f64,
    /// Dampening of the momentum. Default 0.
    pub dampening: f64,
    /// Whether the momentum is Nesterov's. Default false.
    pub nesterov: bool,
    /// L2 regularisation. Default 0.
    pub weight_decay: f64,
}

/// The parameters of [`OptimizerConfig::Adagrad`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdagradParams {
    /// Learning rate. Default 0.01.
    pub lr: f64,
    /// Added to the root of the sum of squares. Default 1e-10.
    pub eps: f64,
    /// L2 regularisation. Default 0.
    pub weight_decay: f64,
}

impl Default for AdamParams {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
        }
    }
}

impl Default for SgdParams {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
            weight_decay: 0.0,
        }
    }
}

impl Default for AdagradParams {
    fn default() -> Self {
        Self {
            lr: 1e-2,
            eps: 1e-10,
            weight_decay: 0.0,
        }
    }
}

impl OptimizerConfig {
    /// Its learning rate.
    pub fn lr(&self) -> f64 {
        match self {
            Self::Adam(params) | Self::AdamW(params) => params.lr,
            Self::Sgd(params) => params.lr,
            Self::Adagrad(params) => params.lr,
        }
    }
}

impl fmt::Display for OptimizerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// AdamW with the moments of GPT-3 (Brown et al. 2020).
pub fn default_optimizer(lr: f64) -> OptimizerConfig {
    OptimizerConfig::AdamW(default_params(lr))
}

/// The numbers of [`default_optimizer`], which a file's `"auto"` stands for.
pub fn default_params(lr: f64) -> AdamParams {
    AdamParams {
        lr,
        betas: (0.9, 0.95),
        eps: 1e-8,
        weight_decay: 0.01,
    }
}

/// AdamW on the host, with decoupled weight decay.
pub fn host_adamw(params: &AdamParams) -> HostAdamWConfig {
    HostAdamWConfig {
        beta_1: params.betas.0,
        beta_2: params.betas.1,
        epsilon: params.eps,
        weight_decay: params.weight_decay,
        ..HostAdamWConfig::default()
    }
}

/// One of Burn's optimizers.
#[derive(Clone)]
pub enum Named<B: Backend> {
    /// Adam with L2 regularisation.
    Adam(Adam),
    /// Adam with decoupled weight decay.
    AdamW(AdamW),
    /// Stochastic gradient descent, with momentum if there is one.
    Sgd(Sgd<B>),
    /// Adagrad.
    AdaGrad(AdaGrad),
}

/// The state of a parameter.
#[derive(Record, Clone)]
pub enum NamedState<B: Backend, const D: usize> {
    /// Of Adam.
    Adam(AdamState<B, D>),
    /// Of AdamW.
    AdamW(AdamWState<B, D>),
    /// Of SGD.
    Sgd(SgdState<B, D>),
    /// Of Adagrad.
    AdaGrad(AdaGradState<B, D>),
}

impl<B: Backend> Named<B> {
    /// The optimizer of a configuration, without its learning rate, which the schedule sets.
    pub fn new(config: &OptimizerConfig) -> Self {
        let decay = |penalty: f64| (penalty > 0.0).then(|| WeightDecayConfig::new(penalty as f32));
        match config {
            OptimizerConfig::Adam(params) => Self::Adam(
                AdamConfig::new()
                    .with_beta_1(params.betas.0 as f32)
                    .with_beta_2(params.betas.1 as f32)
                    .with_epsilon(params.eps as f32)
                    .with_weight_decay(decay(params.weight_decay))
                    .build(),
            ),
            OptimizerConfig::AdamW(params) => Self::AdamW(
                AdamWConfig::new()
                    .with_beta_1(params.betas.0 as f32)
                    .with_beta_2(params.betas.1 as f32)
                    .with_epsilon(params.eps as f32)
                    .with_weight_decay(params.weight_decay as f32)
                    .build(),
            ),
            OptimizerConfig::Sgd(params) => {
                let momentum = MomentumConfig::new()
                    .with_momentum(params.momentum)
                    .with_dampening(params.dampening)
                    .with_nesterov(params.nesterov);
                Self::Sgd(
                    SgdConfig::new()
                        .with_momentum((params.momentum > 0.0).then_some(momentum))
                        .with_weight_decay(decay(params.weight_decay))
                        .build(),
                )
            }
            OptimizerConfig::Adagrad(params) => Self::AdaGrad(
                AdaGradConfig::new()
                    .with_epsilon(params.eps as f32)
                    .with_weight_decay(decay(params.weight_decay))
                    .build(),
            ),
        }
    }
}

/// Optimizer state of one parameter, in bytes.
pub fn state_bytes(config: &OptimizerConfig) -> u64 {
    match config {
        OptimizerConfig::Adam(_) | OptimizerConfig::AdamW(_) => 8,
        OptimizerConfig::Sgd(params) if params.momentum == 0.0 => 0,
        OptimizerConfig::Sgd(_) | OptimizerConfig::Adagrad(_) => 4,
    }
}

/// Steps the chosen optimizer with its state, by two `match` arms for each optimizer.
macro_rules! step {
    ($optimizer:expr, $state:expr, ($lr:expr, $tensor:expr, $gradient:expr): $($name:ident)*) => {
        match ($optimizer, $state) {
            $((Named::$name(optimizer), None) => {
                let (tensor, state) = optimizer.step($lr, $tensor, $gradient, None);
                (tensor, state.map(NamedState::$name))
            }
            (Named::$name(optimizer), Some(NamedState::$name(state))) => {
                let (tensor, state) = optimizer.step($lr, $tensor, $gradient, Some(state));
                (tensor, state.map(NamedState::$name))
            })*
            _ => panic!("the record is that of another optimizer"),
        }
    };
}

impl<B: Backend> SimpleOptimizer<B> for Named<B> {
    type State<const D: usize> = NamedState<B, D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<B, D>,
        gradient: Tensor<B, D>,
        state: Option<NamedState<B, D>>,
    ) -> (Tensor<B, D>, Option<NamedState<B, D>>) {
        step!(self, state, (lr, tensor, gradient): Adam AdamW Sgd AdaGrad)
    }

    fn to_device<const D: usize>(state: NamedState<B, D>, device: &B::Device) -> NamedState<B, D> {
        match state {
            NamedState::Adam(state) => {
                NamedState::Adam(<Adam as SimpleOptimizer<B>>::to_device(state, device))
            }
            NamedState::AdamW(state) => {
                NamedState::AdamW(<AdamW as SimpleOptimizer<B>>::to_device(state, device))
            }
            NamedState::Sgd(state) => NamedState::Sgd(Sgd::to_device(state, device)),
            NamedState::AdaGrad(state) => {
                NamedState::AdaGrad(<AdaGrad as SimpleOptimizer<B>>::to_device(state, device))
            }
        }
    }
}

/// The optimizer of a configuration, for a whole module or for the pieces of one.
pub fn optimizer<B, M>(config: &OptimizerConfig) -> OptimizerAdaptor<Named<B::InnerBackend>, M, B>
where
    B: burn::tensor::backend::AutodiffBackend,
    M: burn::module::AutodiffModule<B>,
{
    Named::new(config).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Autodiff;
    use burn::module::Param;
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{GradientsParams, Optimizer};
    use burn::record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder};
    use burn_flex::Flex;

    type Train = Autodiff<Flex>;

    fn steps<O: Optimizer<Linear<Train>, Train>>(
        optimizer: &mut O,
        mut model: Linear<Train>,
        steps: usize,
    ) -> Linear<Train> {
        for step in 0..steps {
            let x = Tensor::<Train, 2>::full([3, 4], 0.3 + step as f32, &Default::default());
            let loss = model.forward(x).powf_scalar(2.0).mean();
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.05, model, gradients);
        }
        model
    }

    fn weights(model: &Linear<Train>) -> Vec<f32> {
        model.weight.val().into_data().to_vec().unwrap()
    }

    fn linear() -> Linear<Train> {
        let mut model = LinearConfig::new(4, 2)
            .with_bias(false)
            .init(&Default::default());
        // Drawn before it is cloned.
        model.weight = Param::from_tensor(model.weight.val());
        model
    }

    #[test]
    fn each_is_burns_and_goes_on_from_its_record() {
        let model = linear();
        let adam = AdamParams {
            betas: (0.8, 0.9),
            eps: 1e-6,
            weight_decay: 0.1,
            ..Default::default()
        };
        let sgd = SgdParams {
            momentum: 0.9,
            dampening: 0.1,
            nesterov: true,
            weight_decay: 0.1,
            ..Default::default()
        };
        let burns_adam = AdamConfig::new()
            .with_beta_1(0.8)
            .with_beta_2(0.9)
            .with_epsilon(1e-6)
            .with_weight_decay(Some(WeightDecayConfig::new(0.1)));
        let burns_adam_w = AdamWConfig::new()
            .with_beta_1(0.8)
            .with_beta_2(0.9)
            .with_epsilon(1e-6)
            .with_weight_decay(0.1);
        let momentum = MomentumConfig::new()
            .with_momentum(0.9)
            .with_dampening(0.1)
            .with_nesterov(true);
        let burns_sgd = SgdConfig::new()
            .with_momentum(Some(momentum))
            .with_weight_decay(Some(WeightDecayConfig::new(0.1)));
        let plain_sgd = OptimizerConfig::Sgd(SgdParams::default());
        let adagrad = OptimizerConfig::Adagrad(AdagradParams::default());
        let burns_adagrad = AdaGradConfig::new().with_epsilon(1e-10);
        let plain = || model.clone();
        let cases = [
            (
                OptimizerConfig::Adam(adam),
                steps(&mut burns_adam.init(), plain(), 3),
            ),
            (
                OptimizerConfig::AdamW(adam),
                steps(&mut burns_adam_w.init(), plain(), 3),
            ),
            (
                OptimizerConfig::Sgd(sgd),
                steps(&mut burns_sgd.init(), plain(), 3),
            ),
            (plain_sgd, steps(&mut SgdConfig::new().init(), plain(), 3)),
            (adagrad, steps(&mut burns_adagrad.init(), plain(), 3)),
        ];
        for (config, burns) in cases {
            let mut named = optimizer(&config);
            assert_eq!(
                weights(&steps(&mut named, plain(), 3)),
                weights(&burns),
                "{config}"
            );

            let mut named = optimizer(&config);
            let half = steps(&mut named, plain(), 2);
            let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
            let bytes = Recorder::<Train>::record(&recorder, named.to_record(), ()).unwrap();
            let record = Recorder::<Train>::load(&recorder, bytes, &Default::default()).unwrap();
            let mut resumed = optimizer::<Train, _>(&config).load_record(record);
            assert_eq!(
                weights(&steps(&mut resumed, half.clone(), 1)),
                weights(&steps(&mut named, half, 1)),
                "{config}"
            );
        }
    }
}
