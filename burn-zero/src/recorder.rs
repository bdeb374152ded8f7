//! Whole trainings in sharded records: the model, the optimizer with all its layers, the scheduler and the small state.
//!
//! [`state`](crate::state) takes the record of the optimizer apart; the tensors of the model are handled here.

use core::iter;
use core::ops::Range;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Weak};

use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{BasicOps, Bool, Distribution, Float, Int, Tensor, TensorData};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::ZeroSettings;
use crate::backend::attach;
use crate::module::{AnyTensor, for_each_tensor, replace_tensors};
use crate::optimizer::{Parameters, Statistics};
use crate::record::{
    Entry, JointWork, Keep, RecordError, Saved, ShardedRecord, TensorSlice, TensorSpec,
    TrainingState, save_sharded,
};
use crate::reduce::GradientReducer;
use crate::state::{self, Item, WINDOW, from_file, in_file, refuse, to_file};

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
#[derive(Clone, Debug)]
pub struct Recorder {
    reducer: PreparedReducer,
    settings: ZeroSettings,
}

/// The gradient reducer of an optimizer since its last `prepare`. Weak, so that a recorder does not keep a dropped optimizer's ranks.
pub(crate) type PreparedReducer = Arc<Mutex<Weak<GradientReducer>>>;

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

impl Recorder {
    pub(crate) fn new(reducer: PreparedReducer, settings: ZeroSettings) -> Self {
        Self { reducer, settings }
    }

    fn reducer(&self) -> Result<Arc<GradientReducer>, RecordError> {
        let reducer = self.reducer.lock().upgrade();
        Ok(reducer.ok_or_else(|| refuse("the ZeroOptimizer of this recorder was dropped"))?)
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
        mut state: TrainingState,
        keep: Keep,
    ) -> Result<Saved, RecordError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
    {
        let reducer = self.reducer()?;
        let group = reducer.group();
        let work = JointWork::new(group, "split a training");
        let layout = reducer.layout();
        let split = || {
            let parameters = Parameters::of::<B, M>(training.model);
            parameters.check_same(layout.parameters())?;

            let record = training.optimizer.to_record();
            let ids = state::ids_of_layers(layout, &parameters);
            let (tree, tensors) = state::split::<B, _>(record, layout, &ids)?;
            let settings = self.settings.clone();
            let of_optimizer = serde_json::to_value(OptimizerState { settings, tree });
            state.optimizer = of_optimizer.map_err(refuse)?;
            let record = training.scheduler.to_record::<B>();
            let of_scheduler = serde_json::to_value(record.into_item::<FullPrecisionSettings>());
            state.scheduler = of_scheduler.map_err(refuse)?;

            let mut entries = Vec::new();
            for (tensor, mut bytes) in tensors {
                for range in tensor.ranges {
                    let after = bytes.split_off(range.len() * tensor.spec.element_bytes());
                    let slice = TensorSlice::new(tensor.spec.clone(), range);
                    entries.push(Entry::new(slice, core::mem::replace(&mut bytes, after)));
                }
            }
            for it in model_tensors::<B, M>(training.model, &parameters)? {
                let ModelTensor {
                    spec,
                    tensor,
                    parameter,
                } = it;
                let whole = TensorSlice::whole(spec.clone()).range;
                let ranges = match parameter {
                    Some(parameter) if !whole.is_empty() => layout.shard(parameter).to_vec(),
                    // Frozen tensors and buffers are the same on all ranks, so rank 0 saves them.
                    _ if layout.rank() == 0 => iter::once(whole).collect(),
                    _ => Vec::new(),
                };
                entries.extend(ranges.into_iter().map(|range| {
                    let (tensor, elements) = (tensor.clone(), range.clone());
                    let slice = TensorSlice::new(spec.clone(), range);
                    Entry::lazy(slice, move || Ok(read(tensor, elements).into()))
                }));
            }
            Ok::<_, RecordError>((state, entries))
        };
        let (state, entries) = work.end(split())?;
        // The record has rank 0's statistics: a training that continues must have the same as one that resumes.
        Statistics::of::<B, M>(training.model).share::<B, M>(training.model, group)?;
        save_sharded(dir, group, entries, state, keep)
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
        let reducer = self.reducer()?;
        let record = ShardedRecord::open_with(dir, reducer.group(), step)?;
        self.load_from::<B, M, O, S>(&reducer, record, training)
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
        let reducer = self.reducer()?;
        let Some(record) = ShardedRecord::open_last(dir, reducer.group())? else {
            return Ok((training, None));
        };
        let (training, state) = self.load_from::<B, M, O, S>(&reducer, record, training)?;
        Ok((training, Some(state)))
    }

