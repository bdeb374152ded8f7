//! The network and the gradients of the laws, and a part that looks at them.

#[path = "../shared/net.rs"]
mod network;

use burn::{
    backend::Autodiff,
    optim::{AdamWConfig, GradientsParams, Optimizer},
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_amp::{Autocast, F16};
use burn_flex::Flex;
use burn_update::{Part, Stateful, Step, UpdateError};

pub use network::{Net, PATHS, assert_close, bits, floats, net};

pub type F32 = Autodiff<Flex>;
pub type Half = Autocast<Autodiff<Flex>, F16>;

pub const LR: f64 = 0.02;

pub fn adamw<B: AutodiffBackend>() -> impl Optimizer<Net<B>, B> {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

impl<B: Backend> Net<B> {
    /// The mean over rows `from..to` of an endless data set.
    pub fn loss(&self, from: usize, to: usize) -> Tensor<B, 1> {
        let (x, y) = network::rows(from, to);
        self.mean_error(x, y)
    }
}

/// Made-up gradients: finite ones, but for one element of each parameter in `bad`.
pub fn gradients<B: AutodiffBackend>(net: &Net<B>, step: usize, bad: &[usize]) -> GradientsParams {
    network::gradients(net, step, bad, &[])
}

/// A part that writes down the gradients of each update, and what the step says after it.
#[derive(Clone)]
pub struct Spy {
    pub name: &'static str,
    /// The first element of the first parameter's gradient, of each update.
    pub seen: std::sync::Arc<std::sync::Mutex<Vec<f32>>>,
}

impl Spy {
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            seen: Default::default(),
        }
    }

    pub fn seen(&self) -> Vec<f32> {
        self.seen.lock().unwrap().clone()
    }
}

impl<B: AutodiffBackend> Stateful<B> for Spy {
    fn name(&self) -> String {
        self.name.to_owned()
    }
}

impl<B: AutodiffBackend> Part<Net<B>, B> for Spy {
    fn gradients(
        &mut self,
        _: &mut Step<B::InnerBackend>,
        model: &Net<B>,
        gradients: GradientsParams,
    ) -> Result<GradientsParams, UpdateError> {
        let first: Tensor<B::InnerBackend, 2> = gradients.get(model.first.weight.id).unwrap();
        let value = first.into_data().iter::<f32>().next().unwrap();
        self.seen.lock().unwrap().push(value);
        Ok(gradients)
    }
}
