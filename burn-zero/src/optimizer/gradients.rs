//! The gradients of a step, from one device or several.

use burn::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::tensor::{Tensor, backend::AutodiffBackend};
use burn_backend::tensor::FloatTensor;

use super::parameters::Parameters;

/// The gradients of a step, and what else travels with them.
pub(super) enum Gradients {
    One(GradientsParams),
    Multi(MultiGradientsParams),
}

impl Gradients {
    /// Takes the gradients of a module's parameters out, in their order.
    pub(super) fn take<B: AutodiffBackend, M: AutodiffModule<B>>(
        &mut self,
        module: &M,
        parameters: &Parameters,
    ) -> Vec<Option<FloatTensor<B::InnerBackend>>> {
        let mut taking = Taking::<B> {
            gradients: self,
            parameters,
            taken: vec![None; parameters.list.len()],
        };
        module.visit(&mut taking);
        taking.taken
    }

    /// Puts the gradient of a piece in.
    pub(super) fn put<B: AutodiffBackend>(
        &mut self,
        id: ParamId,
        gradient: FloatTensor<B::InnerBackend>,
    ) {
        use burn::tensor::TensorPrimitive;
        // The container does not know the number of dimensions.
        let gradient =
            Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(gradient));
        match self {
            Self::One(gradients) => gradients.register(id, gradient),
            Self::Multi(gradients) => match gradients.grads.first_mut() {
                Some((gradients, _)) => gradients.register(id, gradient),
                None => unreachable!("gradients come from at least one device"),
            },
        }
    }

    /// A step of `optimizer`.
    pub(super) fn step<B, M, O>(self, optimizer: &mut O, lr: LearningRate, module: M) -> M
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        match self {
            Self::One(gradients) => optimizer.step(lr, module, gradients),
            Self::Multi(gradients) => optimizer.step_multi(lr, module, gradients),
        }
    }

    fn remove<B: AutodiffBackend, const D: usize>(
        &mut self,
        id: ParamId,
    ) -> Option<Tensor<B::InnerBackend, D>> {
        match self {
            Self::One(gradients) => gradients.remove(id),
            Self::Multi(gradients) => gradients.remove(id).map(|(gradient, _)| gradient),
        }
    }
}

struct Taking<'a, B: AutodiffBackend> {
    gradients: &'a mut Gradients,
    parameters: &'a Parameters,
    taken: Vec<Option<FloatTensor<B::InnerBackend>>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Taking<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(&index) = self.parameters.index.get(&param.id) else {
            return;
        };
        if let Some(gradient) = self.gradients.remove::<B, D>(param.id) {
            self.taken[index] = Some(gradient.into_primitive().tensor());
        }
    }
}