    fn load_from<B, M, O, S>(
        &self,
        reducer: &Arc<GradientReducer>,
        mut record: ShardedRecord,
        training: Training<M, O, S>,
    ) -> Result<(Training<M, O, S>, TrainingState), RecordError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
    {
        let (layout, group) = (reducer.layout(), reducer.group());
        let (record, world_size) = (&mut record, group.world_size());
        let state = record.state(group.rank(), world_size);
        let Training {
            model,
            optimizer,
            scheduler,
        } = training;
        let mut work = JointWork::new(group, "load a training");
        let load = || {
            let device = model.devices().into_iter().next().unwrap_or_default();
            let parameters = Parameters::of::<B, M>(&model);
            parameters.check_same(layout.parameters())?;
            let OptimizerState { settings, tree } =
                serde_json::from_value(state.optimizer.clone()).map_err(refuse)?;
            let in_window = record.tensors().any(|it| it.name.starts_with(WINDOW));
            if in_window && (record.world_size() != world_size || settings != self.settings) {
                return Err(RecordError::PartialWindow {
                    path: record.path().to_owned(),
                    saved_by: format!("{} ranks, {settings:?}", record.world_size()),
                    wanted_by: format!("{world_size} ranks, {:?}", self.settings),
                });
            }
            let mut loaded = load_model(
                &model_tensors::<B, M>(&model, &parameters)?,
                record,
                &mut work,
            )?;

            let ids = state::ids_of_layers(layout, &parameters);
            let tree = state::join(&tree, layout, &ids, |wanted| {
                let (mut spec, mut ranges) = (wanted.spec.clone(), wanted.ranges.clone());
                if wanted.key.is_local {
                    // No tensor was saved for a parameter that had no gradient.
                    let Some(saved) = record.tensor(&spec.name) else {
                        return Ok(None);
                    };
                    let whole = TensorSlice::whole(saved);
                    (spec.shape, ranges) = (whole.tensor.shape, vec![whole.range]);
                }
                let bytes = record.read_ranges(&spec, &ranges, &mut work)?;
                Ok::<_, RecordError>(Some((spec.shape, bytes)))
            })?;
            let optimizer = optimizer.load_record(state::to_record::<B, _>(tree, &device)?);

            let item: Item<S::Record<B>, B> =
                serde_json::from_value(state.scheduler.clone()).map_err(refuse)?;
            let item = Record::<B>::from_item::<FullPrecisionSettings>(item, &device);
            let scheduler = scheduler.load_record::<B>(item);

            let model = replace_tensors::<B, M>(model, &mut |path, _| {
                loaded.remove(&format!("{MODEL}{path}"))
            });
            if !reducer.is_idle() {
                attach(reducer, &Parameters::of::<B, M>(&model).nodes);
                if world_size > 1 && in_window && self.settings.stage.shards_gradients() {
                    // The sums of the continued window are of reduced gradients.
                    reducer.set_reduced();
                }
            }
            Ok(Training {
                model,
                optimizer,
                scheduler,
            })
        };
        let loaded = load();
        Ok((work.end(loaded)?, state))
    }
}

/// A tensor of a module: a parameter, trained or frozen, or a buffer.
struct ModelTensor<B: Backend> {
    /// Its description in a record.
    spec: TensorSpec,
    tensor: AnyTensor<B>,
    /// Its position among the optimizer's parameters; `None` for a further path of a tied parameter.
    parameter: Option<usize>,
}

/// All tensors of a module, in its order.
///
/// # Errors
///
/// [`ZeroOptimizerError::State`](crate::ZeroOptimizerError::State).
fn model_tensors<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    parameters: &Parameters,
) -> Result<Vec<ModelTensor<B::InnerBackend>>, RecordError> {
    let (mut found, mut met) = (Vec::new(), HashSet::new());
    // `valid` detaches from graphs and updates running statistics.
    for_each_tensor::<B::InnerBackend, _>(&module.valid(), |path, id, tensor| {
        let (dtype, shape) = tensor.kind();
        let name = format!("{MODEL}{path}");
        let first = met.insert(id);
        let parameter = parameters.index.get(&id).copied().filter(|_| first);
        let spec = in_file(&name, dtype).map(|dtype| TensorSpec::new(name, dtype, shape));
        found.push(spec.map(|spec| ModelTensor {
            spec,
            tensor,
            parameter,
        }));
    });
    Ok(found.into_iter().collect::<Result<_, _>>()?)
}

