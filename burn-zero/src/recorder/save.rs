//! Saving a training.

use std::path::Path;

use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::backend::AutodiffBackend;

use super::{OptimizerState, Recorder, Training, model};
use crate::ZeroOptimizerError;
use crate::optimizer::{Parameters, Statistics};
use crate::record::{Entry, Keep, RecordError, Saved, TrainingState, agree, save_sharded, split};
use crate::state::{self, Naming, refuse};

impl Recorder {
    /// Saves a training as one record in `dir`, as [`save_sharded`] does. Collective: all ranks call it, between two steps.
    ///
    /// `state` has what the record cannot know: the number of updates, which names it, and if wanted
    /// [this rank's generator](TrainingState::with_generator) and the caller's own. The optimizer's and the scheduler's are filled in.
    ///
    /// Costs one write of this rank's share of model and optimizer, and host memory for its share of the optimizer's state;
    /// the model is read from the device piece by piece. Running statistics, such as BatchNorm's, become those of rank 0 on all
    /// ranks ([`share_statistics`](crate::ZeroOptimizer::share_statistics)).
    ///
    /// # Errors
    ///
    /// On all ranks if on one: [`RecordError::State`] if a layer keeps state that cannot be taken apart,
    /// [`ZeroOptimizerError::OtherModel`] in it; [`RecordError::RanksDiffer`] if ranks are not at the same step; those of
    /// [`save_sharded`].
    pub fn save<B, M, O, S>(
        &self,
        dir: &Path,
        training: Training<&M, &O, &S>,
        state: TrainingState,
        keep: Keep,
    ) -> Result<Saved, RecordError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
    {
        let model = training.model;
        let taken = self.take_apart::<B, M, O, S>(training, state);
        let (taken, done) = split(taken.map_err(RecordError::from));
        agree(self.group(), "take a training apart", done)?;
        // The record has rank 0's: who goes on has what who resumes will have.
        Statistics::of::<B, M>(model).share::<B, M>(model, self.group())?;
        let (state, entries) = taken.expect("this rank took it apart if all agree");
        save_sharded(dir, self.group(), entries, state, keep)
    }

    fn take_apart<B, M, O, S>(
        &self,
        training: Training<&M, &O, &S>,
        mut state: TrainingState,
    ) -> Result<(TrainingState, Vec<Entry<'static>>), ZeroOptimizerError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
    {
        let parameters = Parameters::of::<B, M>(training.model);
        parameters.check_same(self.layout().parameters())?;

        let record = training.optimizer.to_record();
        let naming = Naming::of_layers(&parameters);
        let (tree, taken) = state::take_apart::<B, _>(record, self.layout(), naming)?;
        let of_optimizer = OptimizerState {
            settings: self.settings.clone(),
            tree,
        };
        state.optimizer = serde_json::to_value(&of_optimizer).map_err(refuse)?;

        let record = training.scheduler.to_record::<B>();
        let item = record.into_item::<FullPrecisionSettings>();
        state.scheduler = serde_json::to_value(&item).map_err(refuse)?;

        let taken = taken.into_iter();
        let mut entries: Vec<_> = taken
            .map(|(piece, bytes)| Entry::new(piece, bytes))
            .collect();
        for tensor in model::tensors::<B, M>(training.model, &parameters) {
            let ranges = match tensor.parameter {
                Some(parameter) if !self.layout().shard(parameter).is_empty() => {
                    self.layout().shard(parameter).to_vec()
                }
                Some(parameter) if self.layout().parameters()[parameter].elements() > 0 => continue,
                _ if self.group().rank() == 0 => {
                    core::iter::once(0..tensor.shape.iter().product()).collect()
                }
                _ => continue,
            };
            entries.extend(tensor.into_entries(ranges)?);
        }
        Ok((state, entries))
    }
}
