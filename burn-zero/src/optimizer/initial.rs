//! The same weights on all ranks.

use burn::module::AutodiffModule;
use burn::tensor::{DType, TensorData, backend::AutodiffBackend};

use super::replace::replace_tensors;
use crate::ZeroError;
use crate::group::{BufferDtype, HostBuffer, ProcessGroup};
use crate::host::floats;

/// Rank 0's module on every rank, with leaves of this rank's own: all its tensors, frozen ones and buffers included.
///
/// # Errors
///
/// Those of the group.
pub(super) fn broadcast<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
    group: &dyn ProcessGroup,
) -> Result<M, ZeroError> {
    let mut failed = None;
    let module = replace_tensors::<B, M>(module, &mut |path, own| {
        let own = own();
        if group.world_size() == 1 {
            return Some(own);
        }
        if failed.is_some() {
            return None;
        }
        receive(group, path, own)
            .map_err(|error| failed = Some(error))
            .ok()
    });
    match failed {
        Some(error) => Err(error),
        None => Ok(module),
    }
}

/// Rank 0's data.
fn receive(group: &dyn ProcessGroup, path: &str, own: TensorData) -> Result<TensorData, ZeroError> {
    let label = format!("initial {path}");
    let (shape, dtype) = (own.shape.clone(), own.dtype);
    let buffer_dtype = match dtype {
        DType::F32 => BufferDtype::F32,
        DType::BF16 => BufferDtype::Bf16,
        DType::F16 => BufferDtype::F16,
        // Rare and small: no collective of their own.
        _ => {
            let bytes = match group.rank() {
                0 => own.bytes.to_vec(),
                _ => Vec::new(),
            };
            let first = group.gather_bytes(&label, bytes)?.swap_remove(0);
            return Ok(TensorData::from_bytes_vec(first, shape, dtype));
        }
    };
    let buffer = HostBuffer::from_f32(buffer_dtype, floats(own));
    let received = group.broadcast(&label, 0, buffer)?.into_f32();
    Ok(TensorData::new(received, shape).convert_dtype(dtype))
}
