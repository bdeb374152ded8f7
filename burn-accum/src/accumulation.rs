//! The state machine of a window: gradients are summed until it is complete. What a loss scaler and
//! ranks decide are arguments.

use std::sync::Arc;

use burn::{
    module::AutodiffModule,
    optim::GradientsParams,
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_decorator::non_finite::{
    Inspection, Probe, Verdict, name_some, non_finite_paths, read_numbers,
};
use burn_update::{Arrived, UpdateError};

use crate::{
    AccumConfig, AccumError, NonFinite, Normalization, UpdateCounter,
    sums::{AnyWindow, Known, Sums, Unread},
    tally::{Step, Tally},
};

/// This many windows in a row with all micro-batches dropped stop training.
const PATIENCE: u64 = 100;

/// The accumulation of a [`burn_update::Update`]: [`AccumConfig`] with the settings and the handle
/// that it lacks (optax's `MultiSteps`, Accelerate's `accumulate`).
///
/// ```text
/// step(gradients):
///     if all finite:  sum += gradients;  weight += 1        # Tokens: += items
///     if ++micro_step >= steps:                             # or flush
///         if weight > 0:  the update continues with sum / weight    # Sum: sum
///         sum, weight, micro_step = 0
/// ```
///
/// Between updates neither parameters nor optimizer change. A parameter without a gradient in some
/// micro-batches of a window contributes zero there; one without any gradient in a window gets none
/// in the update, as without accumulation. With a window of one micro-batch on one device every
/// step is the optimizer's, bit for bit.
///
/// A step with the gradients of several devices is one micro-step; each device that brings
/// gradients counts as a micro-batch. Where Burn itself adds up the gradients of several devices,
/// [`Normalization::Tokens`] is exact and [`Normalization::Mean`] is not, because the number of
/// micro-batches is unknown.
///
/// The record of the update holds the partial window, its sums in f32. Under another window length
/// it is kept: it ends when the new length is reached, or at the next micro-step if it is already
/// exceeded. A clone has its own window, and shares the [`UpdateCounter`]; a copy for another rank
/// ([`copy_for_rank`](burn_decorator::ranks::copy_for_rank)) has its own.
///
/// ```
/// use burn::{backend::Autodiff, nn::Linear, optim::SgdConfig};
/// use burn_accum::{AccumConfig, Accumulation, NonFinite};
/// use burn_update::Update;
///
/// type B = Autodiff<burn_flex::Flex>;
/// let windows = Accumulation::new(AccumConfig::mean(8))?.with_non_finite(NonFinite::Propagate);
/// let counter = windows.updates();
/// let update = Update::<Linear<B>, B>::new(SgdConfig::new().init()).accumulate(windows)?;
/// assert_eq!(counter.updates(), update.updates());
/// # Ok::<(), burn_update::UpdateError>(())
/// ```
///
/// # Errors
///
/// A step fails with an [`AccumError`]: [`MissingCount`](AccumError::MissingCount),
/// [`InvalidCount`](AccumError::InvalidCount), [`NoItems`](AccumError::NoItems) under `Tokens`,
/// [`UnexpectedCount`](AccumError::UnexpectedCount) under `Mean`,
/// [`NothingFinite`](AccumError::NothingFinite) after 100 windows in a row of which all
/// micro-batches were dropped.
///
/// # Cost
///
/// One f32 copy of the gradients. A micro-step reads each gradient and reads and writes each sum
/// (the first of a window only keeps the gradients); an update reads and writes the sums once more.
/// To find non-finite gradients: see [`NonFinite`].
#[derive(Clone)]
pub struct Accumulation {
    normalization: Normalization,
    /// Micro-steps of a window.
    steps: u64,
    non_finite: NonFinite,
    tally: Tally,
    window: AnyWindow,
    counter: UpdateCounter,
    /// Whether the sums of the window have been handed out, and its outcome is awaited.
    is_closed: bool,
}

/// The sums and counters of a window that is not complete.
pub(crate) struct PartialWindow<I: Backend> {
    pub(crate) tally: Tally,
    pub(crate) sums: Sums<I>,
}

/// What others decide of a micro-step.
pub(crate) struct Deciding<'a> {
    /// Whether it is decided on the host at once, because ranks decide together or gradients are
    /// there.
    pub(crate) on_host: bool,
    /// The names of non-finite parameters on any rank, from those of this rank.
    pub(crate) union: &'a dyn Fn(Vec<String>) -> Result<Vec<String>, UpdateError>,
    /// The items that normalize the reduced gradients, from those of this rank.
    pub(crate) items: &'a dyn Fn(f64) -> Result<f64, UpdateError>,
}

impl Accumulation {
    /// An empty window.
    ///
    /// # Errors
    ///
    /// [`AccumError::ZeroSteps`].
    pub fn new(config: AccumConfig) -> Result<Self, AccumError> {
        config.validate()?;
        Ok(Self {
            normalization: config.normalization,
            steps: config.steps as u64,
            non_finite: NonFinite::default(),
            tally: Tally::default(),
            window: AnyWindow::default(),
            counter: UpdateCounter::default(),
            is_closed: false,
        })
    }

