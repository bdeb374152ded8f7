//! The wrapper: gradients are summed until a window is complete.

use burn::{
    module::AutodiffModule,
    optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer},
    tensor::backend::AutodiffBackend,
};
use burn_decorator::gradient::{
    self, awaits_verdict, decide_on_host, is_left_out, non_finite_on_any_rank, report_verdict,
};
use burn_decorator::message::{self, Message};
use burn_decorator::ranks::SharedFn;
use burn_update::Arrived;

use crate::{
    AccumConfig, AccumError, AccumRecord, NonFinite, Normalization, UpdateCounter, WindowSchedule,
    accumulation::{Accumulation, Deciding},
    tally::Step,
};

/// An optimizer that takes one step a window of micro-batches (optax's `MultiSteps`, Accelerate's
/// `accumulate`).
///
/// ```text
/// step(gradients):
///     if all finite:  sum += gradients;  weight += 1        # Tokens: += items
///     if ++micro_step >= steps:                             # or flush
///         if weight > 0:  inner.step(sum / weight)          # Sum: sum
///         sum, weight, micro_step = 0
/// ```
///
/// Between updates the module is returned unchanged, and the wrapped optimizer is not called. The
/// only exception: before the first micro-step it is called once without gradients, to find which
/// decorators it contains ([`message::describe`]). A parameter without a gradient in some
/// micro-batches of a window contributes zero there; one without any gradient in a window gets none
/// in the update, as without accumulation. With a window of one micro-batch on one device every
/// step is the wrapped optimizer's, bit for bit.
///
/// `step_multi` is one micro-step; each device that brings gradients counts as a micro-batch. Where
/// Burn itself adds up the gradients of several devices (unless its strategy calls `step_multi`
/// without accumulating), [`Normalization::Tokens`] is exact and [`Normalization::Mean`] is not,
/// because the number of micro-batches is unknown.
///
/// The record holds the partial window beside the optimizer's: see [`AccumRecord`]. A clone has its
/// own window and its own optimizer, and shares the [`UpdateCounter`]; a copy for another rank
/// ([`copy_for_rank`](burn_decorator::ranks::copy_for_rank)) has its own.
///
/// ```
/// use burn::{backend::Autodiff, module::Param, optim::{GradientsParams, Optimizer, SgdConfig}, prelude::*};
/// use burn_accum::{AccumConfig, MultiSteps};
///
/// type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let mut model = nn::LinearConfig::new(1, 1).with_bias(false).init::<B>(&device);
/// model.weight = Param::from_data([[1.0]], &device);
///
/// let mut optimizer = MultiSteps::new(SgdConfig::new().init(), AccumConfig::mean(2))?;
/// for (x, expected) in [(1.0, 1.0), (3.0, 0.8)] {
///     let loss = model.forward(Tensor::<B, 2>::full([1, 1], x, &device)).sum(); // d loss / d weight = x
///     let gradients = GradientsParams::from_grads(loss.backward(), &model);
///     model = optimizer.step(0.1, model, gradients);
///     assert_eq!(model.weight.val().into_scalar(), expected); // 1 - 0.1 (1 + 3) / 2
/// }
/// # Ok::<(), burn_accum::AccumError>(())
/// ```
///
/// # Panics
///
/// A step panics with the message of an [`AccumError`]: [`MissingCount`](AccumError::MissingCount),
/// [`InvalidCount`](AccumError::InvalidCount), [`NoItems`](AccumError::NoItems) under `Tokens`,
/// [`ItemsOfOneRank`](AccumError::ItemsOfOneRank) under `Tokens`,
/// [`UnexpectedCount`](AccumError::UnexpectedCount) under `Mean`,
/// [`NothingFinite`](AccumError::NothingFinite) after 100 windows in a row of which all
/// micro-batches were dropped, [`ScalerInside`](AccumError::ScalerInside).
///
/// # Cost
///
/// One f32 copy of the gradients. A micro-step reads each gradient and reads and writes each sum
/// (the first of a window only keeps the gradients); an update reads and writes the sums once more.
/// To find non-finite gradients: see [`NonFinite`].
#[derive(Clone)]
pub struct MultiSteps<O> {
    inner: O,
    accumulation: Accumulation,
    /// Converts the items of this rank's micro-batch to those that normalize its reduced gradients.
    items_of_all_ranks: Option<SharedFn<f64, f64>>,
    /// Whether the decorators inside of the wrapped optimizer have been checked.
    order_checked: bool,
}

