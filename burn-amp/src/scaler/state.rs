//! What a step's outcome does to the scale, the counters and the errors.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use burn::tensor::backend::Backend;
use burn::train::Interrupter;
use burn_decorator::non_finite::{Outcome, Verdict, name_some};
use burn_decorator::ranks::ForRank;
use parking_lot::{Mutex, MutexGuard};

use super::{
    config::GradScalerConfig,
    models::Models,
    overflow::{LossProbe, Overflow, OverflowCause},
    pending::{Pending, Possible},
    registry,
    shared_scale::{SharedScale, Step, UpdateId},
};
use crate::cast::{Lineage, Owner};
use crate::{AmpError, FirstNonFinite, LossScale, LossScaleState, ScaleUpdate};

/// What all handles of one scaler share.
pub(super) struct Shared {
    number: u32,
    state: Mutex<State>,
}

impl Shared {
    pub(super) fn new(state: State) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            state: Mutex::new(state),
        }
    }

    /// Its number among the scalers of the process.
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// A loss of this lineage is differentiated at this scale.
    pub(super) fn found(&self, lineage: Lineage, is_on_own_thread: bool) {
        let is_marked = match lineage {
            Lineage::Trained(owner) => owner == self.owner() || owner == Owner::Several,
            Lineage::Forward | Lineage::Gradient => false,
        };
        self.lock().models.found(is_marked, is_on_own_thread);
    }

    /// Its mark on the parameters that its updates update.
    pub(super) fn owner(&self) -> Owner {
        Owner::Scaler(self.number)
    }

    /// The state as of the last flag that was read. Never waits.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The state as of the last step. Waits for its flag.
    pub(super) fn settled(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        state.settle();
        state
    }
}

impl ForRank for Shared {
    fn for_rank(&self) -> Self {
        Self::new(self.settled().for_rank())
    }
}

/// This many non-finite losses in a row, with no step ever taken, stop training. One or two may be
/// unlucky batches.
const NON_FINITE_LOSS_PATIENCE: u32 = 3;

/// This many skipped steps in a row stop training at a fixed scale, which cannot reach a floor.
const FIXED_SCALE_PATIENCE: u64 = 100;

/// Losses seen since the last step that are kept to explain an overflow: one a micro-batch; the
/// oldest go first.
const MAX_LOSSES: usize = 1024;

/// States that the scale may be in on the device before the host reads which it is.
const MAX_STATES: usize = 1024;

pub(crate) struct State {
    pub(super) scale: SharedScale,
    config: GradScalerConfig,
    pub(super) interrupter: Option<Interrupter>,
    pub(super) counters: Counters,
    pub(super) models: Models,
    pub(super) last_overflow: Option<Overflow>,
    /// What [`explain_overflow`](crate::explain_overflow) has found.
    pub(super) first_non_finite: Option<FirstNonFinite>,
    /// Whether a record with a scale was loaded since the last step.
    is_restored: bool,
    /// The first error; it stays.
    pub(super) error: Option<AmpError>,
    /// The steps whose outcomes have not been recorded yet, the oldest first.
    pending: VecDeque<Pending>,
    /// A [`Possible`] of the training backend while steps are pending.
    possible: Option<Box<dyn Any + Send>>,
    losses: VecDeque<LossProbe>,
    /// The scale of the last backward pass that a step followed. A step without one of its own,
    /// such as a second update's, had it too.
    last_loss_scale: Option<f32>,
}

/// What a record keeps of a [`GradScaler`](crate::GradScaler). The configuration is not in it.
pub(super) struct ScalerState {
    pub(super) loss_scale: LossScaleState,
    pub(super) counters: Counters,
}

/// What has been counted so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counters {
    pub(super) steps: u64,
    pub(super) skipped: u64,
    pub(super) skipped_in_a_row: u64,
    /// Non-finite losses in a row while no step has been taken.
    pub(super) stillborn: u32,
}

