//! The wrapper: gradients are summed until a window is complete.

use burn::{
    module::AutodiffModule,
    optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer},
    tensor::{Tensor, backend::AutodiffBackend},
};
use burn_decorator::message::{self, Message};
use burn_decorator::non_finite::{name_some, read_numbers};
use burn_decorator::ranks::SharedFn;

use crate::{
    AccumConfig, AccumError, AccumRecord, NonFinite, Normalization, PartialWindow, UpdateCounter,
    WindowSchedule,
    arrived::{Arrived, Request},
    inspect::{Findings, inspect},
    progress::Dropped,
    sums::AnySums,
    tally::Tally,
};

/// This many windows in a row with all micro-batches dropped stop training.
const PATIENCE: u64 = 100;

/// An optimizer that takes one step a window of micro-batches (optax's `MultiSteps`, Accelerate's `accumulate`).
///
/// ```text
/// step(gradients):
///     if all finite:  sum += gradients;  weight += 1        # Tokens: += items
///     if ++micro_step >= steps:                             # or flush
///         if weight > 0:  inner.step(sum / weight)          # Sum: sum
///         sum, weight, micro_step = 0
/// ```
///
/// Between updates the module is returned unchanged, and the wrapped optimizer is not called. The only exception: before the first
/// micro-step it is called once without gradients, to find which decorators it contains ([`message::describe`]). A parameter
/// without a gradient in some micro-batches of a window contributes zero there; one without any gradient in a window gets none
/// in the update, as without accumulation. With a window of one micro-batch on one device every step is the wrapped
/// optimizer's, bit for bit.
///
/// `step_multi` is one micro-step; each device that brings gradients counts as a micro-batch. Where Burn itself adds up the
/// gradients of several devices (unless its strategy calls `step_multi` without accumulating), [`Normalization::Tokens`] is
/// exact and [`Normalization::Mean`] is not, because the number of micro-batches is unknown.
///
/// The record holds the partial window beside the optimizer's: see [`AccumRecord`]. A clone has its own window and its
/// own optimizer, and shares the [`UpdateCounter`]; a copy for another rank
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
/// [`UnexpectedCount`](AccumError::UnexpectedCount) under `Mean`, [`NothingFinite`](AccumError::NothingFinite) after
/// 100 windows in a row of which all micro-batches were dropped, [`ScalerInside`](AccumError::ScalerInside).
///
/// # Cost
///
/// One f32 copy of the gradients. A micro-step reads each gradient and reads and writes each sum (the first of a
/// window only keeps the gradients); an update reads and writes the sums once more. For the cost of finding non-finite
/// gradients see [`NonFinite`].
#[derive(Clone)]
pub struct MultiSteps<O> {
    inner: O,
    normalization: Normalization,
    schedule: WindowSchedule,
    non_finite: NonFinite,
    tally: Tally,
    sums: AnySums,
    counter: UpdateCounter,
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
        config.validate()?;
        Ok(Self {
            inner,
            normalization: config.normalization,
            schedule: WindowSchedule::Constant(config.steps),
            non_finite: NonFinite::default(),
            tally: Tally::default(),
            sums: AnySums::default(),
            counter: UpdateCounter::default(),
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
        schedule.validate()?;
        self.schedule = schedule;
        Ok(self)
    }

    /// Chooses what happens to a non-finite micro-batch. Default [`NonFinite::Drop`].
    #[must_use]
    pub fn with_non_finite(mut self, non_finite: NonFinite) -> Self {
        self.non_finite = non_finite;
        self
    }

    /// For [`Normalization::Tokens`] with gradients that are reduced over ranks: `items` converts the number of items in a micro-batch
    /// of this rank to the number for the reduced gradients. For a sum over ranks it is the sum, for a mean over ranks the mean, so that
    /// the update is the gradient of all losses of all ranks and micro-batches divided by all their items.
    ///
    /// burn-zero provides it: `MultiSteps::new(zero, config)?.with_items_of_all_ranks(items)`, where `items` is
    /// `zero.items_of_all_ranks()`. It is called once per micro-step, on all ranks.
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
        self.counter.clone()
    }

