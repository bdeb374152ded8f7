//! The gathers of sharded parameters: a unit is gathered when an operation uses one of its
//! parameters.
//!
//! All ranks use units in the same order, because they run the same program: each gather is a
//! collective whose label has the unit and the step, so that ranks that differ stop with an error
//! that has both labels. A rank holds two gathered units at most, in host memory: the one that was
//! used last, and the next one by the order of the step before, which is gathered while this one
//! computes. A parameter that steps cast before they use it, as autocast does, is gathered in the
//! type of the cast: each rank casts its shard of it, after the update if that is in host memory,
//! else before the first gather; a shard that does not change once.

use std::sync::Arc;

use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Shape, TensorData};
use burn_backend::tensor::{Device, FloatTensor};
use burn_checkpoint::{Delivery, delivered_in_order};
use burn_ranks::Pending;
use parking_lot::Mutex;

use super::shard::Elements;
use super::units::{Gathered, Unit, Units};
use super::uses::UnitUses;
use super::version::ParameterVersion;
use crate::error::{ZeroError, raise};
use crate::reduce::{GradientReducer, Layout};

/// The gathers of one version of all parameters.
pub(super) struct Gathers {
    layout: Arc<Layout>,
    units: Arc<Units>,
    reducer: Arc<GradientReducer>,
    /// By parameter.
    versions: Arc<[Arc<ParameterVersion>]>,
    /// The step, for labels.
    at: String,
    uses: Mutex<UnitUses>,
    held: Mutex<Held>,
}

/// The gathered units, by number.
#[derive(Default)]
struct Held {
    /// The one that was used last.
    last: Option<(usize, Gathered)>,
    /// The one that is gathered ahead.
    next: Option<(usize, Pending<Gathered, ZeroError>)>,
}

impl Gathers {
    /// Of a model that no step has used.
    pub(super) fn new(
        layout: Arc<Layout>,
        units: Arc<Units>,
        reducer: Arc<GradientReducer>,
        versions: Arc<[Arc<ParameterVersion>]>,
        at: String,
    ) -> Self {
        Self {
            layout,
            units,
            reducer,
            versions,
            at,
            uses: Mutex::default(),
            held: Mutex::default(),
        }
    }

