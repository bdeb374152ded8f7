//! Whole trainings in sharded records: the model, the optimizer with all its layers, the scheduler and the small state.
//!
//! `model.rs` handles the tensors of a module, [`state`](crate::state) those of an optimizer, `generator.rs` the random generator.

mod generator;
mod model;

use core::fmt;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::backend::AutodiffBackend;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ZeroSettings;
use crate::backend::attach;
use crate::group::ProcessGroup;
use crate::module::replace_tensors;
use crate::optimizer::{Parameters, Statistics};
use crate::record::{
    AtWork, Entry, JointWork, Keep, RecordError, Saved, ShardedRecord, TensorSlice, TrainingState,
    save_sharded,
};
use crate::reduce::{GradientReducer, Layout};
use crate::state::{self, Item, StateIds, StateTensor, WINDOW, from_file, refuse};

/// A training: a model, its optimizer with all layers around it, and its learning-rate scheduler (or a number, for a constant
/// rate).
#[derive(Clone, Debug, PartialEq)]
pub struct Training<M, O, S> {
    /// The model.
    pub model: M,
    /// The outermost optimizer, such as a loss scaler's around an accumulation's around the
    /// [`ZeroOptimizer`](crate::ZeroOptimizer).
    pub optimizer: O,
    /// The scheduler.
    pub scheduler: S,
}

impl<M, O, S> Training<M, O, S> {
    /// What [`Recorder::save`] takes.
    pub fn by_ref(&self) -> Training<&M, &O, &S> {
        Training {
            model: &self.model,
            optimizer: &self.optimizer,
            scheduler: &self.scheduler,
        }
    }
}

/// Saves and loads trainings whose optimizer contains a [`ZeroOptimizer`](crate::ZeroOptimizer). Made by
/// [`ZeroOptimizer::recorder`](crate::ZeroOptimizer::recorder) before that optimizer moves into its layers.
///
/// One record holds
///
/// | what | where in it | by whom |
/// |---|---|---|
/// | every tensor of the model, whole, in its own type | `model/<path>` | each rank its shard; rank 0 what is not trained |
/// | the optimizer's state, whole tensors | `optimizer/<path>` | each rank its shard |
/// | step counts, loss scale, counters of all layers; the scheduler | the manifest | the same on all ranks |
/// | the sums of a window of micro-batches that is not complete | `window/<rank>/<path>` | each rank its own |
/// | step, and what the caller adds ([`TrainingState`](crate::record::TrainingState)) | the manifest | the caller, all ranks the same |
/// | a seed for the backend's generator, if the caller [takes one](crate::record::TrainingState::with_generator) | the manifest | each rank its own |
///
/// so any number of ranks, at any stage, loads it bit for bit, and [`consolidate`](crate::consolidate) makes a file of it that
/// plain Burn loads. An incomplete window can be loaded only with the same number of ranks and the same sharding: save
/// after an update.
///
/// ```
/// use std::sync::Arc;
/// use burn::{backend::Autodiff, nn, optim::{AdamWConfig, GradientsParams, Optimizer}, prelude::*};
/// use burn_zero::record::Keep;
/// use burn_zero::{GroupOptions, Recorder, Sharded, ZeroSettings, Stage, ThreadGroup, Training, ZeroOptimizer};
///
/// type B = Sharded<Autodiff<burn_flex::Flex>>;
///
/// # let root = tempfile::tempdir()?;
/// # let dir = root.path();
/// // Two ranks save after two steps; three load, and take three more.
/// for (ranks, steps) in [(2, 2), (3, 3)] {
///     let trained = ThreadGroup::spawn(ranks, GroupOptions::default(), |group| {
///         let device = Default::default();
///         let adam = AdamWConfig::new().init();
///         let mut optimizer = ZeroOptimizer::new(adam, Arc::new(group), ZeroSettings::stage(Stage::Gradients))?;
///         let model: nn::Linear<B> = optimizer.prepare(nn::LinearConfig::new(4, 3).init(&device))?;
///         let recorder = optimizer.recorder()?;
///
///         // .. here the layers go around the optimizer ..
///         let training = Training { model, optimizer, scheduler: 1e-2 };
///         let (mut training, found) = recorder.resume(dir, training)?;
///         let mut state = found.unwrap_or_default();
///         for _ in 0..steps {
///             let loss = training.model.forward(Tensor::<B, 2>::ones([8, 4], &device)).mean();
///             let gradients = GradientsParams::from_grads(loss.backward(), &training.model);
///             training.model = training.optimizer.step(training.scheduler, training.model, gradients);
///             state.step += 1;
///         }
///         recorder.save(dir, training.by_ref(), state.clone(), Keep::default())?;
///         Ok::<_, burn_zero::RecordError>(state.step)
///     })?;
///     assert_eq!(*trained[0].as_ref().unwrap(), if ranks == 2 { 2 } else { 5 });
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Follows PyTorch's `torch.distributed.checkpoint` with FSDP's sharded state dicts, and DeepSpeed's universal checkpoints.
#[derive(Clone)]
pub struct Recorder {
    reducer: Arc<GradientReducer>,
    settings: ZeroSettings,
}

