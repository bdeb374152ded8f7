//! Loading a training.

use std::collections::HashMap;
use std::path::Path;

use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::DType;
use burn::tensor::backend::AutodiffBackend;
use serde_json::Value as Json;

use super::model::{self, ModelTensor};
use super::{OptimizerState, Recorder, Training};
use crate::ZeroOptimizerError;
use crate::backend::attach;
use crate::module::replace_tensors;
use crate::optimizer::Parameters;
use crate::record::{Piece, RecordError, ShardedRecord, TrainingState, agree, split};
use crate::reduce::Arriving;
use crate::state::{Item, Naming, WINDOW, by_name, from_file, put_together, refuse, wanted};

/// What of a record this rank needs.
struct Wanted {
    /// First those of the model, one a tensor; then those of the optimizer.
    pieces: Vec<Piece>,
    model: Vec<ModelTensor>,
    tree: Json,
    /// Whether the record is of the middle of a window of micro-batches.
    in_window: bool,
}

impl Recorder {
    /// Loads the last record in `dir`, or that of `step`, into a training that was made as the saved one: bit for bit what was
    /// saved, at any number of ranks and any stage. Collective; the optimizer must be
    /// [prepared](crate::ZeroOptimizer::prepare). Returns the training and the rest of what was saved: the backend's generator is as it
    /// was until [`seed_generator`](TrainingState::seed_generator).
    ///
    /// Costs a read of the whole model and of this rank's share of the optimizer's state on every rank, and host memory
    /// for them.
    ///
    /// # Errors
    ///
    /// On all ranks if on one: [`RecordError::PartialWindow`] for a record of an incomplete window of other ranks,
    /// [`RecordError::OtherModel`], [`RecordError::MissingEntry`] and [`RecordError::ShapeDiffers`] for one of another model,
    /// [`RecordError::State`] for one of another optimizer; those of [`load_sharded`](crate::load_sharded).
    pub fn load<B, M, O, S>(
        &self,
        dir: &Path,
        step: Option<u64>,
        training: Training<M, O, S>,
    ) -> Result<(Training<M, O, S>, TrainingState), RecordError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
    {
        let record = ShardedRecord::open_with(dir, self.group(), step)?;
        self.take_over::<B, M, O, S>(record, training)
    }