    /// The length of the current window, in micro-steps.
    pub fn steps(&self) -> u64 {
        self.schedule.steps_at(self.tally.updates)
    }

    /// What the sum of a window is divided by.
    pub fn normalization(&self) -> Normalization {
        self.normalization
    }

    /// The wrapped optimizer.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// Gives the wrapped optimizer back. A partial window is lost: [`flush`](Self::flush) it.
    pub fn into_inner(self) -> O {
        self.inner
    }

    /// Applies the partial window with its true weights, for the end of an epoch or of the training. Nothing happens
    /// if the window is empty. [`flush_request`](crate::flush_request) does the same where the optimizer is out of reach.
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
        let module = match self.tally.window.micro_steps {
            0 => module,
            _ => self.close(lr, module),
        };
        self.counter.publish(self.tally);
        module
    }

    fn advance<B, M>(&mut self, lr: LearningRate, module: M, mut arrived: Arrived) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        message::report(|inside| inside.accumulation = true);
        match message::received() {
            Some(Message::Flush) => return message::answer(|| self.flush(lr, module)),
            Some(_) => return self.inner.step(lr, module, arrived.into_one()),
            None => {}
        }
        match arrived.request::<B::InnerBackend>() {
            Some(Request::Flush) => return self.flush(lr, module),
            Some(Request::Answer) => {
                self.counter.answer();
                return module;
            }
            None => {}
        }
        let module = self.check_order(lr, module);

        let counts = arrived.take_counts::<B::InnerBackend>();
        let micro_batches = arrived.micro_batches();
        raise(self.check_presence(counts.len() as u64, micro_batches));
        let Findings { culprits, counts } = self.examine::<B, M>(&module, &arrived, counts);
        let items = raise(self.check_counts(&counts));
        let items = self.items(items);

        if culprits.is_empty() {
            self.sums.add::<B, M>(&module, arrived);
            self.tally.keep(micro_batches, items);
        } else {
            self.tally.drop(micro_batches);
            self.name_dropped(culprits);
        }
        let module = if self.tally.window.micro_steps >= self.steps() {
            self.close(lr, module)
        } else {
            module
        };
        self.counter.publish(self.tally);
        module
    }

    fn examine<B, M>(
        &self,
        module: &M,
        arrived: &Arrived,
        counts: Vec<Tensor<B::InnerBackend, 1>>,
    ) -> Findings
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        match self.non_finite {
            NonFinite::Drop => inspect::<B, M>(module, arrived, counts),
            NonFinite::Propagate => Findings {
                culprits: Vec::new(),
                counts: read_numbers(counts),
            },
        }
    }

    /// Ends a window that is not empty.
    fn close<B, M>(&mut self, lr: LearningRate, module: M) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let window = self.tally.window;
        if window.micro_batches == 0 {
            self.skip("all of its micro-batches were dropped");
            return module;
        }
        let divisor = raise(self.tally.divisor(self.normalization));
        let update = Arrived::from(self.sums.divide::<B, M>(&module, divisor));

        // One checked micro-batch needs no second check; the sum of several finite ones may overflow.
        if self.non_finite == NonFinite::Propagate || window.micro_batches > 1 {
            let culprits = inspect::<B, M>(&module, &update, Vec::new()).culprits;
            if !culprits.is_empty() {
                let culprits = name_some(&culprits);
                if self.non_finite == NonFinite::Drop {
                    self.skip(&format!("its sum overflowed in {culprits}"));
                    return module;
                }
                let update = self.tally.updates + 1;
                log::warn!("update {update} is non-finite in {culprits}");
            }
        }
        self.tally.applied();
        self.inner.step(lr, module, update.into_one())
    }

    fn skip(&mut self, reason: &str) {
        log::warn!(
            "the window after update {} is skipped: {reason}",
            self.tally.updates
        );
        self.tally.skipped();
        self.counter.publish(self.tally);
        if self.tally.skipped_in_a_row >= PATIENCE {
            let last = self.counter.last_dropped();
            raise(Err(AccumError::NothingFinite {
                windows: self.tally.skipped_in_a_row,
                parameters: last.map(|last| last.parameters).unwrap_or_default(),
            }))
        }
    }

    fn name_dropped(&self, parameters: Vec<String>) {
        let Tally {
            micro_batches,
            updates,
            ..
        } = self.tally;
        log::warn!(
            "micro-batch {micro_batches} is dropped from the window after update {updates}: non-finite gradients in {}",
            name_some(&parameters)
        );
        self.counter.publish_dropped(Some(Dropped {
            micro_batch: micro_batches,
            updates,
            parameters,
        }));
    }

    /// Checks the decorators inside once, if this configuration excludes some.
    fn check_order<B, M>(&mut self, lr: LearningRate, module: M) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let drops = self.non_finite == NonFinite::Drop;
        let own_items =
            self.normalization == Normalization::Tokens && self.items_of_all_ranks.is_none();
        if self.order_checked || !(drops || own_items) {
            return module;
        }
        self.order_checked = true;
        let (module, inside) =
            message::describe(|| self.inner.step(lr, module, GradientsParams::new()));
        let inner = core::any::type_name::<O>();
        if drops && inside.loss_scaler {
            raise(Err(AccumError::ScalerInside { inner }))
        }
        if own_items && inside.ranks {
            raise(Err(AccumError::ItemsOfOneRank { inner }))
        }
        module
    }

    /// Checks that the micro-step has as many counts as this normalization needs.
    fn check_presence(&self, counts: u64, micro_batches: u64) -> Result<(), AccumError> {
        if self.normalization == Normalization::Tokens && counts < micro_batches {
            return Err(AccumError::MissingCount {
                micro_batch: self.tally.micro_batches + 1,
            });
        }
        Ok(())
    }

    /// The weight of a micro-batch with `own` items on this rank.
    fn items(&self, own: f64) -> f64 {
        match (&self.items_of_all_ranks, self.normalization) {
            (Some(of_all_ranks), Normalization::Tokens) => of_all_ranks.call(own),
            (None, Normalization::Tokens) => own,
            (_, Normalization::Mean | Normalization::Sum) => 0.0,
        }
    }

    /// The sum of the counts.
    fn check_counts(&self, counts: &[f64]) -> Result<f64, AccumError> {
        let micro_batch = self.tally.micro_batches + 1;
        for &items in counts {
            if self.normalization == Normalization::Mean {
                return Err(AccumError::UnexpectedCount { micro_batch, items });
            }
            if !items.is_finite() || items < 0.0 {
                return Err(AccumError::InvalidCount { micro_batch, items });
            }
        }
        Ok(counts.iter().sum())
    }
}

/// Panics with the error: neither a step of an optimizer nor Burn's training loop can return one.
pub(crate) fn raise<T>(result: Result<T, AccumError>) -> T {
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
        self.advance(lr, module, grads.into())
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        self.advance(lr, module, grads.into())
    }

    fn to_record(&self) -> Self::Record {
        AccumRecord {
            window: Some(PartialWindow {
                tally: self.tally,
                sums: self.sums.to_sums(),
            }),
            inner: self.inner.to_record(),
        }
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        let window = record.window.unwrap_or_default();
        self.inner = self.inner.load_record(record.inner);
        self.tally = window.tally;
        self.sums = window.sums.into();
        self.counter.publish(self.tally);
        self.counter.publish_dropped(None);
        self
    }
}

impl<O: core::fmt::Debug> core::fmt::Debug for MultiSteps<O> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("MultiSteps")
            .field("inner", &self.inner)
            .field("normalization", &self.normalization)
            .field("schedule", &self.schedule)
            .field("tally", &self.tally)
            .finish_non_exhaustive()
    }
}
