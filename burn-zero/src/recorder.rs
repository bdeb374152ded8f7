//! Whole trainings in sharded records: the model, the optimizer with all its layers, the scheduler
//! and the small state.
//!
//! [`state`](crate::state) splits the record of the optimizer; the tensors of the model are handled
//! here.

use core::ops::Range;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Weak};

use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, TensorData};
use burn_backend::tensor::FloatTensor;
use serde_json::Value as Json;

use crate::error::ZeroError;
use crate::host::not_read;
use crate::parameters::module::{device_of, replace_tensors, transposed_in_stores};
use crate::parameters::{
    NewValue, ParameterStore, ParameterVersion, Parameters, Shard, Statistics,
};
use crate::record::{
    Entry, Keep, MODEL, RecordFault, Saved, ShardedRecord, TensorSlice, TensorSpec, TrainingState,
    end, save_sharded,
};
use crate::reduce::Layout;
use crate::state::{self, Item, StateTensor, from_file, in_file, refuse, to_file};
use crate::update::{LastPrepared, Prepared};
use burn_decorator::module::{AnyTensor, for_each_float, for_each_tensor};

/// A training: a model, its update over ranks, and its learning-rate scheduler (or a number, for a
/// constant rate).
#[derive(Clone, Debug, PartialEq)]
pub struct Training<M, O, S> {
    /// The model.
    pub model: M,
    /// The update.
    pub optimizer: O,
    /// The scheduler.
    pub scheduler: S,
}

impl<M, O, S> Training<M, O, S> {
    /// The references that [`Recorder::save`] takes.
    pub fn by_ref(&self) -> Training<&M, &O, &S> {
        Training {
            model: &self.model,
            optimizer: &self.optimizer,
            scheduler: &self.scheduler,
        }
    }
}

/// Saves and loads trainings whose update reduces over ranks. Made by
/// [`RankReduction::recorder`](crate::RankReduction::recorder) after the model was prepared.
///
/// One record holds
///
/// | what | where in it | by whom |
/// |---|---|---|
/// | every tensor of the model, whole, in its own type | `model/<path>` | each rank its shard; rank 0 what is not trained |
/// | the optimizer's state, whole tensors | `optimizer/<path>` | each rank its shard |
/// | the averages of the weights, if the update keeps them | `optimizer/average/<path>` | each rank its shard |
/// | step counts, loss scale, counters of all layers; the scheduler | the manifest | the same on all ranks |
/// | step, and what the caller adds ([`TrainingState`](crate::record::TrainingState)) | the manifest | the caller, all ranks the same |
///
/// so any number of ranks, at any stage, loads it bit for bit, and
/// [`consolidate`](crate::consolidate) makes a file of it that plain Burn loads. The sums of an
/// incomplete window of micro-batches are each rank's own, so a save within a window is refused:
/// save after an update. No backend of Burn 0.21 exposes its generator's state: a loop that draws
/// from the generator puts a seed into [`user`](crate::record::TrainingState::user), and seeds each
/// rank's generator with that seed and the rank when it saves and after it has loaded. Ranks that
/// draw [numbers of their own](crate::RankReduction::with_seed) all take the same seed.
///
/// ```
/// use std::sync::Arc;
/// use burn::{backend::Autodiff, nn, optim::AdamWConfig, prelude::*};
/// use burn_update::{Update, UpdateError};
/// use burn_zero::record::Keep;
/// use burn_zero::{GroupOptions, RankReduction, ReduceOverRanks, Sharded, Stage, ThreadGroup, Training, ZeroSettings};
///
/// type B = Sharded<Autodiff<burn_flex::Flex>>;
///
/// # let root = tempfile::tempdir()?;
/// # let dir = root.path();
/// // Two ranks save after two steps; three load, and take three more.
/// for (ranks, steps) in [(2, 2), (3, 3)] {
///     let trained = ThreadGroup::spawn(ranks, GroupOptions::default(), |group| {
///         let device = Default::default();
///         let reduction = RankReduction::new(ZeroSettings::stage(Stage::Gradients), Arc::new(group))?;
///         let mut update = Update::new(AdamWConfig::new().init()).reduce_by(&reduction)?;
///         let model: nn::Linear<B> = update.prepare(nn::LinearConfig::new(4, 3).init(&device))?;
///         let recorder = reduction.recorder()?;
///
///         let training = Training { model, optimizer: update, scheduler: 1e-2 };
///         let (mut training, found) = recorder.load(dir, None, training)?;
///         let mut state = found.unwrap_or_default();
///         for _ in 0..steps {
///             let loss = training.model.forward(Tensor::<B, 2>::ones([8, 4], &device)).mean();
///             let gradients = training.optimizer.backward(&training.model, loss);
///             training.model = training.optimizer.step(training.scheduler, training.model, gradients)?;
///             state.step += 1;
///         }
///         recorder.save(dir, training.by_ref(), state.clone(), Keep::default())?;
///         Ok::<_, Box<dyn std::error::Error + Send + Sync>>(state.step)
///     })?;
///     assert_eq!(*trained[0].as_ref().unwrap(), if ranks == 2 { 2 } else { 5 });
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Follows PyTorch's `torch.distributed.checkpoint` with FSDP's sharded state dicts, and
/// DeepSpeed's universal checkpoints.
#[derive(Clone, Debug)]
pub struct Recorder {
    /// Weak, so that a recorder does not keep the group of a dropped update alive.
    of_update: Weak<LastPrepared>,
}

