//! One step of one setting.

use std::hash::{DefaultHasher, Hasher};

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::module::{ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::Interrupter;
use burn_amp::{AmpConfig, AmpError, GradScaler};
use burn_checkpoint::{CheckpointedUnits, InstalledBudget, MemoryBudget, RematStats};
use burn_decorator::gradient;
use burn_update::Update;

use super::memory::{Watched, watch};
use super::options::Workload;
use super::own_thread::OwnThread;
use super::setting::{Setting, Stack};
use examples::backend::BackendName;
use examples::gpt::loader::TokenBatch;
use examples::gpt::loader::hash;
use examples::gpt::model::Gpt;
use examples::training::precision::Training;

/// The learning rate of torch_gpt.py.
const LEARNING_RATE: f64 = 3e-4;

/// The training of one setting, whatever its types.
pub trait Contender {
    /// Puts the state of this setting into force on this thread and process. Cheap, and no part of
    /// a step.
    fn enter(&self);

    /// Forward, backward and optimizer. Returns the loss when the device has finished the step.
    ///
    /// # Errors
    ///
    /// The training cannot go on in this precision.
    fn step(&mut self) -> Result<f64, AmpError>;

    /// Takes a few steps more and measures memory, recomputation and gradients.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step).
    fn look(&mut self) -> Result<Look, AmpError>;

    /// Steps that were skipped because a gradient was not finite.
    fn skipped_steps(&self) -> u64;

    /// Trained numbers.
    fn parameters(&self) -> usize;
}

/// Measurements of a few steps beside their time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Look {
    /// Memory in use during the steps.
    pub watched: Watched,
    /// Operations that one of them computed once more; nothing without burn-checkpoint.
    pub replayed_operations: Option<u64>,
    /// A hash of all bits of all gradients of one of them; nothing of another framework.
    pub gradients: Option<u64>,
}

/// Steps over which memory is watched; several, because a device is only sampled.
const WATCHED_STEPS: usize = 3;

/// What a training works on, and where.
pub struct Task<B: Backend> {
    /// Model and batch.
    pub workload: Workload,
    /// Seed of the weights and the tokens.
    pub seed: u64,
    /// Where to compute.
    pub device: B::Device,
    /// Its name.
    pub backend: BackendName,
}

// Not derived, because the derive would require `B: Clone`.
impl<B: Backend> Clone for Task<B> {
    fn clone(&self) -> Self {
        Self {
            device: self.device.clone(),
            ..*self
        }
    }
}

/// The training of a setting: the same weights and the same batch for each. With a budget it runs
/// on a thread of its own that is apart, so that the budget lasts from step to step and is in force
/// on no other setting.
///
/// # Errors
///
/// The device cannot compute in the setting's precision.
pub fn contender<B: Backend>(
    setting: Setting,
    task: &Task<B>,
) -> Result<Box<dyn Contender>, AmpError> {
    if setting.checkpoint.budget().is_none() {
        return contender_here(setting, task);
    }
    let task = task.clone();
    let apart = OwnThread::start(move || contender_here(setting, &task))?;
    Ok(Box::new(apart))
}

/// The training of a setting, on this thread.
///
/// # Errors
///
/// The device cannot compute in the setting's precision.
pub fn contender_here<B: Backend>(
    setting: Setting,
    task: &Task<B>,
) -> Result<Box<dyn Contender>, AmpError> {
    let Some(amp) = setting.stack.amp() else {
        return Ok(match setting.stack {
            Stack::Balanced => Box::new(Trainer::<Autodiff<B, BalancedCheckpointing>, _>::new(
                setting,
                task,
                adam_w(),
                None,
            )),
            _ => Box::new(Trainer::<Autodiff<B>, _>::new(
                setting,
                task,
                adam_w(),
                None,
            )),
        });
    };
    let precision = amp.precision();
    let (policy, scaler) = (precision.amp(), precision.scaler());
    policy.check::<Training<B>>(&task.device)?;
    policy.install()?;
    let interrupter = Interrupter::new();
    let scaler = GradScaler::new(&scaler)?.with_interrupter(interrupter.clone());
    let update = Update::new(adam_w()).scale(scaler.clone());
    let update = update.expect("an update of one scale");
    let mixed = Mixed {
        policy,
        scaler,
        interrupter,
    };
    let trainer = Trainer::<Training<B>, _>::new(setting, task, update, Some(mixed));
    Ok(Box::new(trainer))
}

