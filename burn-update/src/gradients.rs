//! Gradients by path, for parts that change them.

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, backend::AutodiffBackend};

/// What `each` makes of every gradient of `model`, in module order. It gets the path of the
/// parameter, such as `blocks.3.attention.query.weight`, and the gradient as a vector of its
/// elements, and returns as many. What a [`Part`](crate::Part) is mostly made of: see
/// [`Update::with`](crate::Update::with).
pub fn map_gradients<B, M>(
    model: &M,
    gradients: GradientsParams,
    each: impl FnMut(&str, Tensor<B::InnerBackend, 1>) -> Tensor<B::InnerBackend, 1>,
) -> GradientsParams
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    let mut mapper = Mapper {
        path: Vec::new(),
        gradients,
        mapped: GradientsParams::new(),
        each,
    };
    model.visit(&mut mapper);
    mapper.mapped
}

struct Mapper<F> {
    path: Vec<String>,
    gradients: GradientsParams,
    /// Apart from `gradients`, as a tied parameter is visited more than once.
    mapped: GradientsParams,
    each: F,
}

impl<B, F> ModuleVisitor<B> for Mapper<F>
where
    B: AutodiffBackend,
    F: FnMut(&str, Tensor<B::InnerBackend, 1>) -> Tensor<B::InnerBackend, 1>,
{
    burn_decorator::follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let gradient = self.gradients.remove::<B::InnerBackend, D>(param.id);
        let Some(gradient) = gradient else { return };
        let shape = gradient.shape();
        let elements = gradient.reshape([shape.num_elements()]);
        let mapped = (self.each)(&self.path.join("."), elements);
        self.mapped
            .register(param.id, mapped.reshape::<D, _>(shape));
    }
}