impl Recorder {
    /// Of what an update has prepared.
    pub(crate) fn new(of_update: &Arc<LastPrepared>) -> Self {
        Self {
            of_update: Arc::downgrade(of_update),
        }
    }

    /// The model that the update has prepared.
    fn prepared(&self) -> Result<Prepared, ZeroError> {
        let of_update = self.of_update.upgrade();
        let prepared = of_update.and_then(|prepared| prepared.lock().clone());
        Ok(prepared.ok_or_else(|| refuse("the update of this recorder was dropped"))?)
    }

    /// Saves a training as one record in `dir`, as [`save_sharded`] does. Collective: all ranks
    /// call it, between two steps.
    ///
    /// `state` has the number of updates, which names the record, and if wanted state of the
    /// caller. The rest is filled in. To find out which matrices Burn's stores transpose, their
    /// save mappers are called with one of two rows and three columns.
    ///
    /// Costs one write of this rank's shard of model and optimizer, and host memory for twice its
    /// shard of the optimizer's state at the peak, once while it is written; the model is read from
    /// the device tensor by tensor, at stage 3 of several ranks from this rank's shards. Running
    /// statistics, such as BatchNorm's, become those of rank 0 on all ranks
    /// ([`share_statistics`](crate::RankReduction::share_statistics)).
    ///
    /// # Errors
    ///
    /// On all ranks if on one: [`ShardingFault::State`](crate::ShardingFault::State) if a layer
    /// keeps state that cannot be split, such as an incomplete window, or with
    /// [`ShardingFault::OtherModel`](crate::ShardingFault::OtherModel), or with
    /// [`ShardingFault::StateDtype`](crate::ShardingFault::StateDtype) for state of parameters that
    /// are not of the device's default float type; [`RecordFault::Scheduler`] if the scheduler's
    /// state has a number that is not finite; [`RecordFault::RanksDiffer`] if ranks are not at the
    /// same step; those of [`save_sharded`].
    pub fn save<B, M, O, S>(
        &self,
        dir: &Path,
        training: Training<&M, &O, &S>,
        mut state: TrainingState,
        keep: Keep,
    ) -> Result<Saved, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
    {
        let Prepared { reducer, store } = self.prepared()?;
        let (layout, group) = (reducer.layout(), reducer.group());
        let split = || {
            let parameters = Parameters::of::<B, M>(training.model);
            parameters.check_same(layout.parameters())?;
            let record = training.optimizer.to_record();
            let ids = state::ids_of_shards(layout);
            let (tree, tensors) = state::split::<B, _>(record, layout, &ids)?;
            state.optimizer = tree;
            let item: Item<S::Record<B>, B> = training.scheduler.to_record::<B>().into_item();
            state.scheduler = state::json(&item).map_err(of_scheduler)?;
            let transposed = transposed_in_stores(training.model).into_iter();
            state.transposed = transposed.map(|path| format!("{MODEL}{path}")).collect();

            let versions = store.versions_of::<B, M>(training.model);
            // Only now: a rank that has no state of the parameter goes on, and `versions_of` may be
            // a collective.
            let device = device_of::<B, M>(training.model);
            let loaded = state::loaded_dtype::<B::InnerBackend>(&device);
            state::check_types(&tensors, layout, loaded)?;
            let mut entries: Vec<_> = tensors.into_iter().flat_map(entries_of_state).collect();
            for tensor in model_tensors::<B, M>(training.model, &parameters, &store)? {
                let ranges = tensor.saved(store.layout());
                let entry = |range| tensor.entry(range, store.layout(), &versions);
                entries.extend(ranges.into_iter().map(entry));
            }
            Ok::<_, ZeroError>((state, entries))
        };
        let (state, entries) = end(group, "split a training", split())?;
        // The record has rank 0's statistics: a training that continues must have the same as one
        // that resumes.
        Statistics::of::<B, M>(training.model).share::<B, M>(training.model, group)?;
        save_sharded(dir, group, entries, state, keep)
    }