    /// Chooses what happens to a non-finite micro-batch. Default [`NonFinite::Drop`].
    #[must_use]
    pub fn with_non_finite(mut self, non_finite: NonFinite) -> Self {
        self.non_finite = non_finite;
        self
    }

    /// A handle to the progress of the training.
    pub fn updates(&self) -> UpdateCounter {
        self.counter.clone()
    }

    /// The length of a window, in micro-steps.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// What the sum of a window is divided by.
    pub fn normalization(&self) -> Normalization {
        self.normalization
    }

    /// Whether non-finite micro-batches are dropped.
    pub(crate) fn drops_non_finite(&self) -> bool {
        self.non_finite == NonFinite::Drop
    }

    /// Adds a micro-step, and returns whether it is finite.
    pub(crate) fn add<B, M>(
        &mut self,
        module: &M,
        arrived: Arrived,
        step: Step,
        counts: Vec<Tensor<B::InnerBackend, 1>>,
        deciding: &Deciding<'_>,
    ) -> Result<Arc<Verdict<B::InnerBackend>>, UpdateError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        self.check_presence(&counts, step.micro_batches, deciding)?;

        // Other ranks take part in the decision on the host, and gradients may be there; and where
        // a micro-batch is an update, nothing is read twice.
        let alone = self.steps() == 1 && self.micro_steps::<B::InnerBackend>() == 0;
        if alone || deciding.on_host {
            self.read::<B::InnerBackend>(false, deciding)?;
            return self.add_known::<B, M>(module, arrived, step, counts, deciding);
        }
        let verdict = if self.drops(step) {
            Inspection::new::<B, M>(module, &arrived, Probe::Exact).into_verdict()
        } else {
            Verdict::known(Vec::new())
        };
        let unread = Unread {
            step,
            verdict: verdict.clone(),
            counts,
        };
        let window = self.window.of::<B::InnerBackend>();
        window.add::<B, M>(module, arrived, Some(unread));
        Ok(verdict)
    }

    /// Adds a micro-step after it was read.
    fn add_known<B, M>(
        &mut self,
        module: &M,
        arrived: Arrived,
        step: Step,
        counts: Vec<Tensor<B::InnerBackend, 1>>,
        deciding: &Deciding<'_>,
    ) -> Result<Arc<Verdict<B::InnerBackend>>, UpdateError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let (culprits, counts) = if self.drops(step) {
            let sums = Inspection::new::<B, M>(module, &arrived, Probe::Sum);
            let (culprits, counts) = sums.culprits::<B, M>(module, &arrived, counts);
            // All ranks drop a micro-batch, or none: otherwise their parameters would differ.
            ((deciding.union)(culprits)?, counts)
        } else {
            (Vec::new(), read_numbers(counts))
        };
        let verdict = Verdict::known(culprits.clone());
        let finite = culprits.is_empty();
        let known = Known {
            step,
            culprits,
            counts,
        };
        self.count(known, deciding)?;
        if finite {
            let window = self.window.of::<B::InnerBackend>();
            window.add::<B, M>(module, arrived, None);
        }
        Ok(verdict)
    }

    /// Whether a micro-step with a non-finite gradient is dropped.
    fn drops(&self, step: Step) -> bool {
        self.drops_non_finite() || step.scaled
    }

    /// Micro-steps in the window, those included that may turn out not to count.
    pub(crate) fn micro_steps<I: Backend>(&mut self) -> u64 {
        self.tally.window.micro_steps + self.window.of::<I>().unread().len() as u64
    }

    /// Reads and counts the micro-steps that have not been read. See
    /// [`Window::read`](crate::sums::Window::read).
    fn read<I: Backend>(
        &mut self,
        probe_sums: bool,
        deciding: &Deciding<'_>,
    ) -> Result<bool, UpdateError> {
        let (known, finite) = self.window.of::<I>().read(probe_sums);
        for known in known {
            self.count(known, deciding)?;
        }
        Ok(finite)
    }

    fn count(&mut self, known: Known, deciding: &Deciding<'_>) -> Result<(), UpdateError> {
        let own = self.check_counts(&known.counts)?;
        let items = match self.normalization {
            Normalization::Tokens => (deciding.items)(own)?,
            Normalization::Mean | Normalization::Sum => 0.0,
        };
        let (step, culprits) = (&known.step, &known.culprits);
        self.tally.count(step, items, culprits);
        if let Some(dropped) = self.counter.publish_dropped(self.tally, step, culprits) {
            burn_decorator::warn_user!(
                "micro-batch {} is dropped from the window after update {}: non-finite gradients in {}",
                dropped.micro_batch,
                dropped.updates,
                name_some(&dropped.parameters)
            );
        }
        Ok(())
    }

    /// Shows the progress to the handles.
    pub(crate) fn publish<I: Backend>(&mut self) {
        let unread = self.window.of::<I>().unread().iter();
        let unread = unread.map(|unread| (unread.step, unread.verdict.clone() as _));
        let unread = unread.collect();
        self.counter.publish(self.tally, unread);
    }

    /// The gradients of the window, divided, if it is complete, or not empty and `flushed`, and its
    /// sum is finite. Then [`applied`](Self::applied) or [`skip`](Self::skip) follows.
    pub(crate) fn close<B, M>(
        &mut self,
        module: &M,
        flushed: bool,
        deciding: &Deciding<'_>,
    ) -> Result<Option<GradientsParams>, UpdateError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let least = if flushed { 1 } else { self.steps() };
        if self.micro_steps::<B::InnerBackend>() < least {
            return Ok(None);
        }
        // One checked micro-batch needs no second check; the sum of several finite ones may
        // overflow.
        let unread = self.window.of::<B::InnerBackend>().unread();
        let unread: u64 = unread.iter().map(|unread| unread.step.micro_batches).sum();
        let check = !self.drops_non_finite() || self.tally.window.micro_batches + unread > 1;
        let finite = self.read::<B::InnerBackend>(check, deciding)?;
        let window = self.tally.window;
        // Without those that the loss scaler dropped.
        if window.micro_steps < least {
            return Ok(None);
        }
        if window.micro_batches == 0 {
            self.skip("all of its micro-batches were dropped")?;
            return Ok(None);
        }
        let divisor = self.tally.divisor(self.normalization)?;
        let sums = self.window.of::<B::InnerBackend>();
        let update = Arrived::from(sums.divide::<B, M>(module, divisor));

        if check {
            // Divided by less than 1 they may overflow too.
            let culprits = if finite && divisor >= 1.0 {
                Vec::new()
            } else {
                non_finite_paths::<B, M>(module, &update)
            };
            let culprits = (deciding.union)(culprits)?;
            if !culprits.is_empty() {
                let culprits = name_some(&culprits);
                if self.drops_non_finite() {
                    self.skip(&format!("its sum overflowed in {culprits}"))?;
                    return Ok(None);
                }
                let update = self.tally.updates + 1;
                burn_decorator::warn_user!("update {update} is non-finite in {culprits}");
            }
        }
        self.is_closed = true;
        Ok(Some(update.into_one()))
    }

    /// Whether [`close`](Self::close) has handed a window out, whose outcome is awaited.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// The window became an update.
    pub(crate) fn applied(&mut self) {
        self.is_closed = false;
        self.tally.applied();
    }

    /// The window became no update.
    ///
    /// # Errors
    ///
    /// [`AccumError::NothingFinite`].
    pub(crate) fn skip(&mut self, reason: &str) -> Result<(), AccumError> {
        burn_decorator::warn_user!(
            "the window after update {} is skipped: {reason}",
            self.tally.updates
        );
        self.is_closed = false;
        self.tally.skipped();
        self.counter.publish(self.tally, Vec::new());
        if self.tally.skipped_in_a_row < PATIENCE {
            return Ok(());
        }
        let last = self.counter.last_dropped();
        Err(AccumError::NothingFinite {
            windows: self.tally.skipped_in_a_row,
            parameters: last.map(|last| last.parameters).unwrap_or_default(),
        })
    }

    /// The window, for a record.
    pub(crate) fn partial<I: Backend>(&self) -> PartialWindow<I> {
        let (mut window, mut tally) = (self.window.clone(), self.tally);
        let window = window.of::<I>();
        // Micro-steps that ranks decide about together have been read and counted.
        for known in window.read(false).0 {
            let items = match self.normalization {
                Normalization::Tokens => known.counts.iter().sum(),
                Normalization::Mean | Normalization::Sum => 0.0,
            };
            tally.count(&known.step, items, &known.culprits);
        }
        let sums = window.sums();
        PartialWindow { tally, sums }
    }

    /// Continues from a record.
    pub(crate) fn restore<I: Backend>(&mut self, window: PartialWindow<I>) {
        self.tally = window.tally;
        self.window = window.sums.into();
        self.is_closed = false;
        self.counter.publish(self.tally, Vec::new());
        self.counter.reset_dropped();
    }

    /// Checks that the micro-step has as many counts as this normalization needs.
    fn check_presence<I: Backend>(
        &mut self,
        counts: &[Tensor<I, 1>],
        micro_batches: u64,
        deciding: &Deciding<'_>,
    ) -> Result<(), UpdateError> {
        let is_right = match self.normalization {
            Normalization::Tokens => counts.len() as u64 >= micro_batches,
            Normalization::Mean => counts.is_empty(),
            Normalization::Sum => true,
        };
        if is_right {
            return Ok(());
        }
        // The errors number the micro-batch, so those before it are counted first.
        self.read::<I>(false, deciding)?;
        let micro_batch = self.tally.micro_batches + 1;
        match self.normalization {
            Normalization::Tokens => Err(AccumError::MissingCount { micro_batch }.into()),
            _ => {
                self.check_counts(&read_numbers(counts.to_vec()))?;
                Ok(())
            }
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

impl core::fmt::Debug for Accumulation {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Accumulation")
            .field("normalization", &self.normalization)
            .field("steps", &self.steps)
            .field("tally", &self.tally)
            .finish_non_exhaustive()
    }
}