impl State {
    pub(super) fn new(config: &GradScalerConfig) -> Self {
        Self {
            scale: SharedScale::new(LossScale::new(config)),
            config: config.clone(),
            interrupter: None,
            counters: Counters::default(),
            models: Models::default(),
            last_overflow: None,
            first_non_finite: None,
            is_restored: false,
            error: None,
            pending: VecDeque::new(),
            possible: None,
            losses: VecDeque::new(),
            last_loss_scale: None,
        }
    }

    /// A copy without a step under way.
    pub(super) fn for_rank(&self) -> Self {
        Self {
            scale: self.scale.clone(),
            interrupter: self.interrupter.clone(),
            counters: self.counters,
            models: self.models.for_rank(),
            last_overflow: self.last_overflow.clone(),
            error: self.error.clone(),
            ..Self::new(&self.config)
        }
    }

    /// Back to the beginning, with the same settings.
    pub(super) fn reset(&mut self) {
        *self = Self {
            interrupter: self.interrupter.take(),
            models: core::mem::take(&mut self.models),
            scale: self.scale.reset(&self.config),
            ..Self::new(&self.config)
        };
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.config.enabled
    }

    /// Adds an update that shares this scale.
    pub(super) fn register(&mut self, update: &UpdateId) {
        self.scale.register(update);
        self.models.register(update);
    }

    /// Whether a loss on a thread of this scaler that no scaler has marked is taken for one of its
    /// own. One that is disabled scales none.
    pub(super) fn awaits_model(&self) -> bool {
        !self.is_enabled() || self.models.awaits()
    }

    /// Likewise, on a thread without a scaler.
    pub(super) fn awaits_model_on_any_thread(&self) -> bool {
        self.is_enabled() && self.models.awaits_on_any_thread()
    }

    /// An update took a step, which `updated` parameters or not.
    pub(super) fn stepped(&mut self, update: &UpdateId, updated: bool) {
        self.models.stepped(update, updated);
    }

    /// The scale of the next loss, as far as the outcomes of the steps are known.
    pub(super) fn scale(&self) -> f32 {
        match self.is_enabled() {
            true => self.scale.loss_scale.scale(),
            false => 1.0,
        }
    }

    pub(super) fn observe(&mut self, loss: LossProbe) {
        if self.losses.len() == MAX_LOSSES {
            self.losses.pop_front();
        }
        self.losses.push_back(loss);
    }

    /// The scale on the device while steps are pending, if `I` is their backend.
    pub(super) fn possible<I: Backend>(&self) -> Option<&Possible<I>> {
        self.possible.as_ref()?.downcast_ref()
    }

    /// Records a step whose outcome the host may not know yet; until it does the scale is on the
    /// device.
    pub(super) fn defer<I: Backend>(&mut self, step: Step, verdict: Arc<Verdict<I>>) {
        let known = self.possible::<I>();
        if known.is_none_or(|possible| possible.states() > MAX_STATES) {
            self.settle();
        }
        self.pending.push_back(Pending {
            step: step.clone(),
            outcome: verdict.clone(),
            losses: core::mem::take(&mut self.losses).into(),
        });
        match verdict.non_finite().filter(|_| !verdict.is_known()) {
            None => self.settle(),
            Some(found_inf) => {
                let after = match self.possible::<I>() {
                    None => Possible::new(&self.scale, &step, found_inf),
                    Some(before) => before.next(&step, found_inf),
                };
                self.possible = Some(Box::new(after));
            }
        }
    }

    /// Records the pending steps whose outcomes the host knows.
    pub(super) fn absorb_known(&mut self) {
        let unknown = self.pending.iter().any(|step| !step.outcome.is_known());
        if !unknown {
            self.settle();
        }
    }

    /// Waits for the outcomes of the pending steps and records them.
    pub(super) fn settle(&mut self) {
        self.possible = None;
        while let Some(pending) = self.pending.pop_front() {
            let culprits = pending.outcome.culprits().to_vec();
            self.absorb(&pending.step, culprits, pending.losses);
        }
    }

    /// Records a step with a known outcome, after those that are pending.
    pub(super) fn record(&mut self, step: &Step, culprits: Vec<String>) {
        self.settle();
        let losses = core::mem::take(&mut self.losses);
        self.absorb(step, culprits, losses.into());
    }

