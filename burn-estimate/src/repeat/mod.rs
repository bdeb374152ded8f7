//! The step of a deep model from those of two that have fewer of the same blocks.
//!
//! The recordings of models with `n` and with `n + 1` blocks are compared event by event
//! ([`events`]). Where the second one has more, it runs one block more: there is a *pass*, which
//! repeats the same events for each block ([`passes`]). A block that is like those
//! beside it is copied in each pass ([`copies`]), so that peaks, pools and times are those of the recording of a deep model.

mod copies;
mod events;
mod passes;

use std::sync::Arc;

use crate::estimate::Estimate;
use crate::shares::Shares;

use copies::Copies;
use events::Events;
use passes::Passes;

impl Estimate {
    /// The same step of a model that has `more` blocks more than this one's. `fewer` is the step of
    /// the model with one block less. `None` if the steps are not alike but for a block, or the
    /// blocks in the middle are not alike: then the deep model has to be run.
    ///
    /// Both estimates are those of runs, not [`shared`](Self::shared) ones. Their models need about
    /// eight blocks: the first ones and the last ones may differ from those in the middle. A kind of
    /// block that only the deep model has, such as another attention in every twelfth, is not
    /// noticed.
    ///
    /// ```
    /// use burn::backend::Autodiff;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
    /// use burn::tensor::Tensor;
    /// use burn_estimate::{Estimate, Meta, MetaDevice, estimate_on};
    ///
    /// type B = Autodiff<Meta>;
    ///
    /// fn of_blocks(blocks: usize) -> Estimate {
    ///     let device = MetaDevice::new(8);
    ///     let block = || LinearConfig::new(64, 64).init::<B>(&device);
    ///     let model: Vec<_> = std::iter::repeat_with(block).take(blocks).collect();
    ///     let mut adam = AdamWConfig::new().init::<B, Vec<Linear<B>>>();
    ///     let step = |model: Vec<Linear<B>>| {
    ///         let x = Tensor::<B, 2>::zeros([16, 64], &device);
    ///         let x = model.iter().fold(x, |x, block| block.forward(x).tanh());
    ///         let gradients = GradientsParams::from_grads(x.mean().backward(), &model);
    ///         adam.step(1e-3, model, gradients)
    ///     };
    ///     estimate_on::<B, _>(device, model, step).0
    /// }
    ///
    /// let deep = of_blocks(7).with_more_blocks(&of_blocks(6), 73).expect("the blocks are alike");
    /// assert_eq!(deep.peak_bytes, of_blocks(80).peak_bytes);
    /// ```
    pub fn with_more_blocks(&self, fewer: &Self, more: usize) -> Option<Self> {
        let is_run = |estimate: &Self| estimate.shares == Shares::NONE;
        if !is_run(self) || !is_run(fewer) {
            return None;
        }
        let events = Events::of(&self.recording);
        let growth = events.grown_from(&Events::of(&fewer.recording))?;
        let passes = Passes::new(&self.recording, &events, &growth.repeats)?;
        let storages = |estimate: &Self| estimate.recording.storages.len();
        let grown = storages(self).checked_sub(storages(fewer))?;
        let copies = Copies::new(&self.recording, &passes, grown, more)?;
        let mut recording = copies.recording();
        let more = more as u64;
        events.grow(&growth, &fewer.recording, &mut recording, more);
        let linear = |this: u64, fewer: u64| this + more * this.saturating_sub(fewer);
        let trained_bytes = self.recording.trained_bytes;
        recording.trained_bytes = trained_bytes
            .zip(fewer.recording.trained_bytes)
            .map(|(this, fewer)| linear(this, fewer));
        Some(Self {
            sent_bytes: linear(self.sent_bytes, fewer.sent_bytes),
            replayed_operations: linear(self.replayed_operations, fewer.replayed_operations),
            searched_tensors: linear(self.searched_tensors, fewer.searched_tensors),
            host_bytes: linear(self.host_bytes, fewer.host_bytes),
            ..Self::of(Arc::new(recording), Shares::NONE)
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Autodiff;
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{GradientsParams, Optimizer, SgdConfig};
    use burn::tensor::Tensor;

    use super::*;
    use crate::{Meta, MetaDevice, estimate_on};

    type B = Autodiff<Meta>;

    /// The step of a model, every third block of which has another activation if it is `uneven`.
    fn of_blocks(blocks: usize, uneven: bool) -> Estimate {
        let device = MetaDevice::new(9);
        let block = || LinearConfig::new(64, 64).init::<B>(&device);
        let model: Vec<_> = std::iter::repeat_with(block).take(blocks).collect();
        let mut sgd = SgdConfig::new().init::<B, Vec<Linear<B>>>();
        let step = |model: Vec<Linear<B>>| {
            let x = Tensor::<B, 2>::zeros([16, 64], &device);
            let blocks = model.iter().enumerate();
            let y = blocks.fold(x, |x, (number, block)| {
                let y = block.forward(x);
                if uneven && number % 3 == 0 {
                    y.exp().sin()
                } else {
                    y.tanh()
                }
            });
            let gradients = GradientsParams::from_grads(y.mean().backward(), &model);
            sgd.step(1e-3, model, gradients)
        };
        estimate_on::<B, _>(device, model, step).0
    }

    #[test]
    fn what_is_not_alike_is_not_repeated() {
        let (few, fewer) = (of_blocks(7, false), of_blocks(6, false));
        let deep = few.with_more_blocks(&fewer, 13).expect("alike");
        assert_eq!(deep.peak_bytes, of_blocks(20, false).peak_bytes);
        assert!(few.with_more_blocks(&few, 13).is_none(), "no block more");
        assert!(fewer.with_more_blocks(&few, 13).is_none(), "a block less");
        for blocks in [6, 7, 8] {
            let (few, fewer) = (of_blocks(blocks + 1, true), of_blocks(blocks, true));
            assert!(few.with_more_blocks(&fewer, 13).is_none(), "{blocks}");
        }
        let shared = few.shared(Shares {
            offload: true,
            ..Shares::NONE
        });
        assert!(shared.with_more_blocks(&fewer, 13).is_none(), "no run");
    }
}
