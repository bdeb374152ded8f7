//! A tensor in parts in the host memory of the ranks, gathered whenever an operation uses it.
//! Parameters of stage 3 are stored so until all of them are known and cut into shards.

use std::sync::Arc;

use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Shape, TensorData};
use burn_backend::tensor::{Device, FloatTensor};
use burn_checkpoint::delivered;
use burn_ranks::shard::balanced_offsets;
use burn_ranks::{BufferDtype, HostBuffer, ProcessGroup, Split};

use super::refused;
use crate::error::{ZeroError, raise};
use crate::host::floats;

/// The parts of a tensor, of which this rank has one. Their lengths differ by at most 1.
pub(crate) struct Parts {
    group: Arc<dyn ProcessGroup>,
    /// Names the tensor in collectives.
    label: String,
    shape: Shape,
    dtype: DType,
    /// By rank: the position of the first element of its part; and the end.
    offsets: Vec<usize>,
    own: HostBuffer,
}

impl Parts {
    /// This rank's part of `whole`, of which all ranks have the same elements.
    pub(crate) fn of(
        group: &Arc<dyn ProcessGroup>,
        label: String,
        whole: TensorData,
        buffer_dtype: BufferDtype,
    ) -> Self {
        let (shape, dtype) = (whole.shape.clone(), whole.dtype);
        let offsets = balanced_offsets(whole.num_elements(), group.world_size());
        let own = offsets[group.rank()]..offsets[group.rank() + 1];
        Self {
            offsets,
            own: HostBuffer::from_f32(buffer_dtype, floats(whole)[own].to_vec()),
            group: group.clone(),
            label,
            shape,
            dtype,
        }
    }

    /// Gathers the whole tensor.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(crate) fn gather(&self) -> Result<TensorData, ZeroError> {
        let counts = self.offsets.windows(2).map(|part| part[1] - part[0]);
        let split = Split::Counts(counts.collect());
        let whole = self
            .group
            .all_gather(&self.label, self.own.clone(), split)?
            .into_f32();
        Ok(TensorData::new(whole, self.shape.clone()).convert_dtype(self.dtype))
    }

    /// A tensor that is gathered when an operation uses it.
    ///
    /// # Errors
    ///
    /// [`ShardingFault::NoRemat`](crate::ShardingFault::NoRemat).
    pub(crate) fn leaf<B: AutodiffBackend>(
        self,
        device: &Device<B>,
    ) -> Result<FloatTensor<B>, ZeroError> {
        let (shape, dtype) = (self.shape.clone(), self.dtype);
        let gather = move || raise(self.gather());
        let leaf = delivered::<B>(shape, dtype, device, gather);
        Ok(leaf.map_err(refused)?)
    }
}
