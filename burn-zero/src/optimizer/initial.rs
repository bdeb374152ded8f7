//! The same weights on all ranks.

use burn::module::AutodiffModule;
use burn::tensor::{DType, TensorData, backend::AutodiffBackend};

use super::replace::replace_tensors;
use super::statistics::{Statistics, independent_if_shared};
use crate::ZeroError;
use crate::group::{BufferDtype, HostBuffer, ProcessGroup};
use crate::host::floats;

/// Rank 0's module on every rank, with leaves and running statistics of this rank's own: all its tensors, frozen ones and buffers
/// included.
///
/// Running statistics hold a lock while they are mapped, which clones on other ranks would wait for: so each rank's are made its own
/// first, and theirs are exchanged outside of any mapper. Parameters have no lock. They are exchanged one by one as they are
/// replaced, and there is never a second copy of all of them.
///
/// # Errors
///
/// Those of the group.
pub(super) fn broadcast<B: AutodiffBackend, M: AutodiffModule<B>>(
    mut module: M,
    group: &dyn ProcessGroup,
) -> Result<M, ZeroError> {
    let alone = group.world_size() == 1;
    let mut statistics = Statistics::default();
    if !alone {
        module = independent_if_shared::<B, M>(module);
        statistics = Statistics::of::<B, M>(&module);
        statistics.share::<B, M>(&module, group)?;
    }
    let mut failed = None;
    let module = replace_tensors::<B, M>(module, &mut |path, own| {
        if alone {
            return Some(own());
        }
        if failed.is_some() || statistics.contains(path) {
            return None;
        }
        receive(group, path, own())
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
