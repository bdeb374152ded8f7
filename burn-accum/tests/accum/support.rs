//! The network of the tests, batches for it, and what is compared.

#[path = "../../../burn-update/tests/shared/net.rs"]
mod network;

use burn::{
    backend::Autodiff,
    optim::{GradientsParams, Optimizer},
    record::{FullPrecisionSettings, Record},
    tensor::Tensor,
};
use burn_flex::Flex;

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

/// The optimizer's state, as a value that can be compared.
pub fn state<O: Optimizer<Net<B>, B>>(optimizer: &O) -> serde_json::Value {
    json(optimizer.to_record())
}

/// The message that `f` panics with.
pub fn panic_of<T>(f: impl FnOnce() -> T) -> String {
    let payload = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
    let Err(payload) = payload else {
        panic!("it did not panic");
    };
    *payload.downcast::<String>().expect("a formatted message")
}
