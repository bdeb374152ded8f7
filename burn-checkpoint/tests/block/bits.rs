//! What two ways to take a step have in common if they are the same.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorData};

struct Bits<'a, B: AutodiffBackend> {
    grads: &'a B::Gradients,
    sum: u64,
}

impl<B: AutodiffBackend> Bits<'_, B> {
    fn add(&mut self, data: TensorData) {
        let bits = data.as_slice::<f32>().expect("f32").iter();
        self.sum = bits.fold(self.sum, |sum, x| {
            sum.rotate_left(5).wrapping_add(u64::from(x.to_bits()))
        });
    }
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Bits<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let grad = param.val().grad(self.grads);
        self.add(grad.expect("every parameter has one").into_data());
    }
}

/// A number of all bits of the loss and of the gradients of all parameters.
pub fn bits<B: AutodiffBackend>(
    model: &impl Module<B>,
    loss: Tensor<B, 1>,
    grads: &B::Gradients,
) -> u64 {
    let mut bits = Bits::<B> { grads, sum: 0 };
    bits.add(loss.into_data());
    model.visit(&mut bits);
    bits.sum
}
