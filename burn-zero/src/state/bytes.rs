//! What a state weighs.

use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::backend::Backend;
use ciborium::Value;

use super::refuse;
use crate::ZeroOptimizerError;

/// Bytes of all tensors in a record, such as an optimizer's: what it really holds, whatever it was expected to.
///
/// Floats count as f32, as records hold them. Costs a copy of the tensors on the host while it counts.
///
/// ```
/// use burn::{backend::Autodiff, nn, optim::{AdamWConfig, GradientsParams, Optimizer}, prelude::*};
/// use burn_zero::tensor_bytes;
///
/// type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let model: nn::Linear<B> = nn::LinearConfig::new(4, 3).init(&device);
/// let mut optimizer = AdamWConfig::new().init();
/// let loss = model.forward(Tensor::<B, 2>::ones([2, 4], &device)).mean();
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// let _ = optimizer.step(1e-3, model, gradients);
/// assert_eq!(tensor_bytes::<B, _>(optimizer.to_record())?, 8 * (4 * 3 + 3)); // two moments in f32
/// # Ok::<(), burn_zero::ZeroOptimizerError>(())
/// ```
///
/// # Errors
///
/// [`ZeroOptimizerError::State`] for a record that cannot be serialized.
pub fn tensor_bytes<B: Backend, R: Record<B>>(record: R) -> Result<u64, ZeroOptimizerError> {
    let item = record.into_item::<FullPrecisionSettings>();
    let tree = Value::serialized(&item).map_err(refuse)?;
    drop(item);
    Ok(count(&tree))
}

/// In such a tree nothing but the elements of tensors is bytes.
fn count(value: &Value) -> u64 {
    match value {
        Value::Bytes(bytes) => bytes.len() as u64,
        Value::Array(values) => values.iter().map(count).sum(),
        Value::Map(fields) => fields.iter().map(|(_, value)| count(value)).sum(),
        _ => 0,
    }
}
