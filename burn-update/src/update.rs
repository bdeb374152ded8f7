//! The pipeline.

use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, LearningRate, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn_decorator::gradient;
use burn_decorator::non_finite::{Inspection, Probe, Verdict};

use crate::arrived::Request;
use crate::average::AVERAGE;
use crate::part::Slot;
use crate::progress::{AnyModule, Served};
use crate::step::{HalfPrecision, StepOutcome};
use crate::{
    Accumulate, Arrived, Average, AverageConfig, BurnOptimizer, Groups, IntoAccumulate, IntoScale,
    LoopRequest, Loss, Optimize, Parameter, Part, PerUpdate, Scale, Stateful, Step, UpdateError,
    UpdateProgress,
};

/// An update of a model: scale, accumulate, your own parts, clip, optimizer, average, always in this
/// order, each optional but the optimizer.
///
/// ```text
/// step(gradients):
///     accumulate:  sum += gradients if they are finite;  wait until the window is complete
///     scale:       without an accumulation: skip the step if a gradient is not finite
///     parts:       gradients = part(gradients), in the order in which they were added
///     clip:        gradients *= min(1, max_norm / norm)
///     optimizer:   parameters = optimizer(parameters, gradients)
///     parts:       look at the updated model (the average of the weights)
///     scale:       the outcome moves the scale
/// ```
///
/// The order of the methods that add parts does not matter. What one part must know of another is
/// a value of the [`Step`].
///
/// ```
/// use burn::{backend::Autodiff, optim::AdamWConfig, prelude::*};
/// use burn_accum::{AccumConfig, ClipByNorm};
/// use burn_amp::{Autocast, F16, GradScalerConfig};
/// use burn_update::Update;
///
/// type B = Autocast<Autodiff<burn_flex::Flex>, F16>;
/// let device = Default::default();
/// let mut model = nn::LinearConfig::new(4, 2).init::<B>(&device);
///
/// let mut update = Update::new(AdamWConfig::new().init())
///     .clip_norm(1.0)?
///     .accumulate(AccumConfig::mean(2))?
///     .scale(GradScalerConfig::default())?;
///
/// for _ in 0..4 {
///     let loss = model.forward(Tensor::<B, 2>::ones([8, 4], &device)).powi_scalar(2).mean();
///     let gradients = update.backward(&model, loss);
///     model = update.step(1e-3, model, gradients)?;
/// }
/// model = update.flush(1e-3, model)?; // the end of an epoch: a window that is open
/// assert_eq!(update.updates(), 2);
/// # let _ = model;
/// # Ok::<(), burn_update::UpdateError>(())
/// ```
///
/// It is an `Optimizer`, so that Burn's `Learner` takes it in place of one:
/// `Learner::new(model, update, schedule)`, with [`update.strategy()`](Self::strategy) for the
/// training loop. There `TrainStep::step` calls `loss.backward()` as always, and an error is a
/// panic.
///
/// A clone has its own state, and shares the handles that its parts were made from, such as a
/// `GradScaler`, and its [`progress`](Self::progress).
pub struct Update<M: AutodiffModule<B> + 'static, B: AutodiffBackend> {
    scale: Option<Slot<dyn Scale<B>>>,
    inside: Pipeline<M, B>,
    /// Whether the optimizer has seen the model.
    is_prepared: bool,
    progress: UpdateProgress,
}

/// What runs inside of the scale.
pub(crate) struct Pipeline<M: AutodiffModule<B> + 'static, B: AutodiffBackend> {
    accumulate: Option<Slot<dyn Accumulate<M, B>>>,
    parts: Vec<Slot<dyn Part<M, B>>>,
    clip: Option<Slot<dyn Part<M, B>>>,
    average: Option<Average<B::InnerBackend>>,
    optimizer: Slot<dyn Optimize<M, B>>,
    /// Updates that were made.
    updates: u64,
}

