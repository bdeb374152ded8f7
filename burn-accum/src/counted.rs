//! The number of items is passed with the gradients that came from them, as one more entry of the
//! container.

use burn::{
    module::{AutodiffModule, Module, Param},
    optim::GradientsParams,
    tensor::{
        DType, Device, FloatDType, Int, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
    train::TrainOutput,
};

use burn_decorator::weight::{LossWeight, offer};
use burn_update::items_id;

/// An f32 `[1]`, whatever the device's default float is.
pub(crate) fn constant<I: Backend>(value: f64, device: &Device<I>) -> Tensor<I, 1> {
    Tensor::from_data(TensorData::from([value as f32]), (device, DType::F32))
}

/// A loss and the number of items (tokens) it counts, for
/// [`Normalization::Tokens`](crate::Normalization::Tokens).
///
/// It replaces the last line of `TrainStep::step`. The gradients become those of the loss *sum*,
/// and the number of items is an entry of the same `GradientsParams`, so it cannot be separated
/// from them on the way through worker threads and channels. Burn's own accumulators
/// rebuild `GradientsParams` from the module's parameters; they keep the number only if the module
/// has a [`CountSlot`].
///
/// ```
/// use burn::{backend::Autodiff, nn::loss::{MseLoss, Reduction}, optim::SgdConfig, prelude::*};
/// use burn_accum::{AccumConfig, Counted};
/// use burn_update::Update;
///
/// type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let model = nn::LinearConfig::new(3, 1).init::<B>(&device);
/// let mut update = Update::new(SgdConfig::new().init()).accumulate(AccumConfig::tokens(2))?;
///
/// let mut trained = model.clone();
/// for rows in [5, 2] {
///     let targets = Tensor::<B, 2>::zeros([rows, 1], &device);
///     let output = trained.forward(Tensor::<B, 2>::ones([rows, 3], &device));
///     let loss = MseLoss::new().forward(output.clone(), targets, Reduction::Mean);
///
///     // TrainOutput::new(self, loss.backward(), output)
///     let step = Counted::mean(loss, rows).output(&trained, output);
///     trained = update.step(0.1, trained, step.grads)?;
/// }
/// assert_eq!(update.updates(), 1);
/// # Ok::<(), burn_update::UpdateError>(())
/// ```
///
/// The count may be a tensor, so that counting the unpadded tokens of a batch needs no host read of
/// its own: it is read together with the check for non-finite gradients. As f32 it is exact up to 16.7
/// million items per micro-batch.
pub struct Counted<B: AutodiffBackend> {
    loss_sum: Tensor<B, 1>,
    /// f32 `[1]`
    items: Tensor<B::InnerBackend, 1>,
    /// Whether the loss was multiplied by `items`.
    weights: bool,
}

impl<B: AutodiffBackend> Counted<B> {
    /// `loss` is the mean over `items`: what it was divided by. Burn's losses divide by all rows,
    /// `CrossEntropyLoss` with `pad_tokens` too, padding included; for a mean over the other
    /// targets give [`Self::sum`] the sum of their losses, or take burn-checkpoint's
    /// `LinearCrossEntropyLoss`. It is multiplied with the number before backward, because ranks
    /// that reduce gradients during backward must weight their own before. A decorator that scales
    /// the loss divides by the number again and weights the f32 gradients, so that the number takes
    /// none of f16's range.
    pub fn mean(loss: Tensor<B, 1>, items: impl Items<B>) -> Self {
        let items = items.into_tensor(&loss.device());
        let factor = Tensor::from_inner(items.clone().cast(loss.dtype()));
        Self {
            loss_sum: loss * factor,
            items,
            weights: true,
        }
    }

    /// `loss` is the sum over `items`.
    pub fn sum(loss: Tensor<B, 1>, items: impl Items<B>) -> Self {
        Self {
            items: items.into_tensor(&loss.device()),
            loss_sum: loss,
            weights: false,
        }
    }

    /// Differentiates, for one's own training loop: the gradients for `Update::step`.
    pub fn backward<M: AutodiffModule<B>>(self, module: &M) -> GradientsParams {
        self.output(module, ()).grads
    }

    /// Differentiates, for the `Learner`: the last line of `TrainStep::step`.
    pub fn output<M: AutodiffModule<B>, T>(self, module: &M, item: T) -> TrainOutput<T> {
        let backward = || self.loss_sum.backward();
        let gradients = if self.weights {
            let items = self.items.clone().into_primitive().tensor();
            offer(LossWeight(items), backward).0
        } else {
            backward()
        };
        let mut output = TrainOutput::new(module, gradients, item);
        output.grads.register(items_id(), self.items);
        output
    }
}

/// A number of items: an integer, a float (weights need not be whole), or a tensor of one element,
/// integer or float.
pub trait Items<B: AutodiffBackend> {
    /// As f32 `[1]` on `device`.
    fn into_tensor(self, device: &Device<B>) -> Tensor<B::InnerBackend, 1>;
}

macro_rules! number_of_items {
    ($($number:ty),*) => {$(
        impl<B: AutodiffBackend> Items<B> for $number {
            fn into_tensor(self, device: &Device<B>) -> Tensor<B::InnerBackend, 1> {
                constant(self as f64, device)
            }
        }
    )*};
}

number_of_items!(usize, u32, u64, i32, i64, f32, f64);

impl<B: AutodiffBackend> Items<B> for Tensor<B, 1> {
    fn into_tensor(self, device: &Device<B>) -> Tensor<B::InnerBackend, 1> {
        self.inner().cast(DType::F32).to_device(device)
    }
}

impl<B: AutodiffBackend> Items<B> for Tensor<B, 1, Int> {
    fn into_tensor(self, device: &Device<B>) -> Tensor<B::InnerBackend, 1> {
        // Not through `float()`, the device's default type: bf16 holds whole numbers only up to 256.
        self.inner().cast(FloatDType::F32).to_device(device)
    }
}

/// A parameter for the count in a model, only needed for training with several devices or with
/// Burn's own `grads_accumulation`: those pass on only gradients of the module's parameters. They
/// add up the counts like gradients, as needed.
///
/// Its value is 0, and it is neither trained nor used.
///
/// ```
/// use burn::{nn::Linear, prelude::*};
/// use burn_accum::CountSlot;
///
/// #[derive(Module, Debug)]
/// struct Model<B: Backend> {
///     linear: Linear<B>,
///     count: CountSlot<B>, // CountSlot::new(device)
/// }
/// ```
#[derive(Module, Debug)]
pub struct CountSlot<B: Backend> {
    slot: Param<Tensor<B, 1>>,
}

impl<B: Backend> CountSlot<B> {
    /// A slot on `device`. A model has one.
    pub fn new(device: &B::Device) -> Self {
        let nothing = Tensor::zeros([1], device);
        Self {
            slot: Param::initialized(items_id(), nothing),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::{
        backend::Autodiff,
        tensor::{DType, Int, Tensor, set_default_dtypes},
    };

    use super::Items;

    /// The default is set for the whole process, and only before its first tensor: no other test of
    /// the library makes one.
    #[test]
    fn an_integer_count_is_not_rounded_to_the_default_float() {
        type B = Autodiff<burn_flex::Flex>;
        let device = Default::default();
        set_default_dtypes::<B>(&device, DType::BF16, DType::I64).unwrap();
        let items = Tensor::<B, 1, Int>::from_data([1237], &device);
        let items = items.into_tensor(&device).into_data();
        assert_eq!(items, [1237.0_f32].into());
    }
}
