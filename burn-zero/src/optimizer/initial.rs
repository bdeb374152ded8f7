//! The same weights on all ranks.

use burn::module::{AutodiffModule, ModuleMapper, Param};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData, backend::AutodiffBackend};

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
    let mut from_first = FromFirst {
        group,
        path: Vec::new(),
        failed: None,
    };
    let module = module.map(&mut from_first);
    match from_first.failed {
        Some(error) => Err(error),
        None => Ok(module),
    }
}

struct FromFirst<'a> {
    group: &'a dyn ProcessGroup,
    path: Vec<String>,
    failed: Option<ZeroError>,
}

impl FromFirst<'_> {
    /// Rank 0's data.
    fn receive(&mut self, own: TensorData) -> TensorData {
        if self.failed.is_some() || self.group.world_size() == 1 {
            return own;
        }
        match self.try_receive(own.clone()) {
            Ok(data) => data,
            Err(error) => {
                self.failed = Some(error);
                own
            }
        }
    }

    fn try_receive(&self, own: TensorData) -> Result<TensorData, ZeroError> {
        let label = format!("initial {}", self.path.join("."));
        let (shape, dtype) = (own.shape.clone(), own.dtype);
        let buffer_dtype = match dtype {
            DType::F32 => BufferDtype::F32,
            DType::BF16 => BufferDtype::Bf16,
            DType::F16 => BufferDtype::F16,
            // Rare and small: no collective of their own.
            _ => {
                let bytes = match self.group.rank() {
                    0 => own.bytes.to_vec(),
                    _ => Vec::new(),
                };
                let first = self.group.gather_bytes(&label, bytes)?.swap_remove(0);
                return Ok(TensorData::from_bytes_vec(first, shape, dtype));
            }
        };
        let buffer = HostBuffer::from_f32(buffer_dtype, floats(own));
        let received = self.group.broadcast(&label, 0, buffer)?.into_f32();
        Ok(TensorData::new(received, shape).convert_dtype(dtype))
    }
}

impl<B: AutodiffBackend> ModuleMapper<B> for FromFirst<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let (device, dtype) = (tensor.device(), tensor.dtype());
        let requires_grad = tensor.is_require_grad();
        let data = self.receive(tensor.inner().into_data());
        let tensor = Tensor::from_data(data, (&device, dtype));
        Param::from_mapped_value(id, tensor.set_require_grad(requires_grad), mapper)
    }

    fn map_int<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Int>>,
    ) -> Param<Tensor<B, D, Int>> {
        let (id, tensor, mapper) = param.consume();
        let (device, dtype) = (tensor.device(), tensor.dtype());
        let tensor = Tensor::from_data(self.receive(tensor.into_data()), (&device, dtype));
        Param::from_mapped_value(id, tensor, mapper)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Bool>>,
    ) -> Param<Tensor<B, D, Bool>> {
        let (id, tensor, mapper) = param.consume();
        let device = tensor.device();
        let tensor = Tensor::from_data(self.receive(tensor.into_data()), &device);
        Param::from_mapped_value(id, tensor, mapper)
    }
}