impl<M: AutodiffModule<B> + 'static, B: AutodiffBackend> Update<M, B> {
    /// An update of all parameters by one of Burn's optimizers.
    pub fn new(optimizer: impl Optimizer<M, B> + 'static) -> Self {
        Self::by(BurnOptimizer::new(optimizer))
    }

    /// An update of groups of parameters, each by its optimizer.
    pub fn of_groups(groups: Groups<M, B>) -> Self {
        Self::by(groups)
    }

    /// An update by a last part of another crate: burn-zero's reduction over ranks, around another
    /// update's optimizer.
    pub fn by(optimizer: impl Optimize<M, B> + Clone) -> Self {
        let inside = Pipeline {
            accumulate: None,
            parts: Vec::new(),
            clip: None,
            average: None,
            optimizer: Slot::<dyn Optimize<M, B>>::of_optimize(optimizer),
            updates: 0,
        };
        Self {
            scale: None,
            inside,
            is_prepared: false,
            progress: UpdateProgress::default(),
        }
    }

    /// Scales losses, and skips the steps whose gradients are not finite: with burn-amp's
    /// `GradScalerConfig`, or a `GradScaler`, which is also a handle to read the scale.
    ///
    /// # Errors
    ///
    /// What is wrong with the configuration; [`UpdateError::SameName`].
    pub fn scale(mut self, scale: impl IntoScale<B>) -> Result<Self, UpdateError> {
        let scale = scale.into_scale()?;
        self.check_name(&scale.name())?;
        self.scale = Some(Slot::<dyn Scale<B>>::of_scale(scale));
        Ok(self)
    }

    /// Makes an update of a window of micro-batches: with burn-accum's `AccumConfig`, or an
    /// `Accumulation`, which has handles and further settings.
    ///
    /// # Errors
    ///
    /// What is wrong with the configuration; [`UpdateError::SameName`].
    pub fn accumulate(mut self, windows: impl IntoAccumulate<M, B>) -> Result<Self, UpdateError> {
        let part = windows.into_accumulate()?;
        self.check_name(&part.name())?;
        self.inside.accumulate = Some(Slot::<dyn Accumulate<M, B>>::of_accumulate(part));
        Ok(self)
    }

    /// Clips the gradients that the optimizer gets: the last part before it. burn-accum's
    /// `ClipNorm` is one, and `clip_norm(1.0)` of its trait adds it.
    ///
    /// # Errors
    ///
    /// [`UpdateError::SameName`]; [`UpdateError::Order`] after a reduction over ranks.
    pub fn clip(mut self, clip: impl Part<M, B> + Clone) -> Result<Self, UpdateError> {
        self.check_name(&clip.name())?;
        if self.reduces() {
            return Err(UpdateError::Order {
                part: clip.name(),
                instead: "clip before `.reduce(..)`, where the norm is that of all ranks"
                    .to_owned(),
            });
        }
        self.inside.clip = Some(Slot::<dyn Part<M, B>>::of_part(clip));
        Ok(self)
    }

    /// Adds a part of your own. Of several, each gets the gradients that the one before returns.
    ///
    /// # Errors
    ///
    /// [`UpdateError::SameName`].
    ///
    /// ```
    /// use burn::{backend::Autodiff, module::AutodiffModule, nn::{Linear, LinearConfig}, optim::*};
    /// use burn::tensor::{Distribution, Tensor, backend::AutodiffBackend};
    /// use burn_update::{Part, Stateful, Step, Update, UpdateError, map_gradients};
    ///
    /// /// Adds noise to the gradients.
    /// #[derive(Clone)]
    /// struct Noise {
    ///     deviation: f64,
    /// }
    ///
    /// impl<B: AutodiffBackend> Stateful<B> for Noise {
    ///     fn name(&self) -> String {
    ///         "noise".to_owned()
    ///     }
    /// }
    ///
    /// impl<M: AutodiffModule<B>, B: AutodiffBackend> Part<M, B> for Noise {
    ///     fn gradients(
    ///         &mut self,
    ///         _: &mut Step<B::InnerBackend>,
    ///         model: &M,
    ///         gradients: GradientsParams,
    ///     ) -> Result<GradientsParams, UpdateError> {
    ///         let noise = Distribution::Normal(0.0, self.deviation);
    ///         // Each gradient as a vector of its elements.
    ///         Ok(map_gradients::<B, M>(model, gradients, |_path, gradient| {
    ///             gradient.random_like(noise) + gradient
    ///         }))
    ///     }
    /// }
    ///
    /// type B = Autodiff<burn_flex::Flex>;
    /// let device = Default::default();
    /// let model = LinearConfig::new(4, 2).init::<B>(&device);
    /// let mut update = Update::new(SgdConfig::new().init()).with(Noise { deviation: 0.1 })?;
    ///
    /// let loss = model.forward(Tensor::<B, 2>::zeros([8, 4], &device)).sum() * 0.0;
    /// let gradients = update.backward(&model, loss);
    /// let noisy: Linear<B> = update.step(1.0, model.clone(), gradients)?;
    /// assert_ne!(noisy.weight.val().into_data(), model.weight.val().into_data());
    /// # Ok::<(), UpdateError>(())
    /// ```
    pub fn with(mut self, part: impl Part<M, B> + Clone) -> Result<Self, UpdateError> {
        self.check_name(&part.name())?;
        self.inside
            .parts
            .push(Slot::<dyn Part<M, B>>::of_part(part));
        Ok(self)
    }

    /// Keeps an average of the weights: [`averaged`](Self::averaged) gives the model with them, and
    /// the training loop of a Learner validates with it. In an update over ranks, before `.reduce(..)`
    /// or after it, each rank keeps that of its shards.
    ///
    /// # Errors
    ///
    /// [`UpdateError::InvalidValue`]; [`UpdateError::SameName`].
    pub fn average(mut self, config: AverageConfig) -> Result<Self, UpdateError> {
        self.check_name(AVERAGE)?;
        if self.reduces() {
            self.inside.optimizer.part.keep_average(config)?;
        } else {
            self.inside.average = Some(Average::new(config)?);
        }
        Ok(self)
    }

    /// The model with the averages of its weights, to validate with or to save; the rest of it, such
    /// as running statistics, is as it is. In an update over ranks all of them call it.
    ///
    /// # Errors
    ///
    /// [`UpdateError::NoAverage`], [`UpdateError::NotAveraged`]; those of a group of ranks.
    pub fn averaged(&self, model: &M) -> Result<M::InnerModule, UpdateError> {
        match &self.inside.average {
            Some(average) => average.apply::<B, M>(model),
            None => self.inside.optimizer.part.averaged(model),
        }
    }

    /// Updates so far: steps of the optimizer, without those that were skipped.
    pub fn updates(&self) -> u64 {
        self.inside.updates
    }

    /// A handle on how far it is, which stays valid when it moves into a Learner.
    pub fn progress(&self) -> UpdateProgress {
        self.progress.clone()
    }

    /// A learning rate that advances once an update, and not within a window or when a step is
    /// skipped, although the Learner asks for it with each micro-batch.
    pub fn per_update<S>(&self, schedule: S) -> PerUpdate<S> {
        PerUpdate::new(schedule, &self.progress)
    }

    /// Differentiates a loss of `model`: a tensor, or burn-accum's `Counted`. The loss is scaled if
    /// the update has a scale and the backend is burn-amp's `Autocast`; the gradients are the true
    /// ones.
    pub fn backward(&self, model: &M, loss: impl Loss<B>) -> GradientsParams {
        let Some(scale) = &self.scale else {
            return loss.backward(model);
        };
        let (mut loss, mut gradients) = (Some(loss), None);
        scale.part.backward(&mut || {
            gradients = loss.take().map(|loss| loss.backward(model));
        });
        gradients.expect("a scale runs backward once")
    }

    /// A step with the gradients of one micro-batch: of one device, or of several
    /// (`MultiGradientsParams`).
    ///
    /// # Errors
    ///
    /// Those of the parts: the training cannot go on as it is. The model is gone with the step;
    /// clone it before, which copies no tensor, to save it in that case.
    pub fn step(
        &mut self,
        lr: LearningRate,
        model: M,
        gradients: impl Into<Arrived>,
    ) -> Result<M, UpdateError> {
        let mut arrived: Arrived = gradients.into();
        let Some(request) = arrived.take_request::<B::InnerBackend>() else {
            self.progress.set_position(None);
            return self.advance(lr, model, Some(arrived));
        };
        self.progress.answer();
        match request {
            Request::Answer => {
                // A clone's count is its own, and its handle may show that of another training.
                self.progress.set_updates(self.inside.updates);
                Ok(model)
            }
            Request::Flush => self.flush(lr, model),
            Request::Ranks => Ok(match self.progress.take_asked() {
                Some(request) => self.serve(&request, model),
                None => model,
            }),
            Request::Average => {
                let averaged = gradient::update(|| self.averaged(&model));
                let averaged = averaged.map(|averaged| Box::new(averaged) as AnyModule);
                self.progress.give_averaged(match averaged {
                    Err(UpdateError::NoAverage { .. }) => None,
                    averaged => Some(averaged),
                });
                Ok(model)
            }
        }
    }

    /// Does what a loop over ranks asks, and leaves the answer in the progress.
    fn serve(&mut self, request: &LoopRequest, model: M) -> M {
        let before = model.clone();
        let optimizer = &mut self.inside.optimizer.part;
        match gradient::update(|| optimizer.serve(request, model)) {
            Ok(model) => {
                let gathers_parameters = optimizer.gathers_parameters();
                self.is_prepared |= matches!(request, LoopRequest::Prepare { .. });
                self.progress.set_updates(self.inside.updates);
                self.progress.serve(Ok(Served { gathers_parameters }));
                model
            }
            Err(error) => {
                self.progress.serve(Err(error));
                before
            }
        }
    }

    /// Applies a window that is not complete, with its true weights: for the end of an epoch or of
    /// the training. Nothing happens if there is none.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step).
    pub fn flush(&mut self, lr: LearningRate, model: M) -> Result<M, UpdateError> {
        self.advance(lr, model, None)
    }

    fn advance(
        &mut self,
        lr: LearningRate,
        model: M,
        arrived: Option<Arrived>,
    ) -> Result<M, UpdateError> {
        let model = self.run(lr, model, arrived)?;
        self.progress.set_updates(self.inside.updates);
        Ok(model)
    }

    fn run(
        &mut self,
        lr: LearningRate,
        model: M,
        arrived: Option<Arrived>,
    ) -> Result<M, UpdateError> {
        gradient::update(|| {
            let model = self.prepare_once(model)?;
            let mut step = Step::new(lr);
            step.ranks = self.inside.optimizer.part.ranks();
            step.decides_on_host = step.ranks.is_some() || gradient::decide_on_host();
            step.is_flush = arrived.is_none();
            let arrived = match arrived {
                Some(arrived) => Some(self.inside.receive(&mut step, &model, arrived)?),
                None => None,
            };
            let Some(scale) = &mut self.scale else {
                return self.inside.advance(&mut step, model, arrived, None);
            };
            step.is_scaled = scale.part.is_enabled();
            let inspection = arrived.as_ref().filter(|_| step.is_scaled).map(|arrived| {
                let probe = self.inside.probe();
                let mut inspect = || Inspection::new::<B, M>(&model, arrived, probe);
                around(&mut *scale.part, &mut inspect)
            });
            let half = inspection.as_ref().and_then(Inspection::half_precision);
            step.half_precision = half.map(|(path, dtype)| HalfPrecision { path, dtype });
            if !scale.part.begin(&step)? {
                return Ok(model);
            }
            let mut arguments = Some((model, arrived, inspection));
            let model = around(&mut *scale.part, &mut || {
                let (model, arrived, inspection) = arguments.take().expect("the step is run once");
                self.inside.advance(&mut step, model, arrived, inspection)
            })?;
            scale.part.record(&step)?;
            Ok(model)
        })
    }

    /// Shows the update the model that it will train. An update over ranks needs it before the first
    /// forward pass, and again after weights were loaded, on the thread that trains: it returns the
    /// model with rank 0's weights, and all ranks call it. Without ranks the first step does it, and
    /// the model is unchanged.
    ///
    /// # Errors
    ///
    /// Why this model cannot be updated, such as [`UpdateError::NoParameter`].
    pub fn prepare(&mut self, model: M) -> Result<M, UpdateError> {
        // To list parameters initialises them, and a reduction brings each to its place before that.
        let parameters = if self.reduces() {
            Vec::new()
        } else {
            Parameter::list::<B, M>(&model)
        };
        let model = self.inside.optimizer.part.prepare(model, &parameters)?;
        self.is_prepared = true;
        Ok(model)
    }

    fn prepare_once(&mut self, model: M) -> Result<M, UpdateError> {
        if self.is_prepared {
            return Ok(model);
        }
        if self.reduces() {
            return Err(UpdateError::NotPrepared);
        }
        self.prepare(model)
    }

    /// Whether it reduces gradients over ranks.
    pub(crate) fn reduces(&self) -> bool {
        self.inside.optimizer.part.reduces()
    }

    pub(crate) fn has_clip(&self) -> bool {
        self.inside.clip.is_some()
    }

    pub(crate) fn optimizer(&self) -> &dyn Optimize<M, B> {
        &*self.inside.optimizer.part
    }

    pub(crate) fn optimize(&mut self) -> &mut dyn Optimize<M, B> {
        &mut *self.inside.optimizer.part
    }

    /// The name of a part that cannot be inside of a reduction over ranks, if it has one.
    pub(crate) fn outer_part(&self) -> Option<String> {
        let scale = self.scale.as_ref().map(|scale| scale.part.name());
        let windows = self.inside.accumulate.as_ref();
        let windows = windows.map(|windows| windows.part.name());
        let own = self.inside.parts.first().map(|own| own.part.name());
        let reduction = self.reduces().then(|| self.optimizer().name());
        scale.or(windows).or(own).or(reduction)
    }

    /// Runs the parts from one's own to the optimizer.
    pub(crate) fn run_last(
        &mut self,
        step: &mut Step<B::InnerBackend>,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M, UpdateError> {
        self.inside.update(step, model, gradients)
    }

    fn check_name(&self, name: &str) -> Result<(), UpdateError> {
        let is_taken = name == crate::optimizer::UPDATE
            || self.stateful().iter().any(|part| part.name() == name);
        if is_taken {
            let name = name.to_owned();
            return Err(UpdateError::SameName { name });
        }
        Ok(())
    }

    /// Every part, with the state that the record keeps of it.
    pub(crate) fn stateful(&self) -> Vec<&dyn Stateful<B>> {
        let inside = &self.inside;
        let mut all: Vec<&dyn Stateful<B>> = Vec::new();
        if let Some(scale) = &self.scale {
            all.push(&*scale.part);
        }
        if let Some(accumulate) = &inside.accumulate {
            all.push(&*accumulate.part);
        }
        for part in inside.parts.iter().chain(&inside.clip) {
            all.push(&*part.part);
        }
        if let Some(average) = &inside.average {
            all.push(average);
        }
        all.extend(inside.optimizer.part.average());
        all.push(&*inside.optimizer.part);
        all
    }

    /// Calls `each` with what [`stateful`](Self::stateful) has, to load it.
    ///
    /// # Errors
    ///
    /// The first of `each`.
    pub(crate) fn each_stateful_mut(
        &mut self,
        mut each: impl FnMut(&mut dyn Stateful<B>) -> Result<(), UpdateError>,
    ) -> Result<(), UpdateError> {
        let inside = &mut self.inside;
        if let Some(scale) = &mut self.scale {
            each(&mut *scale.part)?;
        }
        if let Some(accumulate) = &mut inside.accumulate {
            each(&mut *accumulate.part)?;
        }
        for part in inside.parts.iter_mut().chain(&mut inside.clip) {
            each(&mut *part.part)?;
        }
        if let Some(average) = &mut inside.average {
            each(average)?;
        }
        let optimizer = &mut *inside.optimizer.part;
        if let Some(average) = optimizer.average_mut() {
            each(average)?;
        }
        each(optimizer)
    }

    /// The average, if it keeps one outside of a reduction over ranks.
    pub(crate) fn kept_average(&self) -> Option<&Average<B::InnerBackend>> {
        self.inside.average.as_ref()
    }

    /// [`kept_average`](Self::kept_average), to change it.
    pub(crate) fn average_mut(&mut self) -> &mut Option<Average<B::InnerBackend>> {
        &mut self.inside.average
    }

    /// Continues with this number of updates.
    pub(crate) fn set_updates(&mut self, updates: u64) {
        self.inside.updates = updates;
        self.progress.set_updates(updates);
    }

    /// Whether it has a scale that is enabled, and whether it has an accumulation.
    /// What one of its parts does that must be a part of the outermost update.
    pub(crate) fn work_of_an_outer_part(&self) -> Option<&'static str> {
        let is_enabled = |scale: &Slot<dyn Scale<B>>| scale.part.is_enabled();
        if self.scale.as_ref().is_some_and(is_enabled) {
            Some("scales losses")
        } else if self.inside.accumulate.is_some() {
            Some("accumulates gradients")
        } else if self.reduces() {
            Some("reduces gradients over ranks")
        } else {
            None
        }
    }
}