    /// Loads the last record in `dir`, or that of `step`, into a training constructed like the
    /// saved one: bit for bit what was saved, at any number of ranks and any stage. Collective; the
    /// model must be [prepared](burn_update::Update::prepare). Returns the training and the
    /// saved state, or the unchanged training and `None` if there is no record and `step` is
    /// `None`.
    ///
    /// Costs a read of the whole model and of this rank's shard of the optimizer's state on every
    /// rank, and host memory for the model and twice the shard; at stage 3 of several ranks, of
    /// this rank's shard of the parameters instead of the model.
    ///
    /// # Errors
    ///
    /// On all ranks if on one: [`RecordFault::OtherModel`] for a record of another model,
    /// [`ShardingFault::State`](crate::ShardingFault::State) for one of another optimizer, or with
    /// [`ShardingFault::StateDtype`](crate::ShardingFault::StateDtype),
    /// [`RecordFault::Scheduler`] for one of another scheduler; those of
    /// [`load_sharded`](crate::load_sharded). A record that exists and cannot be read is an error.
    #[allow(
        clippy::type_complexity,
        reason = "the training that came, and what was found"
    )]
    pub fn load<B, M, O, S>(
        &self,
        dir: &Path,
        step: Option<u64>,
        mut training: Training<M, O, S>,
    ) -> Result<(Training<M, O, S>, Option<TrainingState>), ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
    {
        let prepared = self.prepared()?;
        let group = prepared.reducer.group();
        let Some(mut record) = ShardedRecord::open_with(dir, group, step)? else {
            return Ok((training, None));
        };
        let state = record.state().clone();
        let load = || {
            let Prepared { reducer, store } = &prepared;
            let device = device_of::<B, M>(&training.model);
            let parameters = Parameters::of::<B, M>(&training.model);
            parameters.check_same(reducer.layout().parameters())?;
            let tensors = model_tensors::<B, M>(&training.model, &parameters, store)?;
            let mut of_model = load_model(&tensors, store, &device, &mut record)?;
            let layout = reducer.layout();
            let (optimizer, tree) = (training.optimizer, &state.optimizer);
            training.optimizer =
                load_optimizer::<B, M, O>(optimizer, tree, layout, &device, &mut record)?;
            let (scheduler, saved) = (training.scheduler, &state.scheduler);
            training.scheduler = load_scheduler::<B, S>(scheduler, saved, &device)?;

            let model = replace_tensors::<B, M>(training.model, &mut |path, _| {
                of_model.whole.remove(&format!("{MODEL}{path}"))
            });
            let at = format!("after the record of step {}", state.step);
            let loaded = Prepared {
                store: store.loaded::<B, M>(of_model.shards, &model, at),
                reducer: reducer.clone(),
            };
            let (model, _) = loaded.put::<B, M>(Box::new(model));
            training.model = *model;
            if let Some(prepared) = self.of_update.upgrade() {
                *prepared.lock() = Some(loaded);
            }
            Ok::<_, ZeroError>(training)
        };
        let loaded = end(group, "load a training", load())?;
        Ok((loaded, Some(state)))
    }
}

