//! What never changes of a managed tensor.

use burn_backend::tensor::Device;
use burn_backend::{Backend, DType, Shape};

use crate::error::OpResult;
use crate::node::extent::Extent;
use crate::record::op::OpInfo;

/// The properties of a tensor that never change.
pub(crate) struct TensorMeta<B: Backend> {
    /// The operation that made the tensor.
    pub op: &'static OpInfo,
    /// Its number on the thread that made it, in the order of operations.
    pub id: u64,
    /// Which call of the operation it is in its scope.
    pub call: u32,
    pub shape: Shape,
    pub dtype: DType,
    pub extent: Extent,
    pub device: Device<B>,
    /// Whether a reshape of it is a view.
    pub contiguous: bool,
    /// Whether the storage exists during uses only: the elements are delivered, or computed from
    /// delivered ones alone. Its content is [`Content::Delivered`](super::content::Content).
    pub is_delivered: bool,
}

impl<B: Backend> TensorMeta<B> {
    /// Whether it may be a parameter of a unit, or a view or cast of one. Each operand of an
    /// operation is asked, so the answer needs no lock.
    #[inline]
    pub fn may_be_in_unit(&self) -> bool {
        self.op.is_parameter || self.is_delivered
    }

    /// The tensor as errors name it.
    pub fn result(&self) -> OpResult {
        OpResult {
            op: self.op.name,
            shape: self.shape.to_vec(),
            dtype: self.dtype,
            number: self.id,
        }
    }
}
