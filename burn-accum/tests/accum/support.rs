//! The network of the tests, batches for it, and what is compared.

#[path = "../../../burn-update/tests/shared/net.rs"]
mod network;

use burn::{
    backend::Autodiff,
    module::AutodiffModule,
    optim::{GradientsParams, Optimizer},
    record::{FullPrecisionSettings, Record},
    tensor::Tensor,
};
use burn_accum::{AccumConfig, Accumulation, GradNorm, UpdateCounter};
use burn_amp::GradScaler;
use burn_flex::Flex;
use burn_update::{Arrived, Update};

pub use network::{Net, PATHS, assert_close, bits as values, floats, gradients};

pub type Inner = Flex;
pub type B = Autodiff<Flex>;

pub fn net() -> Net<B> {
    network::net()
}

/// Some rows of input and target.
#[derive(Clone, Debug)]
pub struct Batch {
    pub x: Tensor<B, 2>,
    pub y: Tensor<B, 2>,
}

impl Batch {
    /// Rows `from..to` of an endless data set.
    pub fn rows(from: usize, to: usize) -> Self {
        let (x, y) = network::rows(from, to);
        Self { x, y }
    }

    pub fn len(&self) -> usize {
        self.x.dims()[0]
    }
}

impl Net<B> {
    /// The mean over rows.
    pub fn loss(&self, batch: &Batch) -> Tensor<B, 1> {
        self.mean_error(batch.x.clone(), batch.y.clone())
    }

    /// The gradients of the mean over rows.
    pub fn mean_gradients(&self, batch: &Batch) -> GradientsParams {
        GradientsParams::from_grads(self.loss(batch).backward(), self)
    }
}

/// A record, as a value that can be compared.
pub fn json<R: Record<B>>(record: R) -> serde_json::Value {
    serde_json::to_value(record.into_item::<FullPrecisionSettings>()).unwrap()
}

/// The state of an update's optimizer, as a value that can be compared.
pub fn state<M: AutodiffModule<B> + 'static>(update: &Update<M, B>) -> serde_json::Value {
    let record = json(update.record());
    let state = &record["parts"]["optimizer"]["values"]["record"]["Tree"]["Map"];
    assert!(state.is_object(), "{record:#}");
    state.clone()
}

/// An update in windows, and the handle to their counters. An error of a step is a panic with its
/// message.
#[derive(Clone)]
pub struct Windows<M: AutodiffModule<B> + 'static = Net<B>> {
    pub update: Update<M, B>,
    counter: UpdateCounter,
}

impl<M: AutodiffModule<B> + 'static> Windows<M> {
    /// Windows around an optimizer alone.
    pub fn new(optimizer: impl Optimizer<M, B> + 'static, config: AccumConfig) -> Self {
        Self::of(Update::new(optimizer), Accumulation::new(config).unwrap())
    }

    /// Windows of an update with other parts.
    pub fn of(update: Update<M, B>, windows: Accumulation) -> Self {
        let counter = windows.updates();
        let update = update.accumulate(windows).unwrap();
        Self { update, counter }
    }

    pub fn step(&mut self, lr: f64, model: M, gradients: impl Into<Arrived>) -> M {
        step(&mut self.update, lr, model, gradients)
    }

    pub fn flush(&mut self, lr: f64, model: M) -> M {
        self.update.flush(lr, model).unwrap()
    }

    pub fn updates(&self) -> UpdateCounter {
        self.counter.clone()
    }

    /// The same, with a loss scale.
    pub fn scaled(self, scaler: &GradScaler) -> Self {
        Self {
            update: self.update.scale(scaler.clone()).unwrap(),
            counter: self.counter,
        }
    }

    /// Continues from the state of another.
    pub fn load(self, record: burn_update::UpdateRecord<B>) -> Self {
        Self {
            update: self.update.load(record).unwrap(),
            counter: self.counter,
        }
    }
}

/// An update that clips, and the handle to the norm.
pub struct Clipping {
    pub update: Update<Net<B>, B>,
    pub norm: GradNorm,
}

impl Clipping {
    pub fn step(&mut self, lr: f64, model: Net<B>, gradients: impl Into<Arrived>) -> Net<B> {
        step(&mut self.update, lr, model, gradients)
    }
}

/// A step that must not fail, or panics with the error's message.
pub fn step<M: AutodiffModule<B> + 'static>(
    update: &mut Update<M, B>,
    lr: f64,
    model: M,
    gradients: impl Into<Arrived>,
) -> M {
    let updated = update.step(lr, model, gradients);
    updated.unwrap_or_else(|error| panic!("{error}"))
}

/// The message that `f` panics with.
pub fn panic_of<T>(f: impl FnOnce() -> T) -> String {
    let payload = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
    let Err(payload) = payload else {
        panic!("it did not panic");
    };
    *payload.downcast::<String>().expect("a formatted message")
}
