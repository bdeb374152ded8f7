//! Whole trainings in sharded records: the model, the optimizer with all its layers, the scheduler and the small state.
//!
//! `save.rs` and `load.rs` are the two directions; `model.rs` knows the tensors of a module, [`state`](crate::state) those of an
//! optimizer; `generator.rs` has what dropout draws from.

mod generator;
mod load;
mod model;
mod save;

use core::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ZeroSettings;
use crate::group::ProcessGroup;
use crate::reduce::{GradientReducer, Layout};

/// What trains: a model, its optimizer with all layers around it, and the schedule of its learning rate (a number, if it is
/// constant).
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

/// Saves and loads trainings whose optimizer has a [`ZeroOptimizer`](crate::ZeroOptimizer) in it, wherever that is: made by
/// [`ZeroOptimizer::recorder`](crate::ZeroOptimizer::recorder) before the optimizer moves into its layers or into a `Learner`.
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
/// plain Burn loads. A window that is not complete comes back at the same number of ranks and the same sharding only: save
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
    /// How it was sharded.
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
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