impl<O> MultiSteps<O> {
    /// Wraps `inner`, with an empty window.
    ///
    /// # Errors
    ///
    /// [`AccumError::ZeroSteps`].
    pub fn new(inner: O, config: AccumConfig) -> Result<Self, AccumError> {
        Ok(Self {
            inner,
            accumulation: Accumulation::new(config)?,
            items_of_all_ranks: None,
            order_checked: false,
        })
    }

    /// Chooses another length for each window, instead of [`AccumConfig::steps`].
    ///
    /// # Errors
    ///
    /// [`AccumError::InvalidSchedule`], [`AccumError::ZeroSteps`].
    pub fn with_schedule(mut self, schedule: WindowSchedule) -> Result<Self, AccumError> {
        self.accumulation = self.accumulation.with_schedule(schedule)?;
        Ok(self)
    }

    /// Chooses what happens to a non-finite micro-batch. Default [`NonFinite::Drop`].
    #[must_use]
    pub fn with_non_finite(mut self, non_finite: NonFinite) -> Self {
        self.accumulation = self.accumulation.with_non_finite(non_finite);
        self
    }

    /// For [`Normalization::Tokens`] with gradients that are reduced over ranks: `items` converts
    /// the number of items in a micro-batch of this rank to the number for the reduced gradients.
    /// For a sum over ranks it is the sum, for a mean over ranks the mean, so that the update is
    /// the gradient of all losses of all ranks and micro-batches divided by all their items.
    ///
    /// burn-zero provides it: `MultiSteps::new(zero, config)?.with_items_of_all_ranks(items)`,
    /// where `items` is `zero.items_of_all_ranks()`. It is called once per micro-step, on all
    /// ranks.
    #[must_use]
    pub fn with_items_of_all_ranks(
        mut self,
        items: impl Fn(f64) -> f64 + Clone + Send + Sync + 'static,
    ) -> Self {
        self.items_of_all_ranks = Some(SharedFn::new(items));
        self
    }

    /// A handle to the progress of the training, also when the optimizer is owned by the Learner.
    pub fn updates(&self) -> UpdateCounter {
        self.accumulation.updates()
    }

    /// The length of the current window, in micro-steps.
    pub fn steps(&self) -> u64 {
        self.accumulation.steps()
    }

    /// What the sum of a window is divided by.
    pub fn normalization(&self) -> Normalization {
        self.accumulation.normalization()
    }

    /// The wrapped optimizer.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// Gives the wrapped optimizer back. A partial window is lost: [`flush`](Self::flush) it.
    pub fn into_inner(self) -> O {
        self.inner
    }

    /// Applies the partial window with its true weights, for the end of an epoch or of the
    /// training. Nothing happens if the window is empty. [`flush`](crate::flush()) does the same
    /// where the optimizer is out of reach.
    ///
    /// # Panics
    ///
    /// As a step.
    pub fn flush<B, M>(&mut self, lr: LearningRate, module: M) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let module = self.close(lr, module, true);
        self.accumulation.publish::<B::InnerBackend>();
        module
    }

    fn advance<B, M>(&mut self, lr: LearningRate, module: M, mut arrived: Arrived) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        match message::received() {
            Some(Message::Flush) => return message::answer(|| self.flush(lr, module)),
            Some(message) => {
                if message == Message::Describe {
                    self.accumulation.updates().answer();
                }
                let module = self.inner.step(lr, module, arrived.into_one());
                message::report(|inside| (inside.accumulation, inside.checks) = (true, true));
                return module;
            }
            None => {}
        }
        let module = self.check_order(lr, module);

        let counts = arrived.take_items::<B::InnerBackend>();
        let step = Step {
            micro_batches: arrived.micro_batches(),
            scaled: awaits_verdict(),
        };
        let accumulation = &mut self.accumulation;
        let added = with_ranks(&self.items_of_all_ranks, |deciding| {
            accumulation.add::<B, M>(&module, arrived, step, counts, deciding)
        });
        let verdict = raise(added);
        let updates = self.accumulation.updates_so_far();
        let module = self.close(lr, module, false);
        report_verdict(verdict, self.accumulation.updates_so_far() > updates);
        self.accumulation.publish::<B::InnerBackend>();
        module
    }

    /// Ends a window that is not empty; unless it is `flushed`, only if it is complete without what
    /// the loss scaler drops.
    fn close<B, M>(&mut self, lr: LearningRate, module: M, flushed: bool) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let accumulation = &mut self.accumulation;
        let update = with_ranks(&self.items_of_all_ranks, |deciding| {
            accumulation.close::<B, M>(&module, flushed, deciding)
        });
        let Some(update) = raise(update) else {
            return module;
        };
        let (module, left_out) = is_left_out(|| self.inner.step(lr, module, update));
        if left_out {
            raise(
                self.accumulation
                    .skip("it overflowed in the reduction over ranks"),
            );
        } else {
            self.accumulation.applied();
        }
        module
    }

    /// Checks the decorators inside once, if this configuration excludes some.
    fn check_order<B, M>(&mut self, lr: LearningRate, module: M) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let drops = self.accumulation.drops_non_finite();
        let own_items =
            self.normalization() == Normalization::Tokens && self.items_of_all_ranks.is_none();
        if self.order_checked || !(drops || own_items) {
            return module;
        }
        self.order_checked = true;
        let (module, inside) =
            message::describe(|| self.inner.step(lr, module, GradientsParams::new()));
        let inner = || message::short_name::<O>();
        if drops && inside.loss_scaler {
            raise(Err::<(), _>(AccumError::ScalerInside { inner: inner() }))
        }
        if own_items && inside.ranks {
            raise(Err::<(), _>(AccumError::ItemsOfOneRank { inner: inner() }))
        }
        module
    }
}

