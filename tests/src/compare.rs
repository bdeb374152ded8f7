//! Comparing tensors of any backend on the host.

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};

/// A tensor's values, in f32.
pub fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor
        .into_data()
        .convert::<f32>()
        .into_vec()
        .expect("just converted")
}

/// The values' bits: equal where the values are the same to the last bit, NaN included.
pub fn bits<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<u32> {
    values(tensor).into_iter().map(f32::to_bits).collect()
}

/// The gradient of every parameter in the order of visit, with its path.
pub fn gradients<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    grads: &B::Gradients,
) -> Vec<(String, Vec<f32>)> {
    struct Collect<'a, B: AutodiffBackend> {
        grads: &'a B::Gradients,
        path: Vec<String>,
        found: Vec<(String, Vec<f32>)>,
    }
    impl<B: AutodiffBackend> ModuleVisitor<B> for Collect<'_, B> {
        burn_decorator::follow_path!();

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(grad) = param.grad(self.grads) {
                self.found.push((self.path.join("."), values(grad)));
            }
        }
    }
    let mut visitor = Collect {
        grads,
        path: Vec::new(),
        found: Vec::new(),
    };
    model.visit(&mut visitor);
    visitor.found
}

/// The largest difference, relative to the largest magnitude of `expected`.
pub fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len(), "numbers of elements differ");
    let magnitude = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
    let difference = found
        .iter()
        .zip(expected)
        .map(|(a, b)| {
            let difference = (a - b).abs();
            if difference.is_nan() {
                f32::INFINITY
            } else {
                difference
            }
        })
        .fold(0f32, f32::max);
    difference / magnitude.max(f32::MIN_POSITIVE)
}