/// Runs `run`, once, where the scale wants a step to run.
fn around<R, B: AutodiffBackend>(scale: &mut dyn Scale<B>, run: &mut dyn FnMut() -> R) -> R {
    let mut result = None;
    scale.step(&mut || result = Some(run()));
    result.expect("a scale runs the step once")
}

impl<M: AutodiffModule<B> + 'static, B: AutodiffBackend> Pipeline<M, B> {
    /// What a scale needs to know of the gradients: an accumulation looks at them itself.
    fn probe(&self) -> Probe {
        if self.accumulate.is_some() {
            Probe::None
        } else {
            Probe::Sum
        }
    }

    /// Takes out of the gradients what is none, and fills in the step.
    fn receive(
        &self,
        step: &mut Step<B::InnerBackend>,
        model: &M,
        mut arrived: Arrived,
    ) -> Result<Arrived, UpdateError> {
        step.items = arrived.take_items::<B::InnerBackend>();
        step.micro_batches = arrived.micro_batches();
        for id in self.optimizer.part.frozen() {
            arrived.drop_gradients::<B::InnerBackend>(id);
        }
        if self.accumulate.is_some() {
            return Ok(arrived);
        }
        if !step.items.is_empty() {
            return Err(UpdateError::ItemsWithoutAccumulation);
        }
        Ok(arrived.sum::<B, M>(model).into())
    }

    fn advance(
        &mut self,
        step: &mut Step<B::InnerBackend>,
        model: M,
        arrived: Option<Arrived>,
        inspection: Option<Inspection<B::InnerBackend>>,
    ) -> Result<M, UpdateError> {
        let gradients = match (&mut self.accumulate, arrived) {
            (Some(accumulate), arrived) => {
                if let Some(arrived) = arrived {
                    accumulate.part.add(step, &model, arrived)?;
                }
                accumulate.part.close(step, &model)?
            }
            (None, Some(arrived)) => if_finite::<B, M>(step, &model, arrived, inspection)?,
            (None, None) => None,
        };
        let model = match gradients {
            Some(gradients) => self.update(step, model, gradients)?,
            None => model,
        };
        if let Some(accumulate) = &mut self.accumulate {
            accumulate.part.end(step)?;
        }
        Ok(model)
    }

    fn update(
        &mut self,
        step: &mut Step<B::InnerBackend>,
        model: M,
        mut gradients: GradientsParams,
    ) -> Result<M, UpdateError> {
        for part in self.parts() {
            gradients = part.gradients(step, &model, gradients)?;
        }
        step.outcome = StepOutcome::Updates;
        let model = self.optimizer.part.update(step, model, gradients)?;
        if !step.updates() {
            return Ok(model);
        }
        self.updates += 1;
        for part in self.parts() {
            part.updated(step, &model)?;
        }
        Ok(model)
    }

    /// The parts between the accumulation and the optimizer, in their order.
    fn parts(&mut self) -> Vec<&mut dyn Part<M, B>> {
        let mut parts: Vec<&mut dyn Part<M, B>> = Vec::new();
        for slot in self.parts.iter_mut().chain(&mut self.clip) {
            parts.push(&mut *slot.part);
        }
        if let Some(average) = &mut self.average {
            parts.push(average);
        }
        parts
    }
}