/// Applies the partial window of a [`MultiSteps`] that is out of reach, inside of Burn's `Learner`
/// or of other wrappers, as [`MultiSteps::flush`] does. `step` is a step of the outermost optimizer
/// with the gradients that it is given, which are none; without a `MultiSteps` in it nothing
/// happens.
///
/// ```
/// use burn::{backend::Autodiff, optim::{Optimizer, SgdConfig}, prelude::*};
/// use burn_accum::{AccumConfig, MultiSteps, flush};
///
/// type B = Autodiff<burn_flex::Flex>;
/// let model = nn::LinearConfig::new(4, 2).init::<B>(&Default::default());
/// let mut optimizer = MultiSteps::new(SgdConfig::new().init(), AccumConfig::mean(8))?;
///
/// // flush(|nothing| learner.optimizer_step(nothing));
/// let model: nn::Linear<B> = flush(|nothing| optimizer.step(1e-3, model, nothing));
/// # let _ = model;
/// # Ok::<(), burn_accum::AccumError>(())
/// ```
pub fn flush<R>(step: impl FnOnce(GradientsParams) -> R) -> R {
    message::send(Message::Flush, || step(GradientsParams::new()))
}

/// Runs `decide` with what the ranks of this thread decide, if there are any.
fn with_ranks<R>(
    items_of_all_ranks: &Option<SharedFn<f64, f64>>,
    decide: impl FnOnce(&Deciding<'_>) -> R,
) -> R {
    decide(&Deciding {
        on_host: decide_on_host() || items_of_all_ranks.is_some(),
        union: &|names| Ok(non_finite_on_any_rank(names)),
        items: &|own| {
            let items = items_of_all_ranks.as_ref();
            Ok(items.map_or(own, |items| items.call(own)))
        },
    })
}

/// Panics with the error: neither a step of an optimizer nor Burn's training loop can return one.
pub(crate) fn raise<T, E: core::fmt::Display>(result: Result<T, E>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

impl<O, M, B> Optimizer<M, B> for MultiSteps<O>
where
    O: Optimizer<M, B>,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    type Record = AccumRecord<O::Record, B::InnerBackend>;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        gradient::update(|| self.advance(lr, module, grads.into()))
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        gradient::update(|| self.advance(lr, module, grads.into()))
    }

    fn to_record(&self) -> Self::Record {
        AccumRecord {
            window: Some(self.accumulation.partial()),
            inner: self.inner.to_record(),
        }
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        self.inner = self.inner.load_record(record.inner);
        self.accumulation
            .restore::<B::InnerBackend>(record.window.unwrap_or_default());
        self
    }
}

impl<O: core::fmt::Debug> core::fmt::Debug for MultiSteps<O> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("MultiSteps")
            .field("inner", &self.inner)
            .field("accumulation", &self.accumulation)
            .finish_non_exhaustive()
    }
}