/// What the manifest holds of the optimizer.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OptimizerState {
    /// The settings that it was saved with.
    #[serde(rename = "sharding")]
    settings: ZeroSettings,
    /// All of its record that is no tensor.
    tree: Value,
}

/// The section of the model's tensors.
const MODEL: &str = "model";

impl Recorder {
    pub(crate) fn new(reducer: Arc<GradientReducer>, settings: ZeroSettings) -> Self {
        Self { reducer, settings }
    }

    fn layout(&self) -> &Layout {
        self.reducer.layout()
    }

    fn group(&self) -> &dyn ProcessGroup {
        self.reducer.group()
    }

    /// Saves a training as one record in `dir`, as [`save_sharded`] does. Collective: all ranks call it, between two steps.
    ///
    /// `state` has the number of updates, which names the record, and if wanted
    /// [this rank's generator](TrainingState::with_generator) and state of the caller. The optimizer's and the scheduler's are filled in.
    ///
    /// Costs one write of this rank's shard of model and optimizer, and host memory for its shard of the optimizer's state;
    /// the model is read from the device tensor by tensor. Running statistics, such as BatchNorm's, become those of rank 0 on all
    /// ranks ([`share_statistics`](crate::ZeroOptimizer::share_statistics)).
    ///
    /// # Errors
    ///
    /// On all ranks if on one: [`RecordError::State`] if a layer keeps state that cannot be split, or with
    /// [`ZeroOptimizerError::OtherModel`](crate::ZeroOptimizerError::OtherModel); [`RecordError::RanksDiffer`] if ranks are not at the same step; those of
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
        let work = JointWork::new(self.group(), "split a training");
        let (state, entries) = work.end(self.split::<B, M, O, S>(&training, state))?;
        // The record has rank 0's statistics: a training that continues must have the same as one that resumes.
        Statistics::of::<B, M>(training.model).share::<B, M>(training.model, self.group())?;
        save_sharded(dir, self.group(), entries, state, keep)
    }

    /// What this rank saves of a training.
    fn split<B, M, O, S>(
        &self,
        training: &Training<&M, &O, &S>,
        mut state: TrainingState,
    ) -> Result<(TrainingState, Vec<Entry<'static>>), RecordError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
    {
        let layout = self.layout();
        let parameters = Parameters::of::<B, M>(training.model);
        parameters.check_same(layout.parameters())?;

        let record = training.optimizer.to_record();
        let ids = StateIds::of_layers(&parameters);
        let (tree, tensors) = state::split::<B, _>(record, layout, &ids)?;
        let settings = self.settings.clone();
        let of_optimizer = serde_json::to_value(OptimizerState { settings, tree });
        state.optimizer = of_optimizer.map_err(refuse)?;
        let record = training.scheduler.to_record::<B>();
        let of_scheduler = serde_json::to_value(record.into_item::<FullPrecisionSettings>());
        state.scheduler = of_scheduler.map_err(refuse)?;

        let mut entries = Vec::new();
        for (StateTensor { spec, ranges, .. }, mut bytes) in tensors {
            for range in ranges {
                let after = bytes.split_off(range.len() * spec.element_bytes());
                let slice = TensorSlice::new(spec.clone(), range);
                entries.push(Entry::new(slice, core::mem::replace(&mut bytes, after)));
            }
        }
        for tensor in model::tensors::<B, M>(training.model, &parameters) {
            let elements = tensor.shape.iter().product();
            let ranges = match tensor.parameter {
                Some(parameter) if elements > 0 => layout.shard(parameter).to_vec(),
                // Frozen tensors and buffers are the same on all ranks, so rank 0 saves them.
                _ if self.group().rank() == 0 => core::iter::once(0..elements).collect(),
                _ => Vec::new(),
            };
            entries.extend(tensor.into_entries(ranges)?);
        }
        Ok((state, entries))
    }

    /// Loads the last record in `dir`, or that of `step`, into a training constructed like the saved one: bit for bit what was
    /// saved, at any number of ranks and any stage. Collective; the optimizer must be
    /// [prepared](crate::ZeroOptimizer::prepare). Returns the training and the saved state. The backend's generator does not change
    /// until [`seed_generator`](TrainingState::seed_generator).
    ///
    /// Costs a read of the whole model and of this rank's shard of the optimizer's state on every rank, and host memory
    /// for the model and twice the shard.
    ///
    /// # Errors
    ///
    /// On all ranks if on one: [`RecordError::PartialWindow`] for a record of an incomplete window of other ranks,
    /// [`RecordError::OtherModel`] for one of another model, [`RecordError::State`] for one of another optimizer; those of
    /// [`load_sharded`](crate::load_sharded).
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
        self.load_from::<B, M, O, S>(record, training)
    }

    /// [`load`](Self::load)s the last record in `dir` if there is one; otherwise returns the training unchanged. Collective.
    ///
    /// # Errors
    ///
    /// Those of [`load`](Self::load). A record that exists and cannot be read is an error.
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
                let (training, state) = self.load_from::<B, M, O, S>(record, training)?;
                Ok((training, Some(state)))
            }
        }
    }

    fn load_from<B, M, O, S>(
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
        let mut work = JointWork::new(group, "load a training");
        let joined = self.join::<B, M, O, S>(&mut record, &state, training, &mut || work.at_work());
        Ok((work.end(joined)?, state))
    }

    /// The training with its state from a record.
    fn join<B, M, O, S>(
        &self,
        record: &mut ShardedRecord,
        state: &TrainingState,
        training: Training<M, O, S>,
        at_work: AtWork,
    ) -> Result<Training<M, O, S>, RecordError>
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
        let (layout, world_size) = (self.layout(), self.group().world_size());
        let device = model.devices().into_iter().next().unwrap_or_default();
        let parameters = Parameters::of::<B, M>(&model);
        parameters.check_same(layout.parameters())?;
        let OptimizerState { settings, tree } =
            serde_json::from_value(state.optimizer.clone()).map_err(refuse)?;
        let window = format!("{WINDOW}/");
        let in_window = record.tensors().any(|it| it.name.starts_with(&window));
        if in_window && (record.world_size() != world_size || settings != self.settings) {
            return Err(RecordError::PartialWindow {
                path: record.path().to_owned(),
                saved_by: format!("{} ranks, {settings:?}", record.world_size()),
                wanted_by: format!("{world_size} ranks, {:?}", self.settings),
            });
        }

        let tensors = model::tensors::<B, M>(&model, &parameters);
        let mut names = record.tensors().map(|tensor| tensor.name);
        if let Some(path) = names.find_map(|name| model::unknown(&name, &tensors)) {
            let path_of_record = record.path().to_owned();
            return Err(RecordError::OtherModel {
                path: path_of_record,
                reason: format!(
                    "has a tensor {path}, which the model has not: it is of another model"
                ),
            });
        }
        drop(names);
        let mut loaded = HashMap::new();
        for tensor in tensors {
            let slice = TensorSlice::whole(tensor.spec()?);
            let bytes = record.read_ranges(&slice.tensor, &[slice.range], at_work)?;
            loaded.insert(tensor.path, from_file(bytes, tensor.shape, tensor.dtype));
        }

        let ids = StateIds::of_layers(&parameters);
        let tree = state::join(&tree, layout, &ids, |wanted| {
            let mut spec = wanted.spec.clone();
            let mut ranges = wanted.ranges.clone();
            if wanted.key.is_local {
                // No tensor was saved for a parameter that had no gradient.
                let Some(saved) = record.tensor(&spec.name) else {
                    return Ok(None);
                };
                spec.shape = saved.shape;
                ranges = core::iter::once(0..spec.elements().unwrap_or_default()).collect();
            }
            let bytes = record.read_ranges(&spec, &ranges, at_work)?;
            Ok::<_, RecordError>(Some((spec.shape, bytes)))
        })?;
        let optimizer = optimizer.load_record(state::to_record::<B, _>(tree, &device)?);

        let item: Item<S::Record<B>, B> =
            serde_json::from_value(state.scheduler.clone()).map_err(refuse)?;
        let record = Record::<B>::from_item::<FullPrecisionSettings>(item, &device);
        let scheduler = scheduler.load_record::<B>(record);

        let model = replace_tensors::<B, M>(model, &mut |path, _| loaded.remove(path));
        if !self.reducer.is_idle() {
            attach(&self.reducer, &Parameters::of::<B, M>(&model).nodes);
            if world_size > 1 && in_window && self.settings.stage.shards_gradients() {
                // The sums of the continued window are of reduced gradients.
                self.reducer.set_reduced();
            }
        }
        Ok(Training {
            model,
            optimizer,
            scheduler,
        })
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