/// An optimizer with the state of a record: the tensors of its tree, of which this rank reads its
/// shards.
///
/// # Errors
///
/// [`ShardingFault::State`](crate::ShardingFault::State),
/// [`ShardingFault::StateDtype`](crate::ShardingFault::StateDtype); those of the record.
fn load_optimizer<B, M, O>(
    optimizer: O,
    tree: &Json,
    layout: &Layout,
    device: &B::Device,
    record: &mut ShardedRecord,
) -> Result<O, ZeroError>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
{
    let ids = state::ids_of_shards(layout);
    let joined = state::join(tree, layout, &ids, |wanted| {
        let StateTensor {
            spec,
            former_name,
            ranges,
            ..
        } = wanted;
        let is_former = !record.has(&spec.name) && record.has(former_name);
        let saved = if is_former {
            &TensorSpec::new(former_name.clone(), spec.dtype, spec.shape.clone())
        } else {
            spec
        };
        Ok::<_, ZeroError>(Some(record.read_ranges(saved, ranges)?))
    })?;
    let saved = state::to_record::<B, _>(joined, device)
        .map_err(|error| refuse(format!("{error}; {OF_NO_UPDATE}")))?;
    let optimizer = optimizer.load_record(saved);
    let loaded = state::loaded_dtype::<B::InnerBackend>(device);
    let mut specs = layout.parameters().iter();
    if loaded != DType::F32 || specs.any(|parameter| parameter.dtype != DType::F32) {
        // Checks what was loaded, because the record may be of an optimizer that keeps other state.
        let (_, tensors) = state::split::<B, _>(optimizer.to_record(), layout, &ids)?;
        state::check_types(&tensors, layout, loaded)?;
    }
    Ok(optimizer)
}

/// A scheduler with the state of a record.
///
/// # Errors
///
/// [`RecordFault::Scheduler`].
fn load_scheduler<B: Backend, S: LrScheduler>(
    scheduler: S,
    saved: &Json,
    device: &B::Device,
) -> Result<S, RecordFault> {
    let item: Item<S::Record<B>, B> = serde_json::from_value(saved.clone())
        .map_err(|it| of_scheduler(format!("the record has that of another scheduler: {it}")))?;
    let item = Record::<B>::from_item::<FullPrecisionSettings>(item, device);
    Ok(scheduler.load_record::<B>(item))
}

/// What can be done with a record whose optimizer is another one.
const OF_NO_UPDATE: &str = "of a record of an optimizer that was no `Update` the weights can be used: `consolidate` makes one file of them, which a \
                            model loads";

fn of_scheduler(reason: String) -> RecordFault {
    RecordFault::Scheduler { reason }
}

/// A tensor of a module: a parameter, trained or frozen, or a buffer.
struct ModelTensor<B: Backend> {
    /// Its description in a record.
    spec: TensorSpec,
    tensor: AnyTensor<B>,
    /// Its position in the store.
    parameter: Option<usize>,
}

impl<I: Backend> ModelTensor<I> {
    /// The elements of it that this rank saves.
    fn saved(&self, layout: &Layout) -> Vec<Range<usize>> {
        let whole = TensorSlice::whole(self.spec.clone()).range;
        match self.parameter {
            Some(parameter) if !whole.is_empty() => layout.shard(parameter).to_vec(),
            // What is not sharded is the same on all ranks, so rank 0 saves it.
            _ if layout.rank() == 0 => vec![whole],
            _ => Vec::new(),
        }
    }

    /// A range of its elements, read when it is written: from this rank's shard, where the parameter
    /// is sharded.
    fn entry(
        &self,
        range: Range<usize>,
        layout: &Layout,
        versions: &[Arc<ParameterVersion>],
    ) -> Entry<'static> {
        let of_shard = self.parameter.filter(|_| !range.is_empty());
        let of_shard = of_shard.map(|parameter| {
            let start = layout.position(parameter, range.start);
            (versions[parameter].clone(), start..start + range.len())
        });
        let (tensor, name) = (self.tensor.clone(), self.spec.name.clone());
        let slice = TensorSlice::new(self.spec.clone(), range.clone());
        Entry::lazy(slice, move || {
            if range.is_empty() {
                return Ok(Vec::new().into());
            }
            let known = of_shard.as_ref();
            let data = match known.and_then(|(version, part)| Some((version.shard()?, part))) {
                None => tensor.read(range),
                Some((shard, part)) => {
                    let read = shard.read(part.clone()).wait();
                    read.map_err(|error| not_read("this rank's shard", &name, &error))?
                }
            };
            Ok(to_file(data).into())
        })
    }
}

