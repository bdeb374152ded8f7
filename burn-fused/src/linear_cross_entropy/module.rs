//! The loss as a module.

use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use super::config::LinearCrossEntropyLossConfig;
use super::items::Targets;
use super::{LinearCrossEntropy, linear_cross_entropy};

impl LinearCrossEntropyLossConfig {
    /// Creates the loss.
    ///
    /// # Panics
    ///
    /// If `smoothing` is not between 0 and 1, or `z_loss` negative or not a number.
    pub fn init(&self) -> LinearCrossEntropyLoss {
        self.assert_valid();
        LinearCrossEntropyLoss {
            config: self.clone(),
        }
    }
}

/// [`linear_cross_entropy`] as a module. Created by [`LinearCrossEntropyLossConfig`].
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::backend::Backend;
/// use burn::tensor::{Int, Tensor};
/// use burn_fused::{LinearCrossEntropyLoss, LinearCrossEntropyLossConfig};
///
/// # type Flex = burn_flex::Flex;
/// /// In place of `cross_entropy.forward(head.forward(hidden), targets)`; any backend, with autodiff or without.
/// fn loss<B: Backend>(
///     loss: &LinearCrossEntropyLoss,
///     head: &Linear<B>,
///     hidden: Tensor<B, 3>,
///     targets: Tensor<B, 2, Int>,
/// ) -> Tensor<B, 1> {
///     let bias = head.bias.as_ref().map(|bias| bias.val());
///     loss.forward(hidden.flatten(0, 1), head.weight.val(), bias, targets.flatten::<1>(0, 1))
/// }
/// # let device = Default::default();
/// # let head = LinearConfig::new(4, 5).init::<Flex>(&device);
/// # let config = LinearCrossEntropyLossConfig::new();
/// # let targets = Tensor::<Flex, 2, Int>::from_data([[1, 2]], &device);
/// # assert!(loss(&config.init(), &head, Tensor::ones([1, 2, 4], &device), targets).into_scalar() > 0.0);
/// ```
#[derive(Module, Clone, Debug)]
pub struct LinearCrossEntropyLoss {
    #[module(skip)]
    config: LinearCrossEntropyLossConfig,
}

impl LinearCrossEntropyLoss {
    /// The loss: see [`linear_cross_entropy`].
    ///
    /// # Panics
    ///
    /// As [`linear_cross_entropy`], and where that has an error.
    pub fn forward<B: Backend>(
        &self,
        hidden: Tensor<B, 2>,
        weight: Tensor<B, 2>,
        bias: Option<Tensor<B, 1>>,
        targets: impl Into<Targets<B>>,
    ) -> Tensor<B, 1> {
        self.forward_counted(hidden, weight, bias, targets).loss
    }

    /// The loss with the number of items it counts, for `burn_accum::Counted`: see
    /// [`linear_cross_entropy`].
    ///
    /// # Panics
    ///
    /// As [`linear_cross_entropy`], and where that has an error.
    pub fn forward_counted<B: Backend>(
        &self,
        hidden: Tensor<B, 2>,
        weight: Tensor<B, 2>,
        bias: Option<Tensor<B, 1>>,
        targets: impl Into<Targets<B>>,
    ) -> LinearCrossEntropy<B> {
        linear_cross_entropy(hidden, weight, bias, targets, &self.config)
            .unwrap_or_else(|error| panic!("{error}"))
    }
}
