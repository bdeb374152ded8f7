//! Burn's optimizers as the last part of an update, and an update as one of Burn's optimizers.

use core::any::Any;
use core::marker::PhantomData;
use std::collections::BTreeMap;

use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::tensor::Device;
use burn::tensor::backend::AutodiffBackend;

use crate::error::raise;
use crate::short_name::short_name;
use crate::tree::{RecordTree, record_bytes};
use crate::{
    Optimize, Parameter, PartState, Position, Stateful, Step, Update, UpdateError, UpdateRecord,
};

/// The name under which a record has what is of the whole update.
pub(crate) const UPDATE: &str = "update";

/// The name of the last part.
pub(crate) const OPTIMIZER: &str = "optimizer";

/// The value that holds an optimizer's own record.
pub(crate) const RECORD: &str = "record";

/// One of Burn's optimizers, as the last part of an update.
pub struct BurnOptimizer<O, M> {
    optimizer: O,
    model: PhantomData<fn() -> M>,
}

impl<O, M> BurnOptimizer<O, M> {
    /// Makes a part of `optimizer`.
    pub(crate) fn new(optimizer: O) -> Self {
        Self {
            optimizer,
            model: PhantomData,
        }
    }
}

impl<O: Clone, M> Clone for BurnOptimizer<O, M> {
    fn clone(&self) -> Self {
        Self::new(self.optimizer.clone())
    }
}

impl<O, M, B> Stateful<B> for BurnOptimizer<O, M>
where
    O: Optimizer<M, B> + 'static,
    M: AutodiffModule<B> + 'static,
    B: AutodiffBackend,
{
    fn name(&self) -> String {
        OPTIMIZER.to_owned()
    }

    fn save(&self) -> Option<PartState> {
        let mut state = PartState::default();
        match RecordTree::of::<B, _>(self.optimizer.to_record()) {
            Ok(tree) => state.put_tree(RECORD, tree),
            // Of an optimizer whose record has other keys than texts, for example. Only a reduction
            // over ranks needs the tree.
            Err(_) => state.put_bytes(RECORD, record_bytes::<B, _>(self.optimizer.to_record())),
        }
        Some(state)
    }

    fn load(&mut self, mut state: PartState, device: &Device<B>) -> Result<(), UpdateError> {
        let record = state.take_record(RECORD)?.into_record::<B, _>(device);
        let record = record.map_err(|reason| UpdateError::Unreadable {
            part: state.part().to_owned(),
            reason,
        })?;
        self.optimizer = self.optimizer.clone().load_record(record);
        Ok(())
    }
}

impl<O, M, B> Optimize<M, B> for BurnOptimizer<O, M>
where
    O: Optimizer<M, B> + 'static,
    M: AutodiffModule<B> + 'static,
    B: AutodiffBackend,
{
    /// # Errors
    ///
    /// [`UpdateError::WrapperInside`].
    fn prepare(&mut self, model: M, _: &[Parameter]) -> Result<M, UpdateError> {
        let optimizer: &dyn Any = &self.optimizer;
        let update = optimizer.downcast_ref::<Update<M, B>>();
        match update.and_then(Update::work_of_an_outer_part) {
            Some(what) => Err(UpdateError::WrapperInside {
                optimizer: short_name::<O>(),
                what,
            }),
            None => Ok(model),
        }
    }

    fn use_alone(&mut self, number: usize) -> Option<String> {
        (number == 0).then(short_name::<O>)
    }

    fn update(
        &mut self,
        step: &mut Step<B::InnerBackend>,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M, UpdateError> {
        Ok(self.optimizer.step(step.lr, model, gradients))
    }
}

impl<M: AutodiffModule<B> + 'static, B: AutodiffBackend> Update<M, B> {
    /// Its state, to save with any of Burn's recorders.
    pub fn record(&self) -> UpdateRecord<B> {
        let mut parts = BTreeMap::new();
        let mut own = PartState::default();
        own.put_integer("updates", self.updates());
        if let Some(position) = self.progress().position() {
            own.put_integer("epoch", position.epoch as u64);
            own.put_integer("batches", position.batches as u64);
        }
        parts.insert(UPDATE.to_owned(), own);
        for part in self.stateful() {
            if let Some(state) = part.save() {
                parts.insert(part.name(), state);
            }
        }
        UpdateRecord::new(parts)
    }

    /// Continues from a record of an update with the same parts.
    ///
    /// # Errors
    ///
    /// [`UpdateError::RecordLacks`], [`UpdateError::RecordHas`], [`UpdateError::ValueMissing`],
    /// [`UpdateError::Unreadable`].
    pub fn load(mut self, mut record: UpdateRecord<B>) -> Result<Self, UpdateError> {
        let device = record.device().clone();
        if let Some(mut own) = record.take(UPDATE)? {
            self.set_updates(own.take_integer("updates")?);
            let position = (own.take_integer("epoch"), own.take_integer("batches"));
            self.progress().set_position(match position {
                (Ok(epoch), Ok(batches)) => Some(Position {
                    epoch: epoch as usize,
                    batches: batches as usize,
                }),
                // It was made in a loop of one's own.
                _ => None,
            });
        }
        self.each_stateful_mut(|part| {
            let name = part.name();
            if !record.has(&name) && part.save().is_none() {
                return Ok(());
            }
            match record.take(&name)? {
                Some(state) => part.load(state, &device)?,
                None => part.start_anew(),
            }
            Ok(())
        })?;
        record.finish()?;
        Ok(self)
    }
}

impl<M: AutodiffModule<B> + 'static, B: AutodiffBackend> Optimizer<M, B> for Update<M, B> {
    type Record = UpdateRecord<B>;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        raise(Update::step(self, lr, module, grads))
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        raise(Update::step(self, lr, module, grads))
    }

    fn to_record(&self) -> Self::Record {
        self.record()
    }

    fn load_record(self, record: Self::Record) -> Self {
        raise(self.load(record))
    }
}
