//! The gradients of one step, from one device or several.

use burn::{
    module::{AutodiffModule, ModuleVisitor, Param, ParamId},
    optim::{GradientsParams, MultiGradientsParams, Optimizer},
    prelude::DeviceOps,
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
};

use burn_decorator::non_finite::GradientsOf;

/// The gradients of `Optimizer::step` or of `Optimizer::step_multi`.
pub(super) enum StepGradients {
    One(GradientsParams),
    Several(MultiGradientsParams),
}

impl StepGradients {
    /// Adds up the devices' gradients of each parameter, on the device where the optimizer would do
    /// it, and leaves the sums there. The sums are what must be finite, and they equal those that
    /// the optimizer would have made.
    pub(super) fn merge<B: AutodiffBackend, M: AutodiffModule<B>>(&mut self, module: &M) {
        if let Self::Several(gradients) = self {
            module.visit(&mut Merger { gradients });
        }
    }

    /// Takes the step.
    pub(super) fn step<B, M, O>(self, optimizer: &mut O, lr: f64, module: M) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        match self {
            Self::One(gradients) => optimizer.step(lr, module, gradients),
            Self::Several(gradients) => optimizer.step_multi(lr, module, gradients),
        }
    }
}

impl GradientsOf for StepGradients {
    fn each<I: Backend, const D: usize>(&self, id: ParamId) -> Vec<Tensor<I, D>> {
        match self {
            Self::One(gradients) => gradients.get(id).into_iter().collect(),
            Self::Several(gradients) => {
                let devices = gradients.grads.iter();
                devices.filter_map(|(device, _)| device.get(id)).collect()
            }
        }
    }
}

struct Merger<'a> {
    gradients: &'a mut MultiGradientsParams,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Merger<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some((sum, device)) = self.gradients.remove::<B::InnerBackend, D>(param.id) else {
            return;
        };
        let home = self
            .gradients
            .grads
            .iter_mut()
            .find(|(_, id)| *id == device.to_id())
            .expect("the sum lies on one of the devices it came from");
        home.0.register(param.id, sum);
    }
}