    /// [`load`](Self::load)s the last record in `dir` if there is any; else gives the training back as it came. Collective.
    ///
    /// # Errors
    ///
    /// Those of [`load`](Self::load). A record that is there and cannot be read is an error, not a new start.
    #[allow(
        clippy::type_complexity,
        reason = "the training that came, and what was found"
    )]
    pub fn resume<B, M, O, S>(
        &self,
        dir: &Path,
        training: Training<M, O, S>,
    ) -> Result<(Training<M, O, S>, Option<TrainingState>), RecordError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
    {
        match ShardedRecord::open_last(dir, self.group())? {
            None => Ok((training, None)),
            Some(record) => {
                let (training, state) = self.take_over::<B, M, O, S>(record, training)?;
                Ok((training, Some(state)))
            }
        }
    }

    fn take_over<B, M, O, S>(
        &self,
        mut record: ShardedRecord,
        training: Training<M, O, S>,
    ) -> Result<(Training<M, O, S>, TrainingState), RecordError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
    {
        let group = self.group();
        let state = record.state(group.rank(), group.world_size());
        let parameters = Parameters::of::<B, M>(&training.model);
        let wanted = self.wanted::<B, M>(&record, &state, &training.model, &parameters);
        let (wanted, done) = split(wanted);
        agree(group, "look into a record", done)?;
        let wanted = wanted.expect("this rank looked into it if all agree");

        let mut loaded: Vec<Vec<u8>> = Vec::new();
        record.load(group, &wanted.pieces, |_, bytes| {
            loaded.push(bytes);
            Ok(())
        })?;
        let built = self.build::<B, M, O, S>(training, &parameters, &state, wanted, loaded);
        let (built, done) = split(built.map_err(RecordError::from));
        agree(group, "take a record over", done)?;
        Ok((built.expect("this rank took it over if all agree"), state))
    }

    fn wanted<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        record: &ShardedRecord,
        state: &TrainingState,
        module: &M,
        parameters: &Parameters,
    ) -> Result<Wanted, RecordError> {
        parameters.check_same(self.layout().parameters())?;
        let OptimizerState { settings, tree } =
            serde_json::from_value(state.optimizer.clone()).map_err(refuse)?;
        let names: Vec<_> = record.tensors().collect();

        let model = model::tensors::<B, M>(module, parameters);
        let saved = names.iter().map(|tensor| &*tensor.name);
        if let Some(path) = model::first_unknown(saved, &model) {
            return Err(RecordError::OtherModel {
                path: record.path().to_owned(),
                tensor: path.to_owned(),
            });
        }
        let pieces = model.iter().map(|tensor| Ok(Piece::whole(tensor.spec()?)));
        let mut pieces: Vec<_> = pieces.collect::<Result<_, ZeroOptimizerError>>()?;

        let mut local = names
            .iter()
            .filter(|tensor| tensor.name.starts_with(&format!("{WINDOW}/")));
        let in_window = local.clone().next().is_some();
        if in_window
            && (record.world_size() != self.group().world_size() || settings != self.settings)
        {
            return Err(RecordError::PartialWindow {
                path: record.path().to_owned(),
                saved_by: format!("{} ranks, {settings:?}", record.world_size()),
                wanted_by: format!("{} ranks, {:?}", self.group().world_size(), self.settings),
            });
        }
        let local = local
            .by_ref()
            .map(|tensor| (tensor.name.clone(), tensor.shape.clone()));
        let naming = Naming::of_layers(parameters);
        let of_optimizer = wanted(&tree, self.layout(), naming, local.collect())?;
        pieces.extend(of_optimizer.into_iter().map(|(_, piece)| piece));
        Ok(Wanted {
            pieces,
            model,
            tree,
            in_window,
        })
    }

    fn build<B, M, O, S>(
        &self,
        training: Training<M, O, S>,
        parameters: &Parameters,
        state: &TrainingState,
        wanted: Wanted,
        loaded: Vec<Vec<u8>>,
    ) -> Result<Training<M, O, S>, ZeroOptimizerError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
    {
        let Training {
            model,
            optimizer,
            scheduler,
        } = training;
        let device = model.devices().into_iter().next().unwrap_or_default();
        let mut loaded = loaded.into_iter();
        let tensors_of_model = wanted.model.len();
        let mut of_model: HashMap<String, (Vec<u8>, DType, Vec<usize>)> = wanted
            .model
            .into_iter()
            .zip(loaded.by_ref())
            .map(|(tensor, bytes)| (tensor.path, (bytes, tensor.dtype, tensor.shape)))
            .collect();
        let pieces = wanted.pieces.into_iter().skip(tensors_of_model);
        let tensors = by_name(pieces.zip(loaded));
        let naming = Naming::of_layers(parameters);
        let record =
            put_together::<B, O::Record>(&wanted.tree, self.layout(), naming, tensors, &device)?;
        let optimizer = optimizer.load_record(record);

        let item: Item<S::Record<B>, B> =
            serde_json::from_value(state.scheduler.clone()).map_err(refuse)?;
        let record = Record::<B>::from_item::<FullPrecisionSettings>(item, &device);
        let scheduler = scheduler.load_record::<B>(record);

        let model = replace_tensors::<B, M>(model, &mut |path, _| {
            let (bytes, dtype, shape) = of_model.remove(path)?;
            Some(from_file(bytes, shape, dtype))
        });
        self.meet::<B, M>(&model, wanted.in_window);
        Ok(Training {
            model,
            optimizer,
            scheduler,
        })
    }

    /// This thread looks out for the new leaves; the sums of a window that goes on are what was reduced.
    fn meet<B: AutodiffBackend, M: AutodiffModule<B>>(&self, model: &M, in_window: bool) {
        if self.group().world_size() == 1 {
            return;
        }
        attach(&self.reducer, &Parameters::of::<B, M>(model).nodes);
        if in_window && self.settings.stage.shards_gradients() {
            self.reducer.note(Arriving::Reduced);
        }
    }
}
