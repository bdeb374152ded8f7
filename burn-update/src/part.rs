//! The parts of an update: what each kind is asked, and when.

use core::any::Any;
use std::sync::Arc;

use burn::module::{AutodiffModule, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Device, TensorMetadata};
use burn_decorator::gauge::Gauge;
use burn_decorator::module::for_each_float;

use crate::average::AVERAGE;
use crate::{Arrived, AverageConfig, LoopRequest, PartState, Ranks, Step, UpdateError};

/// What every part has: a name, and perhaps a state that a record keeps.
pub trait Stateful<B: AutodiffBackend>: Any + Send {
    /// The part's name in records and errors. No other part of the update has it.
    fn name(&self) -> String;

    /// Its state; `None`, the default, if it has none. It may wait for the device.
    fn save(&self) -> Option<PartState> {
        None
    }

    /// What a training shows of it, as metrics of Burn's Learner: see
    /// [`UpdateStrategy::metrics`](crate::UpdateStrategy::metrics). They never wait for a device on
    /// the thread that trains.
    fn gauges(&self) -> Vec<Gauge> {
        Vec::new()
    }

    /// Continues from a saved state. Tensors belong on `device`.
    ///
    /// # Errors
    ///
    /// [`UpdateError::ValueMissing`], which the methods of [`PartState`] return.
    fn load(&mut self, state: PartState, device: &Device<B>) -> Result<(), UpdateError> {
        let _ = (state, device);
        Ok(())
    }

    /// Starts anew, because the record that is loaded does not have the part
    /// ([`UpdateRecord::with_new`](crate::UpdateRecord::with_new)). By default nothing: a part that
    /// was just made is new. One that shares its state with a handle, as a loss scale does, resets
    /// it.
    fn start_anew(&mut self) {}
}

/// A part that changes the gradients of an update, or looks at the updated model: a filter, noise,
/// an average of the weights, clipping. [`Update::with`](crate::Update::with) adds one.
///
/// Both methods are called for updates only: not for micro-batches that wait in a window, and not
/// for steps that are skipped. If gradients overflow only when they are reduced over ranks, which
/// comes after the parts, [`gradients`](Self::gradients) is called for a step that is then left out.
pub trait Part<M: AutodiffModule<B>, B: AutodiffBackend>: Stateful<B> {
    /// Changes the gradients of an update of `model`: true gradients, of the whole window.
    ///
    /// # Errors
    ///
    /// What stops the training. The update is not made.
    fn gradients(
        &mut self,
        step: &mut Step<B::InnerBackend>,
        model: &M,
        gradients: GradientsParams,
    ) -> Result<GradientsParams, UpdateError> {
        let _ = (step, model);
        Ok(gradients)
    }

    /// Looks at the model after the update.
    ///
    /// # Errors
    ///
    /// What stops the training.
    fn updated(&mut self, step: &Step<B::InnerBackend>, model: &M) -> Result<(), UpdateError> {
        let _ = (step, model);
        Ok(())
    }
}

/// The part that scales losses, and skips the steps whose gradients are not finite: burn-amp's
/// `UpdateScale`.
pub trait Scale<B: AutodiffBackend>: Stateful<B> {
    /// Whether losses are scaled and steps skipped at all.
    fn is_enabled(&self) -> bool;

    /// Runs `backward`, in which the losses of this update are differentiated.
    fn backward(&self, backward: &mut dyn FnMut());

    /// Runs `step`, the parts inside of this one and the optimizer.
    fn step(&mut self, step: &mut dyn FnMut());

    /// Whether a step may be taken; `false` if the training is being stopped in another way.
    ///
    /// # Errors
    ///
    /// Why the training cannot go on: an earlier step's error, or a parameter in 16 bits.
    fn begin(&mut self, step: &Step<B::InnerBackend>) -> Result<bool, UpdateError>;