/// With PyTorch's defaults.
fn adam_w<B: AutodiffBackend>() -> impl Optimizer<Gpt<B>, B> {
    AdamWConfig::new()
        .with_epsilon(1e-8)
        .with_weight_decay(0.01)
        .init()
}

struct Trainer<B: AutodiffBackend, O> {
    /// `None` only during a step, which owns the model: a copy would keep the optimizer from
    /// updating in place.
    model: Option<Gpt<B>>,
    optimizer: O,
    /// Those that have scopes.
    units: Option<CheckpointedUnits>,
    batch: TokenBatch<B>,
    device: B::Device,
    backend: BackendName,
    mixed: Option<Mixed>,
    /// In force on this thread, and whether no step was taken under it.
    budget: Option<InstalledBudget>,
    is_first: bool,
}

/// What burn-amp adds.
struct Mixed {
    policy: AmpConfig,
    scaler: GradScaler,
    interrupter: Interrupter,
}

impl<B: AutodiffBackend, O: Optimizer<Gpt<B>, B>> Trainer<B, O> {
    fn new<I: Backend<Device = B::Device>>(
        setting: Setting,
        task: &Task<I>,
        optimizer: O,
        mixed: Option<Mixed>,
    ) -> Self {
        let Task {
            workload,
            seed,
            device,
            backend,
        } = task;
        B::seed(device, *seed);
        let model = workload.model().with_checkpoint(setting.checkpoint);
        let model = setting
            .checkpoint
            .with_units::<B, Gpt<B>>(model.init(device));
        let (model, units) = model.expect("a workload has blocks, and a stack that sees them");
        let batch = batch(workload, *seed, device);
        // Lazy backends draw late. Wait for the draw before the next setting sets the seed that all
        // threads share.
        B::sync(device).expect("the device draws the weights");
        Self {
            model: Some(model),
            optimizer,
            units,
            batch,
            device: device.clone(),
            backend: *backend,
            mixed,
            // Memory from before is not counted.
            budget: setting.checkpoint.budget().map(MemoryBudget::install),
            is_first: true,
        }
    }

    fn update(&mut self, model: Gpt<B>, gradients: GradientsParams) -> Gpt<B> {
        let step = || self.optimizer.step(LEARNING_RATE, model, gradients);
        match &self.units {
            None => step(),
            Some(units) => units.mark(gradient::update(step)),
        }
    }

    /// A step; `look` sees the gradients before the optimizer consumes them.
    fn train<T>(
        &mut self,
        look: impl FnOnce(&Gpt<B>, &GradientsParams) -> T,
    ) -> Result<(f64, T), AmpError> {
        let model = self.model.take().expect("the last step gave it back");
        let loss = model.loss(self.batch.clone());
        let gradients = match &self.mixed {
            Some(mixed) => mixed.scaler.backward(loss.clone()),
            None => loss.backward(),
        };
        let gradients = GradientsParams::from_grads(gradients, &model);
        let loss = loss.inner();
        let seen = look(&model, &gradients);
        self.model = Some(self.update(model, gradients));
        let loss = loss.into_scalar().elem();
        B::sync(&self.device).expect("the device finishes the step");
        if std::mem::take(&mut self.is_first) && self.budget.is_some() {
            // A budget in percent is not yet in force in the first step, so the pools release the
            // memory of that step.
            B::memory_cleanup(&self.device);
        }

        match &self.mixed {
            Some(mixed) if mixed.interrupter.should_stop() => Err(mixed
                .scaler
                .error()
                .expect("only an error stops a training")),
            _ => Ok((loss, seen)),
        }
    }
}