/// The section of the model's tensors.
const MODEL: &str = "model/";

/// The model's tensors from a record, by name.
fn load_model<B: Backend>(
    model: &[ModelTensor<B>],
    record: &mut ShardedRecord,
    work: &mut JointWork,
) -> Result<HashMap<String, TensorData>, RecordError> {
    let known: HashSet<_> = model.iter().map(|tensor| &tensor.spec.name).collect();
    let saved = record.tensors().filter_map(|tensor| {
        let path = tensor.name.strip_prefix(MODEL)?;
        (!known.contains(&tensor.name)).then(|| path.to_owned())
    });
    if let Some(path) = saved.into_iter().next() {
        let reason =
            format!("has a tensor {path}, which the model has not: it is of another model");
        let path = record.path().to_owned();
        return Err(RecordError::OtherModel { path, reason });
    }
    let loaded = model.iter().map(|ModelTensor { spec, tensor, .. }| {
        let whole = TensorSlice::whole(spec.clone()).range;
        let bytes = record.read_ranges(spec, &[whole], work)?;
        let (dtype, shape) = tensor.kind();
        Ok((spec.name.clone(), from_file(bytes, shape, dtype)))
    });
    loaded.collect()
}

/// Elements of a tensor, as bytes of a file.
fn read<B: Backend>(tensor: AnyTensor<B>, elements: Range<usize>) -> Vec<u8> {
    fn part<B: Backend, K: BasicOps<B>>(
        tensor: K::Primitive,
        elements: Range<usize>,
    ) -> TensorData {
        // The number of dimensions does not matter for reading.
        let tensor = Tensor::<B, 1, K>::from_primitive(tensor);
        let all = tensor.shape().num_elements();
        match elements.len() == all {
            true => tensor.into_data(),
            false => tensor.reshape([all]).slice([elements]).into_data(),
        }
    }
    if elements.is_empty() {
        return Vec::new();
    }
    to_file(match tensor {
        AnyTensor::Float(tensor) => part::<B, Float>(tensor, elements),
        AnyTensor::Int(tensor) => part::<B, Int>(tensor, elements),
        AnyTensor::Bool(tensor) => part::<B, Bool>(tensor, elements),
    })
}

impl TrainingState {
    /// Adds the state of the backend's generator, for dropout and the like, in a loop that saves with a
    /// [`Recorder`](crate::Recorder).
    ///
    /// No backend of Burn 0.21 exposes its generator's state, so a new seed is drawn, saved, and given to the generator.
    /// A training that continues and one that [`resumes`](Self::seed_generator) then draw the same numbers, if they save at
    /// the same steps. A training that does not save draws other numbers from here on.
    ///
    /// A backend has one generator a process. So this is exact where a process is a rank; ranks that are threads draw from the
    /// same one in an order that no record can restore. The caller saves other generators, such as a loader's, in
    /// [`user`](Self::user), or derives them from the step.
    #[must_use]
    pub fn with_generator<B: Backend>(mut self, device: &B::Device) -> Self {
        let seed = draw_seed::<B>(device);
        B::seed(device, seed);
        self.generator = json!({ SEED: seed });
        self
    }

    /// Seeds the generator of the backend as [`with_generator`](Self::with_generator) did. Whether there was a seed: there is none at
    /// another number of ranks, where the caller seeds each rank anew.
    pub fn seed_generator<B: Backend>(&self, device: &B::Device) -> bool {
        let seed = self.generator.get(SEED).and_then(Value::as_u64);
        if let Some(seed) = seed {
            B::seed(device, seed);
        }
        seed.is_some()
    }
}

const SEED: &str = "seed";

/// 64 bits, 16 from each number: an f32 holds them exactly.
fn draw_seed<B: Backend>(device: &B::Device) -> u64 {
    const VALUES: f64 = 65_536.0;
    let numbers = Tensor::<B, 1>::random([4], Distribution::Uniform(0.0, VALUES), device);
    let numbers = numbers.into_data();
    let bits = numbers
        .iter::<f64>()
        .map(|number| number.min(VALUES - 1.0) as u64);
    bits.fold(0, |seed, bits| seed << 16 | bits)
}