    /// Counts a step, and moves the scale.
    ///
    /// # Errors
    ///
    /// Why the training cannot go on, such as that the scale cannot be lowered any further.
    fn record(&mut self, step: &Step<B::InnerBackend>) -> Result<(), UpdateError>;
}

/// The part that sums gradients until a window of micro-batches is complete: burn-accum's
/// `Accumulation`.
pub trait Accumulate<M: AutodiffModule<B>, B: AutodiffBackend>: Stateful<B> {
    /// Adds a micro-step, and says in [`Step::verdict`] whether it is finite. One that is not is
    /// left out.
    ///
    /// # Errors
    ///
    /// Why it cannot be added, such as that it does not count its items.
    fn add(
        &mut self,
        step: &mut Step<B::InnerBackend>,
        model: &M,
        gradients: Arrived,
    ) -> Result<(), UpdateError>;

    /// The gradients of the window, if it is complete, or not empty and the step is a flush;
    /// otherwise `None`, and also if its sum is not finite.
    ///
    /// # Errors
    ///
    /// Why they cannot be divided, or why the training cannot go on.
    fn close(
        &mut self,
        step: &mut Step<B::InnerBackend>,
        model: &M,
    ) -> Result<Option<GradientsParams>, UpdateError>;

    /// The end of the step, whose [`outcome`](Step::outcome) is known.
    ///
    /// # Errors
    ///
    /// Why the training cannot go on.
    fn end(&mut self, step: &Step<B::InnerBackend>) -> Result<(), UpdateError>;
}

/// The last part, which changes the parameters: each of Burn's optimizers,
/// [`Groups`](crate::Groups), and burn-zero's reduction over ranks around them.
pub trait Optimize<M: AutodiffModule<B>, B: AutodiffBackend>: Stateful<B> {
    /// Called before the first step with a model, and again where the model is prepared again, with
    /// its parameters under the ids that its gradients have. It returns the model unchanged, unless
    /// it [reduces](Self::reduces) gradients.
    ///
    /// # Errors
    ///
    /// Why this model cannot be updated.
    fn prepare(&mut self, model: M, parameters: &[Parameter]) -> Result<M, UpdateError>;

    /// The parameters that are not trained: their gradients are taken out before any other part
    /// sees them.
    fn frozen(&self) -> Vec<ParamId> {
        Vec::new()
    }

    /// Whether it reduces gradients over ranks. It then clips by itself, and the model has to be
    /// [prepared](crate::Update::prepare) before the first forward pass.
    fn reduces(&self) -> bool {
        false
    }

    /// The ranks that decide together, if it reduces gradients over several.
    fn ranks(&self) -> Option<Arc<dyn Ranks>> {
        None
    }

    /// Whether a forward pass gathers parameters from all ranks, so that all must make it.
    fn gathers_parameters(&self) -> bool {
        false
    }

    /// Does what the training loop of a Learner asks, if it [reduces](Self::reduces) gradients.
    ///
    /// # Errors
    ///
    /// That ranks are lost or differ, or why this model cannot be trained.
    fn serve(&mut self, request: &LoopRequest, model: M) -> Result<M, UpdateError> {
        let _ = request;
        Ok(model)
    }

    /// Keeps an average of the weights that it updates, if it [reduces](Self::reduces) gradients:
    /// of this rank's shards.
    ///
    /// # Errors
    ///
    /// What is wrong with the configuration.
    fn keep_average(&mut self, config: AverageConfig) -> Result<(), UpdateError> {
        let _ = config;
        Err(UpdateError::Order {
            part: AVERAGE.to_owned(),
            instead: format!("`{}` keeps no average of what it updates", self.name()),
        })
    }

    /// That average, which has its own place in the record.
    fn average(&self) -> Option<&dyn Stateful<B>> {
        None
    }

    /// [`average`](Self::average), to load it.
    fn average_mut(&mut self) -> Option<&mut dyn Stateful<B>> {
        None
    }