/// The entries of a tensor of the optimizer's state, whose bytes they share.
fn entries_of_state((tensor, bytes): (StateTensor, Vec<u8>)) -> Vec<Entry<'static>> {
    let bytes: Arc<[u8]> = bytes.into();
    let mut end = 0;
    let entries = tensor.ranges.into_iter().map(|range| {
        let slice = TensorSlice::new(tensor.spec.clone(), range);
        let (start, bytes) = (end, bytes.clone());
        end += slice.bytes();
        let part = start..end;
        Entry::lazy(slice, move || Ok(bytes[part].to_vec().into()))
    });
    entries.collect()
}

/// All tensors of a module, in its order.
///
/// # Errors
///
/// [`ShardingFault::State`](crate::ShardingFault::State).
fn model_tensors<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    parameters: &Parameters,
    store: &ParameterStore,
) -> Result<Vec<ModelTensor<B::InnerBackend>>, ZeroError> {
    let mut positions = HashMap::new();
    for_each_float(module, |path, id, tensor: FloatTensor<B>| {
        let entries = store.entries();
        let position = entries.position::<B>(parameters, path, id, &tensor);
        positions.extend(position.map(|position| (path.to_owned(), position)));
    });
    let mut found = Vec::new();
    // `valid` detaches from graphs and updates running statistics.
    for_each_tensor::<B::InnerBackend, _>(&module.valid(), |path, _, tensor| {
        let (dtype, shape) = tensor.kind();
        let name = format!("{MODEL}{path}");
        let parameter = positions.get(path).copied();
        let spec = in_file(&name, dtype).map(|dtype| TensorSpec::new(name, dtype, shape));
        found.push(spec.map(|spec| ModelTensor {
            spec,
            tensor,
            parameter,
        }));
    });
    Ok(found.into_iter().collect::<Result<_, _>>()?)
}

/// What a rank reads of a model from a record.
#[derive(Default)]
struct Loaded {
    /// Whole tensors, by name.
    whole: HashMap<String, TensorData>,
    /// Where parameters are sharded, this rank's shards of them, by position.
    shards: HashMap<usize, Shard>,
}

/// Reads the tensors of a model: whole, or this rank's elements of those that are sharded.
fn load_model<B: Backend>(
    model: &[ModelTensor<B>],
    store: &ParameterStore,
    device: &B::Device,
    record: &mut ShardedRecord,
) -> Result<Loaded, ZeroError> {
    let known: HashSet<_> = model.iter().map(|tensor| &tensor.spec.name).collect();
    let saved = record.tensors().filter_map(|tensor| {
        let path = tensor.name.strip_prefix(MODEL)?;
        (!known.contains(&tensor.name)).then(|| path.to_owned())
    });
    if let Some(path) = saved.into_iter().next() {
        let reason =
            format!("has a tensor {path}, which the model has not: it is of another model");
        let path = record.path().to_owned();
        return Err(RecordFault::OtherModel { path, reason }.into());
    }
    let mut loaded = Loaded::default();
    for it in model {
        let whole = [TensorSlice::whole(it.spec.clone()).range];
        let part = store.shards().zip(it.parameter);
        let ranges = part.map(|(_, parameter)| store.layout().shard(parameter));
        let bytes = record.read_ranges(&it.spec, ranges.unwrap_or(&whole))?;
        let (dtype, shape) = it.tensor.kind();
        match part {
            Some((memory, parameter)) => {
                let elements = bytes.len() / dtype.size();
                let own = NewValue::Host(from_file(bytes, vec![elements], dtype));
                let own = Shard::new::<B>(own, memory, device);
                loaded.shards.insert(parameter, own);
            }
            None => {
                let name = it.spec.name.clone();
                loaded.whole.insert(name, from_file(bytes, shape, dtype));
            }
        }
    }
    Ok(loaded)
}