/// Random tokens, `batch` rows of `context + 1`.
pub(super) fn tokens(workload: &Workload, seed: u64) -> Vec<i32> {
    let Workload {
        batch,
        context,
        vocabulary,
        ..
    } = *workload;
    (0..batch * (context + 1))
        .map(|index| (hash(seed, index as u64) % vocabulary as u64) as i32)
        .collect()
}

/// The tokens, uploaded here, once.
fn batch<B: Backend>(workload: &Workload, seed: u64, device: &B::Device) -> TokenBatch<B> {
    let Workload { batch, context, .. } = *workload;
    let data = TensorData::new(tokens(workload, seed), [batch, context + 1]);
    let tokens = Tensor::<B, 2, Int>::from_data(data, device);
    TokenBatch {
        inputs: tokens.clone().narrow(1, 0, context),
        targets: tokens.narrow(1, 1, context),
    }
}

impl<B: AutodiffBackend, O: Optimizer<Gpt<B>, B>> Contender for Trainer<B, O> {
    fn enter(&self) {
        if let Some(mixed) = &self.mixed {
            mixed
                .policy
                .install()
                .expect("it was installed before, without an error");
        }
    }

    fn step(&mut self) -> Result<f64, AmpError> {
        self.train(|_, _| ()).map(|(loss, ())| loss)
    }

    fn look(&mut self) -> Result<Look, AmpError> {
        // Releases memory from the compilation and the choice of kernels.
        B::memory_cleanup(&self.device);
        let backend = self.backend;
        let (mut watched, steps) = watch(backend, || {
            (0..WATCHED_STEPS).try_for_each(|_| {
                RematStats::reset_thread();
                self.step().map(drop)
            })
        });
        steps?;
        let replayed = RematStats::of_thread().replayed_operations;
        // LibTorch does not count its tensors on a CPU. The ledger of `Remat` does, for which a
        // budget is in force.
        if backend == BackendName::Tch && self.mixed.is_some() {
            let unlimited = MemoryBudget::bytes(u64::MAX);
            let _all = self.budget.is_none().then(|| unlimited.install());
            RematStats::reset_thread();
            // Not of the thread, which has the tensors of other settings too.
            let device = self.device.clone();
            let ledger = || RematStats::of_device::<B>(&device);
            let before = ledger().live_bytes;
            self.step()?;
            watched.added_bytes = Some(ledger().peak_bytes.saturating_sub(before));
        }
        let (_, gradients) = self.train(hash_of::<B>)?;
        Ok(Look {
            watched,
            replayed_operations: self.mixed.as_ref().map(|_| replayed),
            gradients: Some(gradients),
        })
    }

    fn skipped_steps(&self) -> u64 {
        self.mixed
            .as_ref()
            .map_or(0, |mixed| mixed.scaler.skipped_steps())
    }

    fn parameters(&self) -> usize {
        self.model.as_ref().map_or(0, Module::num_params)
    }
}

/// A hash of all bits of all gradients, in the order of the parameters: the same for the same bits
/// within a process.
fn hash_of<B: AutodiffBackend>(model: &Gpt<B>, gradients: &GradientsParams) -> u64 {
    struct Hash<'a> {
        gradients: &'a GradientsParams,
        hasher: DefaultHasher,
    }
    impl<B: AutodiffBackend> ModuleVisitor<B> for Hash<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let gradient = self.gradients.get::<B::InnerBackend, D>(param.id);
            let gradient = gradient.expect("every parameter has one");
            self.hasher.write(&gradient.into_data().bytes);
        }
    }
    let mut hash = Hash {
        gradients,
        hasher: DefaultHasher::new(),
    };
    Module::<B>::visit(model, &mut hash);
    hash.hasher.finish()
}
