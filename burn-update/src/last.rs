//! The last parts of an update, for a part that runs them on another module than the model.

use burn::module::{AutodiffModule, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Device;
use burn::tensor::backend::AutodiffBackend;
use burn_decorator::gauge::Gauge;

use crate::{Parameter, PartState, Stateful, Step, Update, UpdateError, UpdateRecord};

/// Clipping, optimizer and average of an [`Update`]: what a reduction over ranks runs on this rank's
/// shards of the parameters, which are a module of their own. Made by [`Update::into_last_parts`].
#[derive(Debug)]
pub struct LastParts<M: AutodiffModule<B> + 'static, B: AutodiffBackend> {
    update: Update<M, B>,
}

impl<M: AutodiffModule<B> + 'static, B: AutodiffBackend> Update<M, B> {
    /// The last parts, of an update that has no others. They run inside of `outside`, which is
    /// named in errors.
    ///
    /// # Errors
    ///
    /// [`UpdateError::Order`], for an update with a scale, an accumulation, a part of one's own or a
    /// reduction.
    pub fn into_last_parts(self, outside: &'static str) -> Result<LastParts<M, B>, UpdateError> {
        match self.outer_part() {
            Some(part) => Err(UpdateError::Order {
                part,
                instead: format!("add it after `{outside}`"),
            }),
            None => Ok(LastParts { update: self }),
        }
    }
}

impl<M: AutodiffModule<B> + 'static, B: AutodiffBackend> LastParts<M, B> {
    /// Tells the optimizer which parameters there are: those of the model, with their paths and
    /// shapes there, under the ids that they have in the module of [`update`](Self::update).
    /// `nothing` is such a module without parameters.
    ///
    /// # Errors
    ///
    /// Why they cannot be updated, such as [`UpdateError::NoParameter`]; for an optimizer that is
    /// itself a scaler, an accumulation or a reduction [`UpdateError::WrapperInside`].
    pub fn prepare(&mut self, nothing: M, parameters: &[Parameter]) -> Result<(), UpdateError> {
        self.update.optimize().prepare(nothing, parameters)?;
        self.name_averages(parameters);
        Ok(())
    }

    /// The ids of the parameters that are not trained.
    pub fn frozen(&self) -> Vec<ParamId> {
        self.update.optimizer().frozen()
    }

    /// Whether one of the parts reads [`Step::norm`].
    pub fn wants_norm(&self) -> bool {
        self.update.has_clip()
    }

    /// Updates the module by its gradients. A norm in the step is that of the whole gradient, of
    /// which these are a part.
    ///
    /// # Errors
    ///
    /// Those of the parts.
    pub fn update(
        &mut self,
        step: &mut Step<B::InnerBackend>,
        module: M,
        gradients: GradientsParams,
    ) -> Result<M, UpdateError> {
        self.update.run_last(step, module, gradients)
    }

    /// A step for a trial, outside of any update.
    pub fn trial_step(lr: f64) -> Step<B::InnerBackend> {
        Step::new(lr)
    }

    /// One for each optimizer in it, with its name: alone, it updates whatever module it gets.
    pub fn each_alone(&self) -> Vec<(String, Self)> {
        let mut all = Vec::new();
        loop {
            let mut update = self.update.clone();
            *update.average_mut() = None;
            match update.optimize().use_alone(all.len()) {
                Some(name) => all.push((name, Self { update })),
                None => return all,
            }
        }
    }

    /// What there is to see of the parts.
    pub fn gauges(&self) -> Vec<Gauge> {
        let parts = self.update.stateful().into_iter();
        parts.flat_map(Stateful::gauges).collect()
    }

    /// The name of the optimizer's state in a record.
    pub fn name(&self) -> String {
        self.update.optimizer().name()
    }

    /// The state of the optimizer.
    pub fn save(&self) -> Option<PartState> {
        self.update.optimizer().save()
    }

    /// The state of the optimizer in a record of [these parts](Self::as_optimizer), if it has one.
    ///
    /// # Errors
    ///
    /// [`UpdateError::RecordLacks`].
    pub fn state_in(&self, record: &mut UpdateRecord<B>) -> Result<Option<PartState>, UpdateError> {
        if self.save().is_none() {
            return Ok(None);
        }
        record.take(&self.name())
    }

    /// Continues from a saved state of the optimizer.
    ///
    /// # Errors
    ///
    /// Those of [`Stateful::load`](crate::Stateful::load).
    pub fn load(&mut self, state: PartState, device: &Device<B>) -> Result<(), UpdateError> {
        self.update.optimize().load(state, device)
    }

    /// The parts as one of Burn's optimizers, whose record is their state.
    pub fn as_optimizer(&self) -> &Update<M, B> {
        &self.update
    }

    /// [`as_optimizer`](Self::as_optimizer), to load a record.
    pub fn as_optimizer_mut(&mut self) -> &mut Update<M, B> {
        &mut self.update
    }
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> Clone for LastParts<M, B> {
    fn clone(&self) -> Self {
        Self {
            update: self.update.clone(),
        }
    }
}