/// The gradients, unless a scale has them inspected and one is not finite, on any rank.
///
/// # Errors
///
/// Those of [`Ranks`](crate::Ranks).
fn if_finite<B: AutodiffBackend, M: AutodiffModule<B>>(
    step: &mut Step<B::InnerBackend>,
    model: &M,
    arrived: Arrived,
    inspection: Option<Inspection<B::InnerBackend>>,
) -> Result<Option<GradientsParams>, UpdateError> {
    let Some(inspection) = inspection else {
        return Ok(Some(arrived.into_one()));
    };
    let (culprits, _) = inspection.culprits::<B, M>(model, &arrived, Vec::new());
    // All ranks skip a step, or none: otherwise their parameters would differ.
    let culprits = step.non_finite_on_any_rank(culprits)?;
    let is_finite = culprits.is_empty();
    step.verdict = Some(Verdict::known(culprits));
    Ok(is_finite.then(|| arrived.into_one()))
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> Clone for Update<M, B> {
    fn clone(&self) -> Self {
        Self {
            scale: self.scale.clone(),
            inside: Pipeline {
                accumulate: self.inside.accumulate.clone(),
                parts: self.inside.parts.clone(),
                clip: self.inside.clip.clone(),
                average: self.inside.average.clone(),
                optimizer: self.inside.optimizer.clone(),
                updates: self.inside.updates,
            },
            is_prepared: self.is_prepared,
            progress: self.progress.clone(),
        }
    }
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> core::fmt::Debug for Update<M, B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let parts: Vec<_> = self.stateful().iter().map(|part| part.name()).collect();
        f.debug_struct("Update")
            .field("parts", &parts)
            .field("updates", &self.updates())
            .finish_non_exhaustive()
    }
}
