//! The wrapper: gradients are summed until a window is complete.

use std::sync::Arc;

use burn::{
    module::AutodiffModule,
    optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer},
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_decorator::gradient::{
    self, awaits_verdict, decide_on_host, is_left_out, non_finite_on_any_rank, report_verdict,
};
use burn_decorator::message::{self, Message};
use burn_decorator::non_finite::{
    Inspection, Probe, Verdict, name_some, non_finite_paths, read_numbers,
};
use burn_decorator::ranks::SharedFn;

use crate::{
    AccumConfig, AccumError, AccumRecord, NonFinite, Normalization, PartialWindow, UpdateCounter,
    WindowSchedule,
    arrived::Arrived,
    sums::{AnyWindow, Known, Unread},
    tally::{Step, Tally},
};

/// This many windows in a row with all micro-batches dropped stop training.
const PATIENCE: u64 = 100;

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
    normalization: Normalization,
    schedule: WindowSchedule,
    non_finite: NonFinite,
    tally: Tally,
    window: AnyWindow,
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
            window: AnyWindow::default(),
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
        let module = match self.micro_steps::<B::InnerBackend>() {
            0 => module,
            _ => self.close(lr, module, true),
        };
        self.publish::<B::InnerBackend>();
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
                    self.counter.answer();
                }
                let module = self.inner.step(lr, module, arrived.into_one());
                message::report(|inside| (inside.accumulation, inside.checks) = (true, true));
                return module;
            }
            None => {}
        }
        let module = self.check_order(lr, module);

        let counts = arrived.take_counts::<B::InnerBackend>();
        let step = Step {
            micro_batches: arrived.micro_batches(),
            scaled: awaits_verdict(),
        };
        raise(self.check_presence(&counts, step.micro_batches));

        // Other ranks take part in the decision on the host, and gradients may be there; and where
        // a micro-batch is an update, nothing is read twice.
        let alone = self.steps() == 1 && self.micro_steps::<B::InnerBackend>() == 0;
        let verdict = if alone || decide_on_host() || self.items_of_all_ranks.is_some() {
            self.read::<B::InnerBackend>(false);
            self.add_known::<B, M>(&module, arrived, step, counts)
        } else {
            let verdict = match self.drops(step) {
                true => Inspection::new::<B, M>(&module, &arrived, Probe::Exact).into_verdict(),
                false => Verdict::known(Vec::new()),
            };
            let unread = Unread {
                step,
                verdict: verdict.clone(),
                counts,
            };
            let window = self.window.of::<B::InnerBackend>();
            window.add::<B, M>(&module, arrived, Some(unread));
            verdict
        };
        let updates = self.tally.updates;
        let module = match self.micro_steps::<B::InnerBackend>() >= self.steps() {
            true => self.close(lr, module, false),
            false => module,
        };
        report_verdict(verdict, self.tally.updates > updates);
        self.publish::<B::InnerBackend>();
        module
    }

    /// Adds a micro-step after it was read.
    fn add_known<B, M>(
        &mut self,
        module: &M,
        arrived: Arrived,
        step: Step,
        counts: Vec<Tensor<B::InnerBackend, 1>>,
    ) -> Arc<Verdict<B::InnerBackend>>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let (culprits, counts) = match self.drops(step) {
            false => (Vec::new(), read_numbers(counts)),
            true => {
                let sums = Inspection::new::<B, M>(module, &arrived, Probe::Sum);
                let (finite, counts) = sums.is_finite(counts);
                let culprits = match finite {
                    true => Vec::new(),
                    false => non_finite_paths::<B, M>(module, &arrived),
                };
                // All ranks drop a micro-batch, or none: otherwise their parameters would differ.
                (non_finite_on_any_rank(culprits), counts)
            }
        };
        let verdict = Verdict::known(culprits.clone());
        let finite = culprits.is_empty();
        self.count(Known {
            step,
            culprits,
            counts,
        });
        if finite {
            let window = self.window.of::<B::InnerBackend>();
            window.add::<B, M>(module, arrived, None);
        }
        verdict
    }

    /// Whether a micro-step with a non-finite gradient is dropped.
    fn drops(&self, step: Step) -> bool {
        self.non_finite == NonFinite::Drop || step.scaled
    }

    /// Micro-steps in the window, those included that may turn out not to count.
    fn micro_steps<I: Backend>(&mut self) -> u64 {
        self.tally.window.micro_steps + self.window.of::<I>().unread().len() as u64
    }

    /// Reads and counts the micro-steps that have not been read. See
    /// [`Window::read`](crate::sums::Window::read).
    fn read<I: Backend>(&mut self, probe_sums: bool) -> bool {
        let (known, finite) = self.window.of::<I>().read(probe_sums);
        known.into_iter().for_each(|known| self.count(known));
        finite
    }

    fn count(&mut self, known: Known) {
        let items = raise(self.check_counts(&known.counts));
        let (step, culprits) = (&known.step, &known.culprits);
        self.tally.count(step, self.items(items), culprits);
        if let Some(dropped) = self.counter.publish_dropped(self.tally, step, culprits) {
            burn_decorator::warn_user!(
                "micro-batch {} is dropped from the window after update {}: non-finite gradients in {}",
                dropped.micro_batch,
                dropped.updates,
                name_some(&dropped.parameters)
            );
        }
    }

    fn publish<I: Backend>(&mut self) {
        let unread = self.window.of::<I>().unread().iter();
        let unread = unread.map(|unread| (unread.step, unread.verdict.clone() as _));
        let unread = unread.collect();
        self.counter.publish(self.tally, unread);
    }

    /// Ends a window that is not empty; unless it is `flushed`, only if it is complete without what
    /// the loss scaler drops.
    fn close<B, M>(&mut self, lr: LearningRate, module: M, flushed: bool) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        // One checked micro-batch needs no second check; the sum of several finite ones may
        // overflow.
        let unread = self.window.of::<B::InnerBackend>().unread();
        let unread: u64 = unread.iter().map(|unread| unread.step.micro_batches).sum();
        let check =
            self.non_finite == NonFinite::Propagate || self.tally.window.micro_batches + unread > 1;
        let finite = self.read::<B::InnerBackend>(check);
        let window = self.tally.window;
        if window.micro_steps == 0 || !flushed && window.micro_steps < self.steps() {
            return module;
        }
        if window.micro_batches == 0 {
            self.skip("all of its micro-batches were dropped");
            return module;
        }
        let divisor = raise(self.tally.divisor(self.normalization));
        let sums = self.window.of::<B::InnerBackend>();
        let update = Arrived::from(sums.divide::<B, M>(&module, divisor));

        if check {
            // Divided by less than 1 they may overflow too.
            let culprits = match finite && divisor >= 1.0 {
                true => Vec::new(),
                false => non_finite_paths::<B, M>(&module, &update),
            };
            let culprits = non_finite_on_any_rank(culprits);
            if !culprits.is_empty() {
                let culprits = name_some(&culprits);
                if self.non_finite == NonFinite::Drop {
                    self.skip(&format!("its sum overflowed in {culprits}"));
                    return module;
                }
                let update = self.tally.updates + 1;
                burn_decorator::warn_user!("update {update} is non-finite in {culprits}");
            }
        }
        let before = self.tally;
        self.tally.applied();
        let step = || self.inner.step(lr, module, update.into_one());
        let (module, left_out) = is_left_out(step);
        if left_out {
            self.tally = before;
            self.skip("it overflowed in the reduction over ranks");
        }
        module
    }

    fn skip(&mut self, reason: &str) {
        burn_decorator::warn_user!(
            "the window after update {} is skipped: {reason}",
            self.tally.updates
        );
        self.tally.skipped();
        self.counter.publish(self.tally, Vec::new());
        if self.tally.skipped_in_a_row >= PATIENCE {
            let last = self.counter.last_dropped();
            raise(Err(AccumError::NothingFinite {
                windows: self.tally.skipped_in_a_row,
                parameters: last.map(|last| last.parameters).unwrap_or_default(),
            }))
        }
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
        let inner = || message::short_name::<O>();
        if drops && inside.loss_scaler {
            raise(Err(AccumError::ScalerInside { inner: inner() }))
        }
        if own_items && inside.ranks {
            raise(Err(AccumError::ItemsOfOneRank { inner: inner() }))
        }
        module
    }

    /// Checks that the micro-step has as many counts as this normalization needs.
    fn check_presence<I: Backend>(
        &mut self,
        counts: &[Tensor<I, 1>],
        micro_batches: u64,
    ) -> Result<(), AccumError> {
        let is_right = match self.normalization {
            Normalization::Tokens => counts.len() as u64 >= micro_batches,
            Normalization::Mean => counts.is_empty(),
            Normalization::Sum => true,
        };
        if is_right {
            return Ok(());
        }
        // The errors number the micro-batch, so those before it are counted first.
        self.read::<I>(false);
        let micro_batch = self.tally.micro_batches + 1;
        match self.normalization {
            Normalization::Tokens => Err(AccumError::MissingCount { micro_batch }),
            _ => self.check_counts(&read_numbers(counts.to_vec())).map(drop),
        }
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
        gradient::update(|| self.advance(lr, module, grads.into()))
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        gradient::update(|| self.advance(lr, module, grads.into()))
    }

    fn to_record(&self) -> Self::Record {
        let (mut window, mut tally) = (self.window.clone(), self.tally);
        let window = window.of::<B::InnerBackend>();
        for known in window.read(false).0 {
            let items = self.items(known.counts.iter().sum());
            tally.count(&known.step, items, &known.culprits);
        }
        let sums = window.sums();
        AccumRecord {
            window: Some(PartialWindow { tally, sums }),
            inner: self.inner.to_record(),
        }
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        let window = record.window.unwrap_or_default();
        self.inner = self.inner.load_record(record.inner);
        self.tally = window.tally;
        self.window = window.sums.into();
        self.counter.publish(self.tally, Vec::new());
        self.counter.reset_dropped();
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