    /// Records a step: it was skipped if there are culprits, the paths of parameters with
    /// non-finite gradients.
    fn absorb(&mut self, step: &Step, culprits: Vec<String>, losses: Vec<LossProbe>) {
        self.counters.steps += 1;
        self.is_restored = false;
        let scale = self.scale.loss_scale.scale();
        if !losses.is_empty() {
            self.last_loss_scale = Some(scale);
        }
        if culprits.is_empty() {
            self.counters.skipped_in_a_row = 0;
            self.counters.stillborn = 0;
            self.scale.step(step, false);
            return;
        }

        let cause = match losses.into_iter().any(LossProbe::found_non_finite) {
            true => OverflowCause::NonFiniteLoss,
            false => OverflowCause::Gradient,
        };
        let overflow = Overflow {
            step: self.counters.steps,
            scale: self.last_loss_scale.unwrap_or(scale),
            parameters: culprits,
            cause,
        };
        let update = self.scale.step(step, true);
        self.count_skip(overflow.cause);
        self.warn(&overflow);
        if let Some(error) = self.fatal(&overflow, update) {
            self.fail(error);
        }
        self.last_overflow = Some(overflow);
    }

    /// Stops training through the interrupter; without one the next step panics.
    pub(super) fn fail(&mut self, error: AmpError) {
        if self.error.is_some() {
            return;
        }
        log::error!("{error}");
        if let Some(interrupter) = &self.interrupter {
            interrupter.stop(Some(&error.to_string()));
        }
        self.error = Some(error);
    }

    pub(super) fn to_record(&self) -> Option<ScalerState> {
        self.is_enabled().then(|| ScalerState {
            loss_scale: self.scale.loss_scale.state(),
            counters: self.counters,
        })
    }

    pub(super) fn load_record(&mut self, saved: Option<ScalerState>) {
        // The record of another update may have held the scale.
        if !self.is_enabled() || saved.is_none() && self.is_restored {
            return;
        }
        self.models.forget();
        self.reset();
        self.is_restored = saved.is_some();
        match saved {
            Some(saved) => {
                self.scale.loss_scale.restore(saved.loss_scale);
                self.counters = saved.counters;
            }
            None => log::info!(
                "the update's record holds no loss scale: it starts from its initial value"
            ),
        }
    }

    fn count_skip(&mut self, cause: OverflowCause) {
        let never_stepped = self.counters.steps == self.counters.skipped + 1;
        self.counters.skipped += 1;
        self.counters.skipped_in_a_row += 1;
        self.counters.stillborn = match cause {
            OverflowCause::NonFiniteLoss if never_stepped => self.counters.stillborn + 1,
            _ => 0,
        };
    }

    fn fatal(&self, overflow: &Overflow, update: ScaleUpdate) -> Option<AmpError> {
        let (step, scale) = (overflow.step, overflow.scale);
        if self.counters.stillborn >= NON_FINITE_LOSS_PATIENCE {
            let attempts = self.counters.stillborn;
            return Some(AmpError::NonFiniteLoss {
                step,
                scale,
                attempts,
            });
        }
        let stuck = !self.config.dynamic && self.counters.skipped_in_a_row >= FIXED_SCALE_PATIENCE;
        (stuck || update == ScaleUpdate::Collapsed).then(|| AmpError::ScaleCollapsed {
            scale,
            step,
            parameters: overflow.parameters.clone(),
            scalers: registry::count_of_thread(),
        })
    }

    fn warn(&self, overflow: &Overflow) {
        let cause = match overflow.cause {
            OverflowCause::Gradient => "gradients overflowed",
            OverflowCause::NonFiniteLoss => "the loss was NaN or infinite before scaling",
        };
        log::warn!(
            "step {} skipped at loss scale {}: {cause}; non-finite gradients in {}; next scale {}",
            overflow.step,
            overflow.scale,
            name_some(&overflow.parameters),
            self.scale.loss_scale.scale(),
        );
    }
}
