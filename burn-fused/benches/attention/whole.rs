//! Attention of all scores at once, as `FusedBackward` computed it before it took blocks of
//! queries (until abc402a7): backward has query, key and value, and computes all probabilities
//! again.

use burn::tensor::{Tensor, TensorPrimitive};
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, Scalar, Shape, TensorMetadata, get_device_settings};
use burn_decorator::autodiff::{TapeBackend, record};

/// What backward needs.
#[derive(Clone, Debug)]
struct Operands<B: Backend> {
    query: FloatTensor<B>,
    key: FloatTensor<B>,
    value: FloatTensor<B>,
    is_causal: bool,
    scale: f64,
}

#[derive(Debug)]
struct WholeAttention;

/// `softmax(query keyᵀ / sqrt(width)) value`, in f32.
pub fn attention<A: TapeBackend>(
    [query, key, value]: [Tensor<A, 4>; 3],
    is_causal: bool,
) -> Tensor<A, 4> {
    let scale = 1.0 / (query.dims()[3] as f64).sqrt();
    let [query, key, value] = [query, key, value].map(|x| x.into_primitive().tensor());
    let operands = Operands::<A::InnerBackend> {
        query: query.primitive.clone(),
        key: key.primitive.clone(),
        value: value.primitive.clone(),
        is_causal,
        scale,
    };
    let probabilities = operands.probabilities();
    let result = A::InnerBackend::float_matmul(probabilities, value.primitive.clone());
    let result = record(WholeAttention, [&query, &key, &value], operands, result);
    Tensor::from_primitive(TensorPrimitive::Float(result))
}

impl<B: Backend> Operands<B> {
    fn probabilities(&self) -> FloatTensor<B> {
        let scores = B::float_matmul(self.query.clone(), B::float_transpose(self.key.clone()));
        let mut scores = B::float_mul_scalar(scores, self.scale.into());
        if self.is_causal {
            let mask = later_keys::<B>(&scores);
            scores = B::float_mask_fill(scores, mask, Scalar::Float(f32::MIN.into()));
        }
        B::softmax(scores, 3)
    }
}

/// True where a key comes after a query.
fn later_keys<B: Backend>(scores: &FloatTensor<B>) -> BoolTensor<B> {
    let device = B::float_device(scores);
    let shape = scores.shape();
    let [queries, keys] = [shape[2], shape[3]];
    let settings = get_device_settings::<B>(&device);
    let query = B::int_arange(0..queries as i64, &device, settings.int_dtype);
    let key = B::int_arange(0..keys as i64, &device, settings.int_dtype);
    let query = B::int_reshape(query, Shape::new([1, 1, queries, 1]));
    let key = B::int_reshape(key, Shape::new([1, 1, 1, keys]));
    B::bool_expand(B::int_lower(query, key, settings.bool_dtype), shape)
}

impl<B: Backend> Backward<B, 3> for WholeAttention {
    type State = Operands<B>;

    fn backward(self, ops: Ops<Self::State, 3>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<B>(&ops.node);
        let operands = ops.state;
        let [of_query, of_key, of_value] = ops.parents;
        let probabilities = operands.probabilities();
        if let Some(node) = of_value {
            let transposed = B::float_transpose(probabilities.clone());
            let of_value = B::float_matmul(transposed, gradient.clone());
            gradients.register::<B>(node.id, of_value);
        }
        let of_probabilities = B::float_matmul(gradient, B::float_transpose(operands.value));
        let product = B::float_mul(of_probabilities, probabilities.clone());
        let sum = B::float_sum_dim(product.clone(), 3);
        let of_scores = B::float_sub(product, B::float_mul(probabilities, sum));
        let scaled = |product| B::float_mul_scalar(product, operands.scale.into());
        if let Some(node) = of_query {
            let product = B::float_matmul(of_scores.clone(), operands.key);
            gradients.register::<B>(node.id, scaled(product));
        }
        if let Some(node) = of_key {
            let product = B::float_matmul(B::float_transpose(of_scores), operands.query);
            gradients.register::<B>(node.id, scaled(product));
        }
    }
}