    /// Those of the versions that a step has made. All ranks call it.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(super) fn after_step(
        &self,
        versions: Arc<[Arc<ParameterVersion>]>,
        at: String,
    ) -> Result<Self, ZeroError> {
        let mut uses = self.take_uses();
        uses.end_step(self.units.count_step());
        if uses.agree_on_types(versions.len(), self.reducer.group())? {
            let known = self.layout.parameters().iter().enumerate();
            let low_types = known.map(|(parameter, known)| {
                let low = uses.low_type(parameter);
                low.filter(|_| known.dtype == DType::F32)
            });
            self.units.set_low_types(low_types.collect());
        }
        Ok(self.with(versions, at, uses))
    }

    /// Those of versions that no step has made.
    pub(super) fn of_others(&self, versions: Arc<[Arc<ParameterVersion>]>, at: String) -> Self {
        let mut uses = self.take_uses();
        uses.begin_again();
        self.with(versions, at, uses)
    }

    /// Those of versions that another model uses, beside the one that is trained.
    pub(super) fn beside(&self, versions: Arc<[Arc<ParameterVersion>]>, at: String) -> Self {
        self.with(versions, at, UnitUses::default())
    }

    /// How the model was used so far. Who uses these versions from now on is another model.
    fn take_uses(&self) -> UnitUses {
        std::mem::take(&mut *self.uses.lock())
    }

    fn with(&self, versions: Arc<[Arc<ParameterVersion>]>, at: String, uses: UnitUses) -> Self {
        let (layout, units) = (self.layout.clone(), self.units.clone());
        Self {
            uses: Mutex::new(uses),
            ..Self::new(layout, units, self.reducer.clone(), versions, at)
        }
    }

    pub(super) fn units(&self) -> &Arc<Units> {
        &self.units
    }

    /// A new leaf of a parameter, gathered whenever an operation uses it; `None` if the model has
    /// the parameter no more.
    pub(super) fn leaf<B: AutodiffBackend>(
        self: &Arc<Self>,
        parameter: usize,
        device: &Device<B>,
    ) -> Option<FloatTensor<B>> {
        let own = self.versions[parameter].shard()?;
        match self.low_type(parameter) {
            Some(low) => own.round_on_host(low),
            None => own.forget_rounded(),
        }
        let known = &self.layout.parameters()[parameter];
        let shape = Shape::from(known.shape.clone());
        let gathered = GatheredParameter {
            gathers: self.clone(),
            parameter,
        };
        let place = self.units.place(parameter);
        let leaf = delivered_in_order::<B>(place, shape, known.dtype, device, gathered);
        Some(leaf.expect("`prepare` refuses a backend without `Remat`"))
    }

    /// All parameters, unit by unit, each in its own type. All ranks call it.
    ///
    /// # Errors
    ///
    /// Those of the group, and of `each`.
    pub(super) fn all(&self, mut each: impl FnMut(Gathered)) -> Result<(), ZeroError> {
        for unit in &self.units.all {
            each(self.start(unit, |_| None, &self.at).wait()?);
        }
        Ok(())
    }

    /// Notes that a parameter is cast to this type, and returns whether it is gathered in that
    /// type.
    fn has_type(&self, parameter: usize, dtype: DType) -> bool {
        self.uses.lock().is_cast(parameter, dtype);
        self.low_type(parameter) == Some(dtype)
    }

    /// The type in which a parameter is gathered where a cast uses it, if that is not its own.
    fn low_type(&self, parameter: usize) -> Option<DType> {
        self.units.low_type(parameter)
    }

    /// All elements of a parameter, in its own type or in the one in which it is gathered. Panics
    /// with the error of the group.
    fn get(&self, parameter: usize, dtype: DType) -> TensorData {
        let unit = self.units.of(parameter);
        let low = self.low_type(parameter);
        if low.is_some_and(|low| low != dtype) {
            self.uses.lock().is_used_whole(parameter);
        }
        let mut held = self.held.lock();
        let is_new = held.last.as_ref().is_none_or(|(last, _)| *last != unit);
        if is_new {
            held.last = None; // freed before another unit arrives
            let ahead = held.next.take().filter(|(next, _)| *next == unit);
            held.last = ahead.map(|(_, arriving)| (unit, raise(arriving.wait())));
        }
        let found = held.last.as_ref().map(|(_, unit)| unit[&parameter].dtype);
        if found != Some(dtype) {
            held.last = None;
            // In the agreed types, unless this use is in another one: a cast may outlive the step
            // after which its parameter is gathered in its own type.
            let own = self.layout.parameters()[parameter].dtype;
            let used_in = (dtype != own).then_some(dtype);
            let low_type = |other| {
                if other == parameter {
                    used_in
                } else {
                    self.low_type(other).filter(|_| used_in == low)
                }
            };
            let arriving = self.start(&self.units.all[unit], low_type, &self.at);
            held.last = Some((unit, raise(arriving.wait())));
        }
        if is_new {
            let next = self.uses.lock().next(unit, self.units.steps());
            held.next = next.map(|next| {
                let [this, ahead] = [unit, next].map(|unit| &self.units.all[unit]);
                // Another label than that of a gather for a use, so that ranks which have used
                // different units are refused.
                let at = format!("while unit `{}` computes, {}", this.path, self.at);
                (next, self.start(ahead, |of| self.low_type(of), &at))
            });
        }
        let (_, unit) = held.last.as_ref().expect("it was gathered");
        unit[&parameter].clone()
    }

    /// What [`get`](Self::get) returns now without a call of other ranks, and without a change of
    /// what is expected next.
    fn at_hand(&self, parameter: usize, dtype: DType) -> Option<TensorData> {
        if self.low_type(parameter).is_some_and(|low| low != dtype) {
            return None;
        }
        let held = self.held.try_lock()?;
        let (unit, gathered) = held.last.as_ref()?;
        let data = gathered
            .get(&parameter)
            .filter(|_| *unit == self.units.of(parameter))?;
        (data.dtype == dtype).then(|| data.clone())
    }

    /// Starts to gather a unit, of the parameters that the model has: each in its own type, or
    /// rounded to the one that `low_type` returns.
    fn start(
        &self,
        unit: &Arc<Unit>,
        low_type: impl Fn(usize) -> Option<DType>,
        at: &str,
    ) -> Pending<Gathered, ZeroError> {
        let own = unit.parameters.iter().filter_map(|&parameter| {
            let own = self.versions[parameter].shard()?;
            let own = match low_type(parameter) {
                Some(low) => own.rounded(low),
                None => own.own().clone(),
            };
            Some((parameter, own))
        });
        let (parameters, own): (Vec<_>, Vec<_>) = own.unzip();
        let started = Elements::start_reads(&own);
        let reads = parameters.into_iter().zip(started).collect();
        // Without the group: a job that owns the group which runs it would keep it alive.
        let (layout, unit, at) = (self.layout.clone(), unit.clone(), at.to_owned());
        let work = move |ranks: &mut _| unit.gather(&layout, reads, &at, ranks);
        Pending::start(self.reducer.group(), work)
    }
}

/// A parameter that is gathered when it is used.
struct GatheredParameter {
    gathers: Arc<Gathers>,
    parameter: usize,
}

impl Delivery for GatheredParameter {
    fn data(&self, dtype: DType) -> TensorData {
        self.gathers.get(self.parameter, dtype)
    }

    fn has(&self, dtype: DType) -> bool {
        self.gathers.has_type(self.parameter, dtype)
    }

    fn at_hand(&self, dtype: DType) -> Option<TensorData> {
        self.gathers.at_hand(self.parameter, dtype)
    }
}