    /// The model with that average for its weights. All ranks call it.
    ///
    /// # Errors
    ///
    /// [`UpdateError::NoAverage`]; those of the ranks.
    fn averaged(&self, model: &M) -> Result<M::InnerModule, UpdateError> {
        let _ = model;
        Err(UpdateError::NoAverage { has_part: false })
    }

    /// Uses its optimizer of this number for all parameters from now on, for a trial on other ones.
    /// Returns its name, or `None` if there is none of that number.
    fn use_alone(&mut self, number: usize) -> Option<String> {
        (number == 0).then(|| self.name())
    }

    /// Updates the model.
    ///
    /// # Errors
    ///
    /// Why it cannot be updated.
    fn update(
        &mut self,
        step: &mut Step<B::InnerBackend>,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M, UpdateError>;
}

/// A parameter of a model, as an [`Optimize`] is told of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its path, such as `blocks.3.attention.query.weight`. A tied parameter is listed at each of
    /// its paths.
    pub path: String,
    /// The id of its gradients.
    pub id: ParamId,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl Parameter {
    /// The float tensors of a model, also those that are not trained.
    pub fn list<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> Vec<Self> {
        let mut found = Vec::new();
        for_each_float::<B, M>(model, |path, id, tensor| {
            found.push(Self {
                path: path.to_owned(),
                id,
                shape: tensor.shape().to_vec(),
            });
        });
        found
    }
}

/// What becomes the [`Scale`] of an update: burn-amp's `GradScalerConfig` or `GradScaler`.
pub trait IntoScale<B: AutodiffBackend> {
    /// The part.
    type Part: Scale<B> + Clone;

    /// Makes the part.
    ///
    /// # Errors
    ///
    /// What is wrong with the configuration.
    fn into_scale(self) -> Result<Self::Part, UpdateError>;
}

/// What becomes the [`Accumulate`] of an update: burn-accum's `AccumConfig` or `Accumulation`.
pub trait IntoAccumulate<M: AutodiffModule<B>, B: AutodiffBackend> {
    /// The part.
    type Part: Accumulate<M, B> + Clone;

    /// Makes the part.
    ///
    /// # Errors
    ///
    /// What is wrong with the configuration.
    fn into_accumulate(self) -> Result<Self::Part, UpdateError>;
}

/// A part that can be cloned although its type is not known.
pub(crate) struct Slot<T: ?Sized> {
    pub(crate) part: Box<T>,
    clone: fn(&T) -> Box<T>,
}

impl<T: ?Sized> Clone for Slot<T> {
    fn clone(&self) -> Self {
        Self {
            part: (self.clone)(&self.part),
            clone: self.clone,
        }
    }
}

macro_rules! slot {
    ($(#[$doc:meta])* $new:ident, [$($generics:tt)*], $part:ident: $bound:path) => {
        impl<$($generics)*> Slot<dyn $bound> {
            $(#[$doc])*
            pub(crate) fn $new<P: $bound + Clone>($part: P) -> Self {
                Self {
                    part: Box::new($part),
                    clone: |part| {
                        let any: &dyn Any = part;
                        let part: &P = any.downcast_ref().expect("the type that it was made of");
                        Box::new(part.clone())
                    },
                }
            }
        }
    };
}

slot!(
    /// Holds a scale.
    of_scale, [B: AutodiffBackend], part: Scale<B>
);
slot!(
    /// Holds an accumulation.
    of_accumulate, [M: AutodiffModule<B> + 'static, B: AutodiffBackend], part: Accumulate<M, B>
);
slot!(
    /// Holds an optimizer.
    of_optimize, [M: AutodiffModule<B> + 'static, B: AutodiffBackend], part: Optimize<M, B>
);
slot!(
    /// Holds a part of another kind.
    of_part, [M: AutodiffModule<B> + 'static, B: AutodiffBackend], part: Part<M, B>
);
