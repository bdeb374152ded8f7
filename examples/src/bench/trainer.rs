//! One step of one setting.

use burn::backend::Autodiff;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::Interrupter;
use burn_amp::{AmpConfig, AmpError, GradScaler};

use super::options::Workload;
use super::setting::Setting;
use crate::gpt::loader::TokenBatch;
use crate::gpt::model::Gpt;
use crate::gpt::precision::Training;
use crate::gpt::windows::hash;

/// As torch_gpt.py's.
const LEARNING_RATE: f64 = 3e-4;

/// The training of one setting, whatever its types.
pub trait Contender {
    /// Makes this thread and process those of this setting. Costs next to nothing and is no part of a step.
    fn enter(&self);

    /// Forward, backward and optimizer, done on the device too when this returns the loss.
    ///
    /// # Errors
    ///
    /// The training cannot go on in this precision.
    fn step(&mut self) -> Result<f64, AmpError>;

    /// Steps that were skipped because a gradient was not finite.
    fn skipped_steps(&self) -> u64;

    /// Trained numbers.
    fn parameters(&self) -> usize;
}

/// The training of a setting: the same weights and the same batch for each.
///
/// # Errors
///
/// The device cannot compute in the setting's precision.
pub fn contender<B: Backend>(
    setting: Setting,
    workload: &Workload,
    seed: u64,
    device: &B::Device,
) -> Result<Box<dyn Contender>, AmpError> {
    let Some(amp) = setting.amp() else {
        let trainer = Trainer::<Autodiff<B>, _>::new(workload, seed, device, adam_w(), None);
        return Ok(Box::new(trainer));
    };
    let (policy, scaler) = amp.configs();
    policy.check::<Training<B>>(device)?;
    policy.install()?;
    let interrupter = Interrupter::new();
    let scaler = GradScaler::new(&scaler)?
        .with_detection(setting.detection())
        .with_interrupter(interrupter.clone());
    let optimizer = scaler.wrap(adam_w());
    let mixed = Mixed {
        policy,
        scaler,
        interrupter,
    };
    let trainer = Trainer::<Training<B>, _>::new(workload, seed, device, optimizer, Some(mixed));
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
    /// Given away only during a step: a copy would keep the optimizer from updating in place.
    model: Option<Gpt<B>>,
    optimizer: O,
    batch: TokenBatch<B>,
    device: B::Device,
    mixed: Option<Mixed>,
}

/// What burn-amp adds.
struct Mixed {
    policy: AmpConfig,
    scaler: GradScaler,
    interrupter: Interrupter,
}

impl<B: AutodiffBackend, O> Trainer<B, O> {
    fn new(
        workload: &Workload,
        seed: u64,
        device: &B::Device,
        optimizer: O,
        mixed: Option<Mixed>,
    ) -> Self {
        B::seed(device, seed);
        Self {
            model: Some(workload.model().init(device)),
            optimizer,
            batch: batch(workload, seed, device),
            device: device.clone(),
            mixed,
        }
    }
}

/// Random tokens, uploaded here, once.
fn batch<B: Backend>(workload: &Workload, seed: u64, device: &B::Device) -> TokenBatch<B> {
    let Workload {
        batch,
        context,
        vocabulary,
        ..
    } = *workload;
    let shape = [batch, context + 1];
    let tokens = (0..batch * (context + 1))
        .map(|index| (hash(seed, index as u64) % vocabulary as u64) as i32)
        .collect();
    let tokens = Tensor::<B, 2, Int>::from_data(TensorData::new::<i32, _>(tokens, shape), device);
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
            mixed.scaler.bind_thread();
        }
    }

    fn step(&mut self) -> Result<f64, AmpError> {
        let model = self.model.take().expect("the last step gave it back");
        let loss = model.loss(self.batch.clone());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let loss = loss.inner();
        self.model = Some(self.optimizer.step(LEARNING_RATE, model, gradients));
        let loss = loss.into_scalar().elem();
        B::sync(&self.device).expect("the device finishes the step");

        match &self.mixed {
            // Asking the scaler itself would wait for a deferred flag.
            Some(mixed) if mixed.interrupter.should_stop() => Err(mixed
                .scaler
                .error()
                .expect("only an error stops a training")),
            _ => Ok(loss),
        }
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
